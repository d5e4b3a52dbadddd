"""A token from a whole model at a long context, against the caches mlx-lm has of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from tools.benchmarks.row import Row
from tools.benchmarks.timing import Trial, timed
from tools.benchmarks.workshop import Workshop
from tqstore.mlx_lm import make_cache, packed_attention

NAME = "generation"
CONTEXT_TOKENS = 8192
LAYERS = 4
QUERY_HEADS_A_KEY_HEAD = 4
PRESETS = ("balanced", "card", "near-lossless")


def run(workshop: Workshop) -> list[Row]:
    sizes = workshop.sizes
    tokens = min(CONTEXT_TOKENS, sizes.tokens)
    model = random_model(sizes.heads, sizes.head_dim)
    keys, values = (
        mx.random.normal((1, sizes.heads, tokens, sizes.head_dim), key=mx.random.key(seed))
        for seed in (1, 2)
    )
    dense = own_cache(keys, values)
    affine = [cache.to_quantized(group_size=64, bits=4) for cache in own_cache(keys, values)]
    mx.eval([cache.state for cache in affine])
    trials: dict[str, Trial] = {
        "dense": timed(step(model, dense)),
        "affine": timed(step(model, affine)),
    }
    for preset in PRESETS:
        cache = paged_cache(model, preset, keys, values)
        trials[preset] = timed(step(model, cache, is_packed=True))
    trials["decoded"] = timed(step(model, paged_cache(model, PRESETS[0], keys, values)))
    taken = workshop.measure(NAME, trials)
    note = (
        f"one token of a llama of {LAYERS} layers at {tokens:,} tokens, {sizes.heads} key heads "
        f"and {QUERY_HEADS_A_KEY_HEAD * sizes.heads} query heads, d={sizes.head_dim}, float32"
    )
    rows = [
        ("", "balanced", "mlx-lm's QuantizedKVCache, 4 bits", "affine", "the same bytes"),
        ("/balanced", "balanced", "mlx-lm's KVCache", "dense", ""),
        ("/card", "card", "mlx-lm's KVCache", "dense", ""),
        ("/near-lossless", "near-lossless", "mlx-lm's KVCache", "dense", ""),
        ("/decoded", "decoded", "the same with packed attention", "balanced", "balanced"),
    ]
    return [
        Row(
            NAME + suffix,
            taken[ours] * 1e3,
            "ms",
            peer,
            taken[theirs] * 1e3,
            note="; ".join(filter(None, (extra, note))),
        )
        for suffix, ours, peer, theirs, extra in rows
    ]


def random_model(heads: int, dim: int) -> Any:
    from mlx_lm.models import llama

    query_heads = QUERY_HEADS_A_KEY_HEAD * heads
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=query_heads * dim // 4,
        num_hidden_layers=LAYERS,
        intermediate_size=query_heads * dim // 2,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        vocab_size=1000,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def own_cache(keys: mx.array, values: mx.array) -> list[Any]:
    from mlx_lm.models.cache import KVCache

    caches: list[Any] = [KVCache() for _ in range(LAYERS)]
    for cache in caches:
        cache.update_and_fetch(keys, values)
    mx.eval([cache.state for cache in caches])
    return caches


def paged_cache(model: Any, preset: str, keys: mx.array, values: mx.array) -> list[Any]:
    caches = make_cache(model, preset=preset)
    for cache in caches:
        cache.update_and_fetch(keys, values)
    mx.eval([cache.state for cache in caches])
    return caches


def step(model: Any, cache: list[Any], *, is_packed: bool = False) -> Callable[[], None]:
    token = mx.array([[7]])

    def one() -> None:
        with packed_attention(model) if is_packed else nullcontext():
            mx.eval(model(token, cache=cache))

    return one
