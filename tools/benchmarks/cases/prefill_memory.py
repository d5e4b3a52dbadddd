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
    ours, packed = measured(workshop, "packed", lambda: packed_prefill(tokens, windows()))
    dense, _ = measured(workshop, "dense", lambda: dense_prefill(tokens))
    # What the largest layer needs in passing: its peak alone, less what it keeps.
    alone, kept = measured(workshop, "one layer", lambda: packed_prefill(tokens, [None]))
    expected = packed + alone - kept
    note = f"{tokens:,} tokens in chunks of {CHUNK_TOKENS:,}, {LAYERS} layers, float32"
    return [
        Row(NAME, ours / 1e6, "MB", "mlx-lm's caches", dense / 1e6, note=f"prod4/int8; {note}"),
        Row(
            f"{NAME}/bound",
            ours / 1e6,
            "MB",
            "packed bytes and what one layer alone needs in passing",
            expected / 1e6,
            Bar(1.05),
            note,
        ),
    ]


def measured(workshop: Workshop, what: str, feed: Callable[[], int]) -> tuple[int, int]:
    """MLX's peak memory above what was in use before, and the bytes `feed` says are kept."""
    workshop.progress(f"{NAME}: {what}", 0, 1)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kept = feed()
    return mx.get_peak_memory() - before, kept


def chunk(index: int, layer: int, tokens: int) -> list[mx.array]:
    """Keys and values [heads, tokens, dim] as a layer makes them when its turn comes."""
    key = mx.random.key(index * LAYERS + layer)
    return [mx.random.normal((HEADS, tokens, DIM), key=k) for k in mx.random.split(key)]


def windows() -> list[int | None]:
    return [None if (i + 1) % GLOBAL_EVERY == 0 else WINDOW for i in range(LAYERS)]


def packed_prefill(tokens: int, layer_windows: list[int | None]) -> int:
    """Feeds our cache; the bytes it holds in the end."""
    spec = tqstore.CacheSpec(
        tuple(tqstore.LayerSpec(HEADS, DIM, window=w, dtype="float32") for w in layer_windows)
    )
    cache = tqstore.KVCache(spec, check_finite=False)
    for index, first in enumerate(range(0, tokens, CHUNK_TOKENS)):
        count = min(CHUNK_TOKENS, tokens - first)
        for layer in range(len(layer_windows)):
            mx.eval(cache.append_and_fetch(layer, *chunk(index, layer, count)))
    return cache.nbytes


def dense_prefill(tokens: int) -> int:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    caches: list[Any] = [KVCache() if w is None else RotatingKVCache(w) for w in windows()]
    for index, first in enumerate(range(0, tokens, CHUNK_TOKENS)):
        count = min(CHUNK_TOKENS, tokens - first)
        for layer, cache in enumerate(caches):
            keys, values = chunk(index, layer, count)
            mx.eval(cache.update_and_fetch(keys[None], values[None]))
    return sum(cache.nbytes for cache in caches)
