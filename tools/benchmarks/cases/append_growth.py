"""What appending a token costs in a long sequence, against the same in a short one.

As a session does it: in a store, the prompt's tokens told before it is fed, then each new one.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import MODEL
from tools.benchmarks.timing import Trial, stopwatch
from tools.benchmarks.workshop import Workshop

NAME = "append-growth"
LONG_OVER_SHORT = 32
FEED_TOKENS = 2048
TIMED_TOKENS = 256  # whole blocks, so that sealing is in


def run(workshop: Workshop) -> list[Row]:
    with tqstore.Store.open(workshop.folder / NAME) as store:
        return _measure(workshop, store)


def _measure(workshop: Workshop, store: tqstore.Store) -> list[Row]:
    sizes = workshop.sizes
    short_tokens = sizes.tokens // 4
    long_tokens = short_tokens * LONG_OVER_SHORT
    caches = {}
    for name, tokens in (("short", short_tokens), ("long", long_tokens)):
        workshop.progress(f"packing {tokens:,} tokens", 0, 1)
        caches[name] = filled(store, sizes.heads, sizes.head_dim, tokens)
    taken = workshop.measure(
        NAME, {name: appending(cache) for name, cache in caches.items()}, rounds=9
    )
    long = caches["long"]
    table_nbytes = long.stats.table_nbytes / len(long.layers[0].table)
    note = f"one layer, {sizes.heads} heads, d={sizes.head_dim}, prod4/int8, sealing and telling in"
    return [
        Row(
            NAME,
            taken["long"] / TIMED_TOKENS * 1e6,
            "us/token",
            f"the same at {short_tokens:,} tokens",
            taken["short"] / TIMED_TOKENS * 1e6,
            Bar(1.1),
            f"at {long_tokens:,} tokens; {note}",
        ),
        Row(
            f"{NAME}/table",
            table_nbytes,
            "bytes/page",
            "the bound",
            64.0,
            Bar(1.0),
            "page-table memory",
        ),
    ]


def filled(store: tqstore.Store, heads: int, dim: int, tokens: int) -> tqstore.KVCache:
    spec = tqstore.CacheSpec((tqstore.LayerSpec(heads, dim),))
    cache = store.new_cache(spec, model=MODEL, check_finite=False)
    cache.tell(np.arange(tokens))
    part = mx.random.normal((heads, FEED_TOKENS, dim), key=mx.random.key(0)).astype(mx.float16)
    for first in range(0, tokens, FEED_TOKENS):
        piece = part[:, : min(FEED_TOKENS, tokens - first)]
        cache.append(0, piece, piece)
    return cache


def appending(cache: tqstore.KVCache) -> Trial:
    shape = (cache.spec.layers[0].kv_heads, 1, cache.spec.layers[0].head_dim)
    token = mx.zeros(shape, mx.float16)
    mx.eval(token)

    def trial() -> float:
        with stopwatch() as watch:
            for _ in range(TIMED_TOKENS):
                cache.tell([0], cache.num_told)
                cache.append(0, token, token)
                mx.eval(cache.layers[0].tail.keys, cache.layers[0].tail.values)
            mx.eval(cache.pager.pool.arenas[0].segments)
        return watch.seconds

    return trial
