"""One decode step: append a token and attend, against mlx-lm's dense cache and its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

import tqstore
from tools.benchmarks import veloxquant
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.timing import timed
from tools.benchmarks.workshop import Workshop

NAME = "decode-step"
CONTEXT_TOKENS = 8192
QUERY_HEADS_A_KEY_HEAD = 4
CODECS = {"prod4/int8": Bar(2.0), "uni4/int8": Bar(1.2), "mse4/mse4": None, "exact/exact": None}


def run(workshop: Workshop) -> list[Row]:
    sizes = workshop.sizes
    tokens = min(CONTEXT_TOKENS, sizes.tokens)
    keys, values, new, queries = inputs(sizes.heads, tokens, sizes.head_dim)
    trials = {"peer": timed(dense_step(keys, values, new, queries))}
    for codecs in CODECS:
        trials[codecs] = timed(packed_step(codecs, keys, values, new, queries))
    taken = workshop.measure(NAME, trials, rounds=9)
    note = (
        f"one layer, {tokens:,} tokens, {sizes.heads} key heads and "
        f"{QUERY_HEADS_A_KEY_HEAD * sizes.heads} query heads, d={sizes.head_dim}, float32"
    )
    rows = [
        Row(
            NAME if index == 0 else f"{NAME}/{codecs.replace('/', '-')}",
            taken[codecs] * 1e3,
            "ms",
            "mlx-lm's KVCache and MLX's fused attention",
            taken["peer"] * 1e3,
            bar,
            f"{codecs}: {note}",
        )
        for index, (codecs, bar) in enumerate(CODECS.items())
    ]
    return [*rows, _against_veloxquant(workshop, tokens, taken["prod4/int8"], note)]


def _against_veloxquant(workshop: Workshop, tokens: int, ours: float, note: str) -> Row:
    sizes = workshop.sizes
    theirs, why_not = None, ""
    try:
        peer = veloxquant.prepared(workshop.tools_folder, workshop.progress)
        workshop.progress(f"{NAME}: VeloxQuant", 0, 1)
        theirs = peer.seconds_a_step(tokens, sizes.heads, QUERY_HEADS_A_KEY_HEAD, sizes.head_dim)
    except veloxquant.VeloxUnavailable as error:
        why_not = str(error)
    return Row(
        f"{NAME}/veloxquant",
        ours * 1e3,
        "ms",
        f"VeloxQuant-MLX {veloxquant.VERSION}",
        None if theirs is None else theirs * 1e3,
        Bar(1 / 5),
        why_not or f"prod4/int8, the peer's 4-bit keys and int8 values: {note}",
    )


def inputs(heads: int, tokens: int, dim: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Keys and values [heads, tokens, dim], one new token's, and its queries."""
    seeds = mx.random.split(mx.random.key(3), 4)
    arrays = (
        mx.random.normal((heads, tokens, dim), key=seeds[0]),
        mx.random.normal((heads, tokens, dim), key=seeds[1]),
        mx.random.normal((heads, 1, dim), key=seeds[2]),
        mx.random.normal((QUERY_HEADS_A_KEY_HEAD * heads, 1, dim), key=seeds[3]),
    )
    mx.eval(arrays)
    return arrays


def dense_step(
    keys: mx.array, values: mx.array, new: mx.array, queries: mx.array
) -> Callable[[], None]:
    from mlx_lm.models.cache import KVCache

    cache: Any = KVCache()
    cache.update_and_fetch(keys[None], values[None])
    mx.eval(cache.state)

    def step() -> None:
        seen_keys, seen_values = cache.update_and_fetch(new[None], new[None])
        scale = keys.shape[2] ** -0.5
        mx.eval(
            mx.fast.scaled_dot_product_attention(queries[None], seen_keys, seen_values, scale=scale)
        )

    return step


def packed_step(
    codecs: str, keys: mx.array, values: mx.array, new: mx.array, queries: mx.array
) -> Callable[[], None]:
    key_codec, value_codec = codecs.split("/")
    layer = tqstore.LayerSpec(
        keys.shape[0], keys.shape[2], keys=key_codec, values=value_codec, dtype="float32"
    )
    cache = tqstore.KVCache(tqstore.CacheSpec((layer,)), check_finite=False)
    cache.append(0, keys, values)

    def step() -> None:
        cache.append(0, new, new)
        mx.eval(cache.attend(0, queries))

    return step
