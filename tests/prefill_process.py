"""A prompt prefilled in chunks under a small budget, in a process of its own (test_process_memory).

Prints as JSON how much the process grew, at its peak, beyond what it was after a short prompt of
the same kind: libraries and their threads are not the cache's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from tqstore.kv_cache import KVCache
from tqstore.session import Store
from tqstore.spec import CacheSpec, LayerSpec

LAYERS, HEADS, DIM, CHUNK = 6, 4, 128, 512


def spec() -> CacheSpec:
    return CacheSpec([LayerSpec(HEADS, DIM, dtype="float16")] * LAYERS)


def prefill(cache: KVCache, num_tokens: int) -> None:
    cache.tell(np.arange(num_tokens))
    for first in range(0, num_tokens, CHUNK):
        for layer in range(LAYERS):
            keys = mx.random.normal((HEADS, CHUNK, DIM), key=mx.random.key(first)).astype(
                mx.float16
            )
            cache.append(layer, keys, keys)
    cache.flush()


def peak_nbytes() -> int:
    """The most memory this process has had in RAM since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise NotImplementedError("this system does not tell a process' peak memory")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: str, num_tokens: int, budget: int) -> None:
    with Store.open(folder) as store:
        prefill(store.new_cache(spec(), model="ab" * 32, memory_budget=budget), 4 * CHUNK)
    forget_peak()
    before = peak_nbytes()
    with Store.open(folder) as store:
        cache = store.new_cache(spec(), model="cd" * 32, memory_budget=budget)
        prefill(cache, num_tokens)
        stats = cache.stats
    grown = peak_nbytes() - before
    sys.stdout.write(
        json.dumps({"grown_nbytes": grown, "spilled_nbytes": stats.paging["spilled_nbytes"]})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
