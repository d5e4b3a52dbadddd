"""Attention and masks in float64 numpy, written apart from the package: the oracle of its tests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def to_float64(array: mx.array) -> Float64:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def visible(
    num_queries: int, num_tokens: int, window: int | None, sink_tokens: int
) -> npt.NDArray[np.bool_]:
    """[queries, tokens]: one rule a line, one pair at a time."""
    seen = np.zeros((num_queries, num_tokens), np.bool_)
    for i in range(num_queries):
        query = num_tokens - num_queries + i
        for key in range(query + 1):
            seen[i, key] = window is None or query - key < window or key < sink_tokens
    return seen


def dense_attention(
    queries: Float64,
    keys: Float64,
    values: Float64,
    *,
    window: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
) -> Float64:
    """queries [query_heads, n, d] at the last n positions of keys [kv_heads, tokens, d]."""
    group = queries.shape[0] // keys.shape[0]
    seen = visible(queries.shape[1], keys.shape[1], window, sink_tokens)
    outputs = []
    for head, rows in enumerate(queries):
        scores = rows @ keys[head // group].T * (scale or keys.shape[2] ** -0.5)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        outputs.append(weights @ values[head // group])
    return np.stack(outputs)
