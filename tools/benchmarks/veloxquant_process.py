"""Runs inside VeloxQuant-MLX's environment: times its appends and its attention.

Imports nothing of tqstore.  Reads {answer, the arguments of the function of that name} from
standard input, writes {answer: seconds} to standard output.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import mlx.core as mx
from veloxquant_mlx.cache.base import KVCacheConfig  # type: ignore[import-not-found]
from veloxquant_mlx.cache.turboquant_cache import (  # type: ignore[import-not-found]
    TurboQuantKVCache,
)

WARM_UP = 4
STEPS = 5


def seconds_a_vector(num_vectors: int, head_dim: int) -> float:
    count = num_vectors + WARM_UP
    config = KVCacheConfig(
        method="turboquant_prod", head_dim=head_dim, bit_width_inlier=4, capacity=count
    )
    cache = TurboQuantKVCache(config)
    keys, values = (
        mx.random.normal((count, head_dim), key=mx.random.key(seed)).astype(mx.float16)
        for seed in (1, 2)
    )
    vectors = [(keys[i], values[i]) for i in range(count)]
    mx.eval(vectors)
    started = 0.0
    for i, (key, value) in enumerate(vectors):
        if i == WARM_UP:
            started = time.perf_counter()
        cache.append_key(key)
        cache.append_value(value)
    return (time.perf_counter() - started) / num_vectors


def seconds_a_step(num_tokens: int, heads: int, queries: int, head_dim: int) -> float:
    """A cache holds one head and takes one query at a time; its faster paths are on."""
    config = KVCacheConfig(
        method="turboquant_prod",
        head_dim=head_dim,
        bit_width_inlier=4,
        capacity=num_tokens + STEPS + 1,
        enable_vectorized_attend=True,
        enable_fused_query_dot=True,
    )
    vectors = mx.random.normal((num_tokens, head_dim), key=mx.random.key(1)).astype(mx.float16)
    asked = mx.random.normal((queries, head_dim), key=mx.random.key(2)).astype(mx.float16)
    mx.eval(vectors, asked)
    caches = [TurboQuantKVCache(config) for _ in range(heads)]
    for cache in caches:
        for vector in vectors:
            cache.append_key(vector)
            cache.append_value(vector)
    taken = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        for cache in caches:
            cache.append_key(vectors[0])
            cache.append_value(vectors[0])
            mx.eval([cache.attend(query) for query in asked])
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


ANSWERS = {function.__name__: function for function in (seconds_a_vector, seconds_a_step)}

if __name__ == "__main__":
    request = json.load(sys.stdin)
    name = request.pop("answer")
    print(json.dumps({name: ANSWERS[name](**request)}))
