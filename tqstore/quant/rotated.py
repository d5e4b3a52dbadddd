"""The shape that `mse` and `uni` share: rotate, scale, code; multiply in rotated space.

x_hat = unit * R^T(scale * level[codes]).  Owns no quantizer: it is given one.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from tqstore.quant import bitpack
from tqstore.quant.codec import Prepared, Streams
from tqstore.quant.levels import Levels
from tqstore.quant.rotation import Rotation
from tqstore.quant.scale import clip_to, page_units, scale_scores, scale_weights, sum_pages
from tqstore.quant.widen import widened


class Quantizer(Protocol):
    """Rotated vectors -> what their coordinates and scales become."""

    bits: int

    @property
    def levels(self) -> Levels: ...

    def quantize(self, rotated: mx.array) -> tuple[mx.array, mx.array]:
        """float32 [..., dim] -> uint8 codes [..., dim] and float16 scales [...]."""
        ...


class RotatedCodec:
    """Streams: `codes`, `scales`, `units`."""

    def __init__(self, rotation: Rotation, quantizer: Quantizer, dtype: mx.Dtype) -> None:
        self._rotation = rotation
        self._quantizer = quantizer
        self._levels = quantizer.levels
        self._dtype = dtype

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        x = widened(x)
        units = page_units(x)
        rotated = self._rotation.apply(x * (1.0 / units)[..., None, None])
        codes, scales = self._quantizer.quantize(rotated)
        return {
            "codes": bitpack.pack(codes, self._quantizer.bits),
            "scales": scales,
            "units": units,
        }

    def decode(self, streams: Streams) -> mx.array:
        levels = self._levels.values(streams["codes"])  # [pages, heads, tokens, dim]
        scaled = self._rotation.inverse(levels * streams["scales"].astype(mx.float32)[..., None])
        return clip_to(scaled * streams["units"][..., None, None], self._dtype)

    def prepare(self, queries: mx.array) -> Prepared:
        return Prepared(self._rotation.apply_to_rows(queries.astype(mx.float32)))

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        products = self._levels.dot(prepared.queries, streams["codes"])
        return scale_scores(products, streams["scales"], streams["units"])

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        scaled = scale_weights(weights, streams["scales"])
        return sum_pages(self._levels.combine(scaled, streams["codes"]), streams["units"])

    def finish(self, accumulated: mx.array) -> mx.array:
        return self._rotation.inverse_of_rows(accumulated)
