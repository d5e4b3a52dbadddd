"""tools/compare_seeds: its verdicts and its table.  Runs nothing of the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("mlx_lm")

from tools.seed_comparison import __main__ as tool
from tools.seed_comparison.cases import INPUTS, NUM_OUTLIERS


def found(margin: float) -> dict[str, Any]:
    return {
        "inputs": "normal",
        "method": "turboquant_prod",
        "bits": 3,
        "ours": 0.25,
        "theirs": 0.5,
        "margin": margin,
        "our_bytes": 184.0,
        "their_bytes": 176.0,
    }


@pytest.mark.parametrize(
    ("margin", "said"), [(9.0, "less"), (2.0, "equal"), (-2.0, "equal"), (-9.0, "MORE")]
)
def test_a_difference_must_be_more_than_chance(margin: float, said: str) -> None:
    assert tool.verdict(found(margin)) == said


def test_the_table_replaces_what_is_between_the_markers() -> None:
    text = f"before\n{tool.BEGIN}old\n{tool.END}after\n"
    written = tool.with_figures(text, tool.markdown([found(9.0)], 20))
    assert "old" not in written
    assert "| normal | prod | 3 | 0.2500 | 0.5000 | 0.50 | less | 184 | 176 |" in written
    assert tool.with_figures(written, "new\n").startswith(f"before\n{tool.BEGIN}new\n")
    with pytest.raises(ValueError, match="lacks"):
        tool.with_figures("no markers", "new\n")


def test_the_document_has_the_markers() -> None:
    tool.with_figures(tool.DOCUMENT.read_text(), "new\n")


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda inputs: inputs.name)
def test_inputs_are_what_they_say(inputs: Any) -> None:
    queries, keys, values = (np.array(side).astype(float) for side in inputs.arrays(seed=0))
    assert keys.shape == values.shape == (inputs.tokens, inputs.head_dim)
    logits = queries @ keys.T / inputs.head_dim**0.5
    np.testing.assert_allclose(logits.std(axis=1), inputs.spread, rtol=0.01)
    sizes = np.sort(np.abs(keys).mean(axis=0))
    is_outlying = sizes > 5 * np.median(sizes)
    assert is_outlying.sum() == (NUM_OUTLIERS if inputs.outlier_gain > 5 else 0)
