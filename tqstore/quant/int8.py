"""`int8`: 255 even steps between minus and plus a vector's largest magnitude, not rotated.

x_hat = unit * scale * (code - 128), codes 1..255; the scale is largest / 127 rounded to float16.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.codec import Prepared, Streams
from tqstore.quant.levels import UniformLevels
from tqstore.quant.scale import (
    clip_to,
    page_units,
    reciprocal,
    round_scales,
    scale_scores,
    scale_weights,
    sum_pages,
)
from tqstore.quant.widen import widened

_ZERO = 128
_LARGEST = 127


class Int8Codec:
    """Streams: `codes` uint8 [.., dim], `scales` float16, `units` float32."""

    def __init__(self, dim: int, dtype: mx.Dtype) -> None:
        self._levels = UniformLevels(8, dim, zero=_ZERO)
        self._dtype = dtype

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        x = widened(x)
        units = page_units(x)  # [pages, heads]
        largest = mx.max(mx.abs(x), axis=-1) / units[..., None]  # [pages, heads, tokens]
        scales = round_scales(largest / _LARGEST)
        codes = _codes(x, (1.0 / units)[..., None, None], reciprocal(scales)[..., None])
        return {"codes": codes, "scales": scales, "units": units}

    def decode(self, streams: Streams) -> mx.array:
        levels = self._levels.values(streams["codes"])
        scaled = levels * streams["scales"].astype(mx.float32)[..., None]
        return clip_to(scaled * streams["units"][..., None, None], self._dtype)

    def prepare(self, queries: mx.array) -> Prepared:
        return Prepared(queries.astype(mx.float32))

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        products = self._levels.dot(prepared.queries, streams["codes"])
        return scale_scores(products, streams["scales"], streams["units"])

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        scaled = scale_weights(weights, streams["scales"])
        return sum_pages(self._levels.combine(scaled, streams["codes"]), streams["units"])

    def finish(self, accumulated: mx.array) -> mx.array:
        return accumulated


@mx.compile
def _codes(x: mx.array, per_unit: mx.array, per_scale: mx.array) -> mx.array:
    # Two multiplications, because their product may be beyond float32.  A scale that was rounded
    # down may put the largest coordinate just above 127.
    steps = mx.clip(mx.round(x * per_unit * per_scale), -_LARGEST, _LARGEST)
    return (steps + _ZERO).astype(mx.uint8)
