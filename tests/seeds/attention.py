"""Exact attention of one head in float64 numpy, and the vectors the tests of this folder share."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.dense_attention import Float64, dense_attention, to_float64


def attention(queries: mx.array, keys: mx.array, values: mx.array) -> Float64:
    """[rows, d] over all of [n, d], in float64: row by row, so that no mask is involved."""
    dense = [to_float64(side)[None] for side in (keys, values)]
    rows = [dense_attention(to_float64(row)[None, None], *dense)[0, 0] for row in queries]
    return np.stack(rows)


def relative_error(output: mx.array, exact: Float64) -> float:
    """|output - exact| / |exact| over all."""
    return float(np.linalg.norm(to_float64(output) - exact) / np.linalg.norm(exact))


def normals(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
