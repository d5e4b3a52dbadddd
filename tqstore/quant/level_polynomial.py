"""Small tables of levels as polynomials of the code.

A gather of numbers out of a table is slow on a CPU and a chain of selections not much faster; the
odd polynomial through all levels of a symmetric table takes a fraction of either, fused, and is
within 3e-7 of every level, relatively (docs/quantization.md).  Owns how it is found and evaluated.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.quant.widen import codes_as_floats

MAX_BITS = 5
# MLX fuses at most about eleven operations one after another, and compilers vectorise its loops up
# to about ten arrays: more coefficients go in two halves.
_FUSED_COEFFICIENTS = 8


class LevelPolynomial:
    """level(code) = t * p(t^2 - mid), t = code - centre, for ascending levels that are symmetric
    (`levels[i] == -levels[-1 - i]`), 2 to 2^MAX_BITS of them."""

    def __init__(self, levels: npt.NDArray[np.float64]) -> None:
        positive = levels[len(levels) // 2 :]
        t = np.arange(len(positive)) + 0.5  # codes less their centre, of the upper half
        # With few coefficients powers of t^2 do; with many they must be about its middle.
        is_long = len(positive) > _FUSED_COEFFICIENTS
        mid = (t[0] ** 2 + t[-1] ** 2) / 2 if is_long else 0.0
        z = t**2 - mid
        largest = np.abs(z).max()
        solved = np.linalg.solve(np.vander(z / largest, increasing=True), positive / t)
        coefficients = solved / largest ** np.arange(len(positive))
        self._coefficients = [mx.array(float(one), mx.float32) for one in coefficients]
        self._centre = mx.array((len(levels) - 1) / 2, mx.float32)
        self._mid = mx.array(mid, mx.float32)
        mx.eval(self._coefficients, self._centre, self._mid)

    def __call__(self, codes: mx.array) -> mx.array:
        """uint8 codes -> float32 levels of the same shape."""
        coefficients, half = self._coefficients, _FUSED_COEFFICIENTS
        if len(coefficients) <= half:
            return _whole(codes, self._centre, *coefficients)
        z = _variable(codes, self._centre, self._mid)
        low, high = _part(z, *coefficients[:half]), _part(z, *coefficients[half:])
        return _joined(codes, self._centre, z, low, high)


@mx.compile
def _whole(codes: mx.array, centre: mx.array, *coefficients: mx.array) -> mx.array:
    t = codes_as_floats(codes) - centre
    return _evaluated(coefficients, t * t) * t


@mx.compile
def _variable(codes: mx.array, centre: mx.array, mid: mx.array) -> mx.array:
    t = codes_as_floats(codes) - centre
    return t * t - mid


@mx.compile
def _part(z: mx.array, *coefficients: mx.array) -> mx.array:
    return _evaluated(coefficients, z)


@mx.compile
def _joined(
    codes: mx.array, centre: mx.array, z: mx.array, low: mx.array, high: mx.array
) -> mx.array:
    for _ in range(_FUSED_COEFFICIENTS.bit_length() - 1):
        z = z * z
    return (low + high * z) * (codes_as_floats(codes) - centre)


def _evaluated(coefficients: tuple[mx.array, ...], z: mx.array) -> mx.array:
    """The polynomial at z by Estrin's scheme, which is less deep than Horner's."""
    terms = list(coefficients)
    while len(terms) > 1:
        terms = [low + high * z for low, high in zip(terms[::2], terms[1::2], strict=True)]
        z = z * z
    return mx.broadcast_to(terms[0], z.shape)
