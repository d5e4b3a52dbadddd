"""A synthetic session: seeded random keys and values, and the caches that hold them.

Owns the data and how much of it there is.  Random keys are the worst case for size (nothing
compresses) and for no time measured here do values matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

import tqstore

MODEL = "be" * 32  # stands for a model's fingerprint
SESSION = "bench"
FEED_TOKENS = 2048


@dataclass(frozen=True)
class Sizes:
    """How much is measured.  `FULL` is what the figures are about, `TOY` is for tests."""

    tokens: int = 32_768
    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    vectors: int = 65_536
    single_vectors: int = 2_000
    new_tokens: int = 64
    rounds: int = 5
    many_pages: int = 1_000_000
    many_packs: int = 10_000
    prefix_tokens: int = 32_768

    @property
    def spec(self) -> tqstore.CacheSpec:
        layer = tqstore.LayerSpec(
            kv_heads=self.heads, head_dim=self.head_dim, keys="prod4", values="int8"
        )
        return tqstore.CacheSpec((layer,) * self.layers)

    @property
    def dense_nbytes_per_token(self) -> int:
        """Of keys and values in float16."""
        return 2 * 2 * self.layers * self.heads * self.head_dim

    @property
    def spare_tokens(self) -> int:
        """For three measured series of incremental saves, each with a round to warm up."""
        return 3 * (self.rounds + 1) * self.new_tokens

    @property
    def shape(self) -> str:
        return f"{self.layers} layers, {self.heads} heads, d={self.head_dim}"


FULL = Sizes()
TOY = Sizes(
    tokens=512,
    layers=2,
    heads=2,
    vectors=1024,
    single_vectors=8,
    rounds=1,
    many_pages=20_000,
    many_packs=100,
    prefix_tokens=100,
)


class SyntheticSession:
    """Keys and values of every layer, float16 [heads, tokens + spare, head_dim]."""

    def __init__(self, sizes: Sizes, spare_tokens: int = 0) -> None:
        self.sizes = sizes
        self.num_tokens = sizes.tokens + spare_tokens
        shape = (sizes.heads, self.num_tokens, sizes.head_dim)
        keys = mx.random.split(mx.random.key(0), 2 * sizes.layers)
        self.arrays = [mx.random.normal(shape, dtype=mx.float16, key=key) for key in keys]
        mx.eval(self.arrays)

    @cached_property
    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng(0).integers(0, 1 << 17, self.num_tokens)

    def feed(self, cache: tqstore.KVCache, first: int, last: int) -> None:
        """Appends positions first..last-1 of every layer."""
        for layer in range(self.sizes.layers):
            keys, values = self.arrays[2 * layer], self.arrays[2 * layer + 1]
            cache.append(layer, keys[:, first:last], values[:, first:last])

    def fill(self, cache: tqstore.KVCache, num_tokens: int) -> None:
        """Feeds the first tokens in pieces, as a prompt comes."""
        for first in range(0, num_tokens, FEED_TOKENS):
            self.feed(cache, first, min(num_tokens, first + FEED_TOKENS))

    def prompt_cache(self, num_tokens: int) -> list[Any]:
        """mlx-lm's own caches with the first tokens."""
        from mlx_lm.models.cache import KVCache

        caches = [KVCache() for _ in range(self.sizes.layers)]
        for layer, cache in enumerate(caches):
            keys, values = self.arrays[2 * layer : 2 * layer + 2]
            cache.update_and_fetch(keys[None, :, :num_tokens], values[None, :, :num_tokens])
        mx.eval([cache.state for cache in caches])
        return caches
