"""Peak memory of a long prefill, against mlx-lm's dense cache fed the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.workshop import Workshop

NAME = "prefill-memory"
TOKENS = 16_384
CHUNK_TOKENS = 2048  # what mlx-lm feeds at a time
# Gemma 3 270M: layers, key heads, head dim, window of all but every sixth layer.
LAYERS, HEADS, DIM, WINDOW, GLOBAL_EVERY = 18, 1, 256, 512, 6


def run(workshop: Workshop) -> list[Row]:
    tokens = min(TOKENS, workshop.sizes.tokens)
    peaks = {}
    for name, feed in (("ours", packed_prefill), ("dense", dense_prefill)):
        workshop.progress(f"{NAME}: {name}", 0, 1)
        peaks[name] = peak_nbytes(lambda feed=feed: feed(tokens))  # type: ignore[misc]
    ours, expected = peaks["ours"]
    dense, _ = peaks["dense"]
    note = f"{tokens:,} tokens in chunks of {CHUNK_TOKENS:,}, {LAYERS} layers, float32"
    return [
        Row(NAME, ours / 1e6, "MB", "mlx-lm's caches", dense / 1e6, note=f"prod4/int8; {note}"),
        Row(
            f"{NAME}/bound",
            ours / 1e6,
            "MB",
            "packed bytes and one layer's transient",
            expected / 1e6,
            Bar(1.05),
            note,
        ),
    ]


def peak_nbytes(feed: Callable[[], int]) -> tuple[int, int]:
    """MLX's peak memory above what was in use before, and what `feed` says it should be."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    expected = feed()
    return mx.get_peak_memory() - before, expected


def chunk(index: int, layer: int, tokens: int) -> list[mx.array]:
    """Keys and values [heads, tokens, dim] as a layer makes them when its turn comes."""
    key = mx.random.key(index * LAYERS + layer)
    return [mx.random.normal((HEADS, tokens, DIM), key=k) for k in mx.random.split(key)]


def windows() -> list[int | None]:
    return [None if (i + 1) % GLOBAL_EVERY == 0 else WINDOW for i in range(LAYERS)]


def packed_prefill(tokens: int) -> int:
    """Feeds our cache and returns the bytes it holds plus what one layer needs in passing."""
    spec = tqstore.CacheSpec(
        tuple(tqstore.LayerSpec(HEADS, DIM, window=w, dtype="float32") for w in windows())
    )
    cache = tqstore.KVCache(spec, check_finite=False)
    transient = 0
    for index, first in enumerate(range(0, tokens, CHUNK_TOKENS)):
        count = min(CHUNK_TOKENS, tokens - first)
        for layer in range(LAYERS):
            seen = cache.append_and_fetch(layer, *chunk(index, layer, count))
            mx.eval(seen)
            fetched = sum(array.nbytes for array in seen)
            # The dense view that attention gets, its parts while they are joined, the new tokens.
            transient = max(transient, 2 * fetched)
            del seen
    return cache.nbytes + transient


def dense_prefill(tokens: int) -> int:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    caches: list[Any] = [KVCache() if w is None else RotatingKVCache(w) for w in windows()]
    for index, first in enumerate(range(0, tokens, CHUNK_TOKENS)):
        count = min(CHUNK_TOKENS, tokens - first)
        for layer, cache in enumerate(caches):
            keys, values = chunk(index, layer, count)
            mx.eval(cache.update_and_fetch(keys[None], values[None]))
    return sum(cache.nbytes for cache in caches)
