"""Attention over a context sixteen times the memory it may use, streamed from the store."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import MODEL
from tools.benchmarks.timing import Trial, stopwatch
from tools.benchmarks.workshop import Workshop

NAME = "oversubscribed"
TIMES = 16
CODECS = ("exact/exact", "prod4/int8")


def run(workshop: Workshop) -> list[Row]:
    rows = []
    for index, codecs in enumerate(CODECS):
        nbytes, seconds, error = _measure(workshop, codecs)
        note = (
            f"{codecs}, {TIMES}x the memory budget: attention of one token, largest difference to "
            f"all in memory {error:.1e}"
        )
        rows.append(
            Row(
                NAME if index == 0 else f"{NAME}/{codecs.replace('/', '-')}",
                nbytes / seconds["attend"] / 1e9,
                "GB/s",
                "restoring the same pages into memory",
                nbytes / seconds["restore"] / 1e9,
                Bar(0.5, at_most=False) if index == 0 else None,
                note,
            )
        )
    return rows


def _measure(workshop: Workshop, codecs: str) -> tuple[int, dict[str, float], float]:
    sizes = workshop.sizes
    key_codec, value_codec = codecs.split("/")
    layer = tqstore.LayerSpec(sizes.heads, sizes.head_dim, keys=key_codec, values=value_codec)
    spec = tqstore.CacheSpec((layer,))
    path = workshop.folder / f"{NAME}-{key_codec}"
    session = workshop.session()
    queries = mx.random.normal((4 * sizes.heads, 1, sizes.head_dim), key=mx.random.key(5))
    with tqstore.Store.open(path) as store:
        cache = store.new_cache(spec, model=MODEL)
        cache.append(0, *(array[:, : sizes.tokens] for array in session.arrays[:2]))
        store.save(NAME, cache, session.tokens[: sizes.tokens])
        expected = cache.attend(0, queries)
        mx.eval(expected)
    page_nbytes = spec.page_specs[0].page_nbytes
    nbytes = len(cache.layers[0].table) * page_nbytes
    budget = max(page_nbytes, nbytes // TIMES)
    with tqstore.Store.open(path) as store:
        small = store.resume(NAME, memory_budget=budget).cache
        error = float(np.abs(np.array(small.attend(0, queries) - expected)).max())
        seconds = workshop.measure(
            f"{NAME} {codecs}",
            {"attend": _attending(small, queries), "restore": _restoring(store)},
        )
        if small.pager.pool.used_nbytes > budget:
            raise RuntimeError(f"{small.pager.pool.used_nbytes} bytes used of {budget}")
    return nbytes, seconds, error


def _attending(cache: tqstore.KVCache, queries: mx.array) -> Trial:
    def trial() -> float:
        with stopwatch() as watch:
            mx.eval(cache.attend(0, queries))
        return watch.seconds

    return trial


def _restoring(store: tqstore.Store) -> Trial:
    def trial() -> float:
        cache = store.resume(NAME).cache
        with stopwatch() as watch:
            cache.restore()
            mx.eval([arena.segments.arrays for arena in cache.pager.pool.arenas])
        return watch.seconds

    return trial
