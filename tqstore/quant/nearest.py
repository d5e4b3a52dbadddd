"""The nearest level of a symmetric ascending codebook, for every coordinate at once.

No searches and no gathers: a code is the number of thresholds below a coordinate.  By symmetry half
of them, compared with the magnitude, are enough.  Thresholds are arguments of one compiled
function, so all codebooks share its kernel.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_BATCH = 8


class NearestLevel:
    """Coordinates -> uint8 codes of the nearest level; 0 and ties go to the larger code."""

    def __init__(self, thresholds: np.ndarray) -> None:
        """`thresholds` float64 [2^bits - 1], ascending and symmetric around the middle one, 0."""
        self._half = (len(thresholds) + 1) // 2
        positive = thresholds[self._half :]
        padding = np.full(-len(positive) % _BATCH, np.inf)
        self._batches = [
            [mx.array(threshold, mx.float32) for threshold in batch]
            for batch in np.concatenate([positive, padding]).reshape(-1, _BATCH)
        ]
        mx.eval(self._batches)

    def __call__(self, x: mx.array) -> mx.array:
        magnitude = mx.abs(x)
        count = None
        for batch in self._batches:
            above = _count_reached(magnitude, *batch)
            count = above if count is None else count + above
        if count is None:
            return (x >= 0).astype(mx.uint8)
        return _with_sign(x, count, mx.array(self._half, mx.uint8))


@mx.compile
def _count_reached(magnitude: mx.array, *thresholds: mx.array) -> mx.array:
    count = (magnitude >= thresholds[0]).astype(mx.uint8)
    for threshold in thresholds[1:]:
        count = count + (magnitude >= threshold).astype(mx.uint8)
    return count


@mx.compile
def _with_sign(x: mx.array, count: mx.array, half: mx.array) -> mx.array:
    return mx.where(x >= 0, half + count, half - 1 - count)
