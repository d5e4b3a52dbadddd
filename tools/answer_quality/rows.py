"""What is measured: each row names a cache, what its elements cost, and how to run the model on it.

Bits are a cache's own, all side data and padding included: ours from the page layout, which is
what memory and disk hold; the others' from what their arrays hold in a 16-bit model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tools.answer_quality import forward
from tqstore.presets import PRESETS

Hidden = Callable[[Any, Sequence[int]], mx.array]
TQSTORE = "tqstore"
MLX_LM = "mlx-lm"


@dataclass(frozen=True)
class Bits:
    """Bits of a key element and of a value element."""

    keys: float
    values: float


@dataclass(frozen=True)
class Row:
    """`run` gives the hidden states of a text; `bits` what the cache costs."""

    name: str
    package: str
    bits: Callable[[Any], Bits]
    run: Hidden
    note: str = ""


def tqstore_row(keys: str, values: str) -> Row:
    """Attention reads nothing but sealed pages, of the newest tokens too."""

    def run(model: Any, tokens: Sequence[int]) -> mx.array:
        return forward.hidden_states(model, tokens, forward.whole_pages(model, keys, values))

    presets = [name for name, one in PRESETS.items() if (one.keys, one.values) == (keys, values)]
    note = f"preset `{presets[0]}`" if presets else ""
    return Row(f"{keys} / {values}", TQSTORE, _page_bits(keys, values), run, note)


def running_row(preset: str) -> Row:
    """The same pages as an application meets them: a page at a time, the newest tokens exact."""
    chosen = PRESETS[preset]

    def run(model: Any, tokens: Sequence[int]) -> mx.array:
        cache = forward.as_it_runs(model, chosen.keys, chosen.values)
        return forward.hidden_states(model, tokens, cache, step=forward.STEP)

    note = f"fed {forward.STEP} tokens at a time: the newest 64 to 128 are still exact"
    return Row(
        f"preset {preset}, in use", TQSTORE, _page_bits(chosen.keys, chosen.values), run, note
    )


def mlx_row(bits: int) -> Row:
    def run(model: Any, tokens: Sequence[int]) -> mx.array:
        return forward.hidden_states(model, tokens, forward.mlx_quantized(model, bits))

    each = bits + 2 * 16 / 64  # a scale and a bias for 64 elements
    note = "" if 32 % bits == 0 else "its class allocates too little for 6 bits; mended here"
    return Row(f"QuantizedKVCache {bits} bits", MLX_LM, lambda _: Bits(each, each), run, note)


def _page_bits(keys: str, values: str) -> Callable[[Any], Bits]:
    def bits(model: Any) -> Bits:
        spec = forward.page_spec(model, keys, values)
        return Bits(spec.key_bits, spec.value_bits)

    return bits


PAIRS = (
    *((preset.keys, preset.values) for preset in PRESETS.values()),
    ("split4.5+mean", "split4.5"),
    ("mse4+mean+out16", "mse4"),
    ("mse4", "mse4"),
    ("prod4+mean+out16", "int8"),
    ("split3.5", "split3.5"),
    ("split2.5", "split2.5"),
    ("split6.5+mean", "uni6"),
    ("uni6+mean+out16", "uni6"),
    ("uni8", "uni8"),
    ("int8", "int8"),
)


def own_rows() -> list[Row]:
    """Everything that runs in this process, in the order of the table."""
    pairs = list(dict.fromkeys(PAIRS))
    return [
        *(mlx_row(bits) for bits in (4, 6, 8)),
        *(tqstore_row(keys, values) for keys, values in pairs),
        *(running_row(name) for name in ("card", "balanced")),
    ]
