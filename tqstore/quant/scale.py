"""One float16 scale a vector, relative to one power of two a head and page.

Owns the number format of `scales` and `units`.  A page's unit is the power of two that brings its
largest coordinate to where no norm can overflow float16 and the most smaller ones stay normal:
the norm of a vector is at most sqrt(dim) times its largest coordinate, and scales are kept below
2^14, with a safety of 4 above.  It is found by integer operations on the float's exponent, so every
device and every split of an append agrees on it, and multiplying by it is exact.
"""

from __future__ import annotations

from math import ceil, log2

import mlx.core as mx

MAX_SCALE = 65504.0  # of float16
_MANTISSA_BITS = 23


def page_units(x: mx.array) -> mx.array:
    """Finite float32 [pages, heads, tokens, dim] -> float32 powers of two [pages, heads].

    The unit stops at 2^-126: coordinates near there lose bits of scale, and a device that flushes
    subnormal floats decodes subnormal coordinates to zero.
    """
    headroom = 13 - ceil(log2(x.shape[-1]) / 2)
    largest = mx.max(mx.abs(x), axis=(-2, -1))
    exponent = mx.view(largest, mx.int32) >> _MANTISSA_BITS  # biased by 127
    return mx.view(mx.maximum(exponent - headroom, 1) << _MANTISSA_BITS, mx.float32)


def round_scales(scales: mx.array) -> mx.array:
    """float32 >= 0 -> float16, saturating.  What underflows is 0: that vector decodes to zero."""
    return mx.minimum(scales, MAX_SCALE).astype(mx.float16)


def reciprocal(scales: mx.array) -> mx.array:
    """1 / scale as float32, and 0 for a scale of 0 (a vector that decodes to zero)."""
    scales = scales.astype(mx.float32)
    return mx.where(scales > 0, 1.0 / mx.maximum(scales, 1e-30), 0.0)


def clip_to(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """`x` limited to the finite range of `dtype`, so that a later cast to it stays finite."""
    limit = mx.finfo(dtype).max
    return mx.clip(x, -limit, limit)


def scale_scores(products: mx.array, scales: mx.array, units: mx.array) -> mx.array:
    """[pages, heads, rows, tokens] times each token's scale [pages, heads, tokens] and unit."""
    return products * (scales.astype(mx.float32)[..., None, :] * units[..., None, None])


def scale_weights(weights: mx.array, scales: mx.array) -> mx.array:
    """[pages, heads, rows, tokens] times each token's scale; `sum_pages` applies the unit."""
    return weights * scales.astype(mx.float32)[..., None, :]


def sum_pages(products: mx.array, units: mx.array) -> mx.array:
    """[pages, heads, rows, dim] times units [pages, heads], summed to [heads, rows, dim]."""
    return (products * units[..., None, None]).sum(0)
