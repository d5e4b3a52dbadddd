"""`mse`: Lloyd-Max codes of a rotated vector (TurboQuant, section 3.1), and its scale.

Owns the quantizer of directions that `prod` shares, and the scale rules.  A rule is a choice made
at encode time: it changes which number is stored as the scale and nothing about how it is read.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.codebook import lloyd_max
from tqstore.quant.levels import TableLevels
from tqstore.quant.nearest import NearestLevel
from tqstore.quant.scale import reciprocal, round_scales

SCALE_RULES = ("norm", "matched", "unbiased")


def norms(x: mx.array) -> mx.array:
    """Euclidean norms over the last axis, float32."""
    return mx.sqrt(mx.sum(mx.square(x), axis=-1))


class LloydMaxQuantizer:
    """Codes of the direction x/|x| against the codebook of `dim` and `bits`.

    Scale rules, for a direction's levels c and codes' reconstruction scale * c:
    `norm` |x|, the paper's, least squared error; `matched` |x|/|c|, which keeps the norm, best for
    softmax at 3 bits and more; `unbiased` |x|^2 / <x, c>, which keeps every inner product's mean.
    """

    def __init__(self, dim: int, bits: int, scale_rule: str = "norm") -> None:
        assert scale_rule in SCALE_RULES
        codebook = lloyd_max(dim, bits)
        self.bits = bits
        self.levels = TableLevels(codebook.levels, bits, dim)
        self._nearest = NearestLevel(codebook.thresholds)
        self._scale_rule = scale_rule

    def directions(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """float32 [..., dim] -> (x divided by its ROUNDED norm, that norm as float16 [...])."""
        scales = round_scales(norms(x))
        return x * reciprocal(scales)[..., None], scales

    def codes(self, directions: mx.array) -> mx.array:
        """Vectors of norm 1 [..., dim] -> uint8 codes."""
        return self._nearest(directions)

    def quantize(self, rotated: mx.array) -> tuple[mx.array, mx.array]:
        directions, scales = self.directions(rotated)
        codes = self.codes(directions)
        if self._scale_rule == "norm":
            return codes, scales
        levels = self.levels.of_codes(codes)
        if self._scale_rule == "matched":
            ratio = norms(directions) / norms(levels)
        else:
            products = mx.sum(directions * levels, axis=-1)
            ratio = mx.sum(mx.square(directions), axis=-1) / mx.maximum(products, 1e-30)
        return codes, round_scales(scales.astype(mx.float32) * ratio)
