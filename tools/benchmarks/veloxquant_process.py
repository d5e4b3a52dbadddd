"""Runs inside VeloxQuant-MLX's environment: times its appends.  Imports nothing of tqstore.

Reads {num_vectors, head_dim} from standard input, writes {seconds_a_vector} to standard output.
"""

from __future__ import annotations

import json
import sys
import time

import mlx.core as mx
from veloxquant_mlx.cache.base import KVCacheConfig  # type: ignore[import-not-found]
from veloxquant_mlx.cache.turboquant_cache import (  # type: ignore[import-not-found]
    TurboQuantKVCache,
)

WARM_UP = 4


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


if __name__ == "__main__":
    request = json.load(sys.stdin)
    seconds = seconds_a_vector(request["num_vectors"], request["head_dim"])
    print(json.dumps({"seconds_a_vector": seconds}))
