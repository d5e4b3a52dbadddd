"""Who sees whom: our masks over temporal order against mlx-lm's own caches, query by query."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tqstore.mlx_lm.masks import full_mask, windowed_mask


def seen(mask, positions: list[int], count: int) -> list[set[int]]:
    """The positions each of `count` queries at first, first+1, ... may look at."""
    if mask is None:
        return [set(positions)] * count
    if isinstance(mask, str):
        assert mask == "causal"
        behind = len(positions) - count
        return [set(positions[: behind + query + 1]) for query in range(count)]
    rows = mx.broadcast_to(mask, (count, len(positions))).tolist()
    return [{p for p, allowed in zip(positions, row, strict=True) if allowed} for row in rows]


def own_step(cache, first: int, count: int, **options) -> list[set[int]]:
    """One step of mlx-lm's own cache; keys are their positions, so what it returns tells order."""
    mask = cache.make_mask(count, **options)
    numbers = mx.arange(first, first + count, dtype=mx.float32).reshape(1, 1, count, 1)
    keys, _ = cache.update_and_fetch(numbers, numbers)
    return seen(mask, [int(k) for k in keys.flatten().tolist()], count)


def temporal(first: int, count: int, window: int, sinks: int) -> list[int]:
    """What a paged windowed layer returns: sinks, the window of the first query, the new ones."""
    start = max(0, first - window + 1)
    return [*range(min(sinks, start)), *range(start, first + count)]


@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("narrower", [None, 0, 3])
@pytest.mark.parametrize("window", [1, 2, 7, 16])
def test_windowed_masks_see_what_rotating_caches_see(window, narrower, return_array):
    """Every split around the wrap, also for windows narrower than the cache."""
    size = None if narrower is None else max(1, window - narrower)
    options = {"window_size": size, "return_array": return_array}
    for trial in range(30):
        chance = random.Random(trial)
        cache, first = RotatingKVCache(max_size=window), 0
        while first < 4 * window + 4:
            count = chance.choice([1, 1, 1, 2, 3, window, window + 1, 2 * window])
            expected = own_step(cache, first, count, **options)
            mask = windowed_mask(count, first, window=window, sink_tokens=0, **options)
            positions = temporal(first, count, window, 0)
            if isinstance(mask, mx.array):
                assert mask.shape[-1] == len(positions)
            assert seen(mask, positions, count) == expected, (trial, first, count)
            first += count


@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window_size", [None, 3, 50])
def test_full_masks_are_mlx_lms_own(window_size, return_array):
    cache, first = KVCache(), 0
    for count in (1, 5, 1, 1, 9, 2):
        own = cache.make_mask(count, return_array=return_array, window_size=window_size)
        ours = full_mask(count, first, return_array=return_array, window_size=window_size)
        if isinstance(own, mx.array):
            assert isinstance(ours, mx.array)
            assert mx.array_equal(own, ours)
        else:
            assert own == ours
        cache.update_and_fetch(*[mx.zeros((1, 1, count, 1))] * 2)
        first += count


@pytest.mark.parametrize("return_array", [False, True])
def test_sinks_stay_visible_to_every_query(return_array):
    """Definition: a query at p sees keys at p-window+1..p and below sink_tokens."""
    window, sinks = 6, 3
    for first in range(30):
        for count in (1, 2, 5, 13):
            # mlx-lm's window of such a cache counts the kept tokens
            options = {"window_size": window + sinks, "return_array": return_array}
            mask = windowed_mask(count, first, window=window, sink_tokens=sinks, **options)
            expected = [
                {*range(max(0, p - window + 1), p + 1), *range(min(sinks, p + 1))}
                for p in range(first, first + count)
            ]
            assert seen(mask, temporal(first, count, window, sinks), count) == expected


def test_single_queries_with_sinks_equal_the_rotating_cache():
    cache = RotatingKVCache(max_size=9, keep=3)
    for first in range(40):
        expected = own_step(cache, first, 1)
        mask = windowed_mask(
            1, first, window=6, sink_tokens=3, window_size=None, return_array=False
        )
        assert seen(mask, temporal(first, 1, 6, 3), 1) == expected
