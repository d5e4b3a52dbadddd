"""One pass of the model over a text with a given cache, up to the last norm.

Owns the caches that differ from what a package offers only in that attention reads every token as
it is stored, the newest ones too: as strict for us as mlx-lm's quantized cache is for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, create_attention_mask

from tqstore.kv_cache import KVCache
from tqstore.mlx_lm import make_cache
from tqstore.mlx_lm.probe import probe
from tqstore.spec import PageSpec

# Tokens a step of the passes that run as an application does: one page.
STEP = 64


def hidden_states(
    model: Any, tokens: Sequence[int], cache: list[Any] | None, step: int | None = None
) -> mx.array:
    """float32 [tokens, hidden], what the output layer reads; `step` tokens a call, None for all."""
    step = step or len(tokens)
    parts = []
    for first in range(0, len(tokens), step):
        part = model.model(mx.array([tokens[first : first + step]]), cache)[0]
        parts.append(part.astype(mx.float32))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


class WholePages:
    """One layer of a KVCache of which attention sees what the sealed pages hold, and only that.

    Fed a whole number of pages at once.  Appends, seals into the hot pool and reads back through
    the product's own code, once a layer.
    """

    def __init__(self, kv: KVCache, layer: int) -> None:
        self._kv, self._layer = kv, layer
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._kv.append(self._layer, keys[0], values[0])
        self.offset += keys.shape[2]
        seen = self._kv.layers[self._layer].fetch()
        return seen.keys[None].astype(keys.dtype), seen.values[None].astype(values.dtype)

    def make_mask(
        self, num_new: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        return create_attention_mask(num_new, self.offset, return_array, window_size)


def whole_pages(model: Any, keys: str, values: str) -> list[Any]:
    """A cache list in which every token is packed before it is read."""
    spec = probe(model).cache_spec(keys=keys, values=values, recent_tokens=0)
    kv = KVCache(spec)
    return [WholePages(kv, layer) for layer in range(len(spec.layers))]


def page_spec(model: Any, keys: str, values: str) -> PageSpec:
    """The layout of all layers' pages, which are alike in this model."""
    specs = set(probe(model).cache_spec(keys=keys, values=values).page_specs)
    assert len(specs) == 1
    return specs.pop()


def as_it_runs(model: Any, keys: str, values: str) -> list[Any]:
    """The cache as an application makes it: the newest 32 to 95 tokens are still exact."""
    return make_cache(model, keys=keys, values=values)


class OddBits(QuantizedKVCache):
    """mlx-lm's quantized cache for widths its own allocation has no room for (6 bits)."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        assert self.keys is None, "one call for the whole text"
        packed: list[Any] = [
            mx.quantize(array, group_size=self.group_size, bits=self.bits)
            for array in (keys, values)
        ]
        self.keys, self.values = packed
        self.offset = keys.shape[2]
        return self.keys, self.values


def mlx_quantized(model: Any, bits: int, group_size: int = 64) -> list[Any]:
    """mlx-lm's affine cache for every layer, the windowed ones too."""
    kind = QuantizedKVCache if 32 % bits == 0 else OddBits
    return [kind(group_size=group_size, bits=bits) for _ in model.layers]
