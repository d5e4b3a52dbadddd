"""`uni`: even steps with a least-squares scale a vector, read by MLX's own quantized kernels.

x_hat = unit * R^T(scale * (code - (2^bits - 1) / 2)).
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.codebook import uniform_step
from tqstore.quant.levels import UniformLevels
from tqstore.quant.lloyd_max import norms
from tqstore.quant.scale import reciprocal, round_scales


class UniformQuantizer:
    """Codes at the best step for a random direction, then the scale that fits those codes best."""

    def __init__(self, dim: int, bits: int) -> None:
        self.bits = bits
        self._top = 2**bits - 1
        self._step, _ = uniform_step(dim, bits)
        self.levels = UniformLevels(bits, dim, zero=self._top / 2)

    def quantize(self, rotated: mx.array) -> tuple[mx.array, mx.array]:
        per_step = reciprocal(norms(rotated) * self._step)  # [...]
        top = mx.array(self._top, mx.float32)
        codes = _codes(rotated, per_step[..., None], top)
        levels = self.levels.of_codes(codes)
        # Levels are odd multiples of a half, so their norm is at least sqrt(dim) / 2.
        fit = mx.sum(rotated * levels, axis=-1) / mx.sum(mx.square(levels), axis=-1)
        return codes, round_scales(mx.maximum(fit, 0.0))


@mx.compile
def _codes(x: mx.array, per_step: mx.array, top: mx.array) -> mx.array:
    return mx.clip(mx.floor(x * per_step + (top + 1.0) / 2), 0.0, top).astype(mx.uint8)
