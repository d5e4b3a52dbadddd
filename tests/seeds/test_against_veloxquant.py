"""VeloxQuant-MLX itself on the same inputs: the cases of tools/compare_seeds over fewer draws.

Skipped where it isn't installed: it is no dependency, and an environment of its own has it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("veloxquant_mlx", reason="VeloxQuant-MLX is not installed")

from tools.seed_comparison.cases import INPUTS, WIDTHS, Inputs
from tools.seed_comparison.measure import compare

SEEDS = 6
SOME = [inputs for inputs in INPUTS if inputs.head_dim == 128 and not inputs.norm_spread]


@pytest.mark.parametrize("inputs", SOME, ids=lambda inputs: inputs.name)
@pytest.mark.parametrize(
    ("method", "bits"), [(method, bits) for method, widths in WIDTHS.items() for bits in widths]
)
def test_our_error_of_attention_is_not_larger(inputs: Inputs, method: str, bits: int) -> None:
    found = compare(inputs, method, bits, SEEDS)
    if method == "turboquant_mse" and not inputs.options:
        # The same algorithm under another random rotation: equal but for chance.
        assert found.margin > -4 or found.ours < 1.1 * found.theirs
    else:
        assert found.ours < 0.95 * found.theirs
