"""`uni`: even steps with a least-squares scale a vector, read by MLX's own quantized kernels.

x_hat = unit * R^T(scale * (code - (2^bits - 1) / 2)).  Owns the choice of the step: a few fractions
of the vector's own largest coordinate are tried and the one that fits best is kept.  That is nearer
to Lloyd-Max than a search around the best fixed step (docs/quantization.md, "Even steps").
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.codebook import uniform_step
from tqstore.quant.levels import UniformLevels
from tqstore.quant.lloyd_max import norms
from tqstore.quant.scale import reciprocal, round_scales

# By bits: the largest level over the largest coordinate.  Few bits gain from clipping, many do not.
# Below 3 bits the fixed step is best.
_LARGEST_FRACTIONS = {
    3: (0.65, 0.75, 0.85),
    4: (0.8, 0.88, 0.96),
    5: (0.9, 0.95, 1.0),
    6: (0.96, 1.0),
    7: (0.98, 1.0),
    8: (1.0,),
}


class UniformQuantizer:
    """Codes at the best of the tried steps, and the scale that fits those codes best."""

    def __init__(self, dim: int, bits: int) -> None:
        self.bits = bits
        self._top = 2**bits - 1
        self._fixed_step, _ = uniform_step(dim, bits)
        self.levels = UniformLevels(bits, dim, zero=self._top / 2)

    def quantize(self, rotated: mx.array) -> tuple[mx.array, mx.array]:
        steps = self._steps(rotated)
        codes, fit, explained = self._fit(rotated, steps[0])
        for step in steps[1:]:
            other_codes, other_fit, other_explained = self._fit(rotated, step)
            is_better = other_explained > explained
            codes = mx.where(is_better[..., None], other_codes, codes)
            fit = mx.where(is_better, other_fit, fit)
            explained = mx.where(is_better, other_explained, explained)
        return codes, round_scales(mx.maximum(fit, 0.0))

    def _steps(self, rotated: mx.array) -> list[mx.array]:
        """Steps to try, each [...]."""
        if self.bits not in _LARGEST_FRACTIONS:
            return [norms(rotated) * self._fixed_step]
        largest_step = mx.max(mx.abs(rotated), axis=-1) * (2.0 / self._top)
        return [largest_step * fraction for fraction in _LARGEST_FRACTIONS[self.bits]]

    def _fit(self, rotated: mx.array, step: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Codes [..., dim] at `step`, their least-squares scale, the squared norm it explains."""
        codes = _codes(rotated, reciprocal(step)[..., None], mx.array(self._top, mx.float32))
        levels = self.levels.of_codes(codes)
        # Levels are odd multiples of a half: their squares sum to at least dim / 4.
        product = mx.sum(rotated * levels, axis=-1)
        fit = product / mx.sum(mx.square(levels), axis=-1)
        return codes, fit, product * fit


@mx.compile
def _codes(x: mx.array, per_step: mx.array, top: mx.array) -> mx.array:
    return mx.clip(mx.floor(x * per_step + (top + 1.0) / 2), 0.0, top).astype(mx.uint8)
