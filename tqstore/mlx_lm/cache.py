"""Paged layers that speak mlx-lm's cache protocol for sequential generation.

Owns the batch axis, masks, and layer-wise trims and copies of one shared KVCache.  Does not own
pages or tails (the KVCache's), nor the cache objects of layers that are not paged (the model's).

The protocol, as mlx-lm 0.32 uses it: `update_and_fetch`, `offset`, `make_mask`, `state`,
`is_trimmable`, `trim`, `nbytes`.  What is *not* defined counts as much: with `bits` attention would
take the keys for quantized ones, `to_quantized` would have the cache replaced, a false truth
value would lose the mask, `merge` would promise batches.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList

from tqstore.errors import InvalidInput
from tqstore.kv_cache import KVCache
from tqstore.mlx_lm.masks import Mask, full_mask, windowed_mask
from tqstore.mlx_lm.packed_attention import pending, stays_packed
from tqstore.mlx_lm.probe import (
    Codecs,
    ModelLayout,
    PagedEntry,
    as_cache_list,
    new_own_cache,
    probe,
)
from tqstore.presets import DEFAULT_PRESET


class PagedSequence:
    """One KVCache behind all paged layers of a cache list.

    mlx-lm trims a list layer by layer, a KVCache whole: a trim is noted for each layer and done
    when every layer has asked for it.
    """

    def __init__(self, kv: KVCache, model: int = 0) -> None:
        """`model` is the id of the model that may attend to pages packed; 0 is none."""
        self.kv = kv
        self.model = model
        self._trimmed = [0] * len(kv.spec.layers)
        self._step_start = 0  # tokens of every layer before the step that is under way

    def layer_tokens(self, layer: int) -> int:
        """Tokens of a layer, less those it was asked to forget."""
        return self.kv.layers[layer].num_tokens - self._trimmed[layer]

    @property
    def is_in_step(self) -> bool:
        """Whether all layers hold the same tokens: not in a step, or after one that failed."""
        return len({self.layer_tokens(layer) for layer in range(len(self._trimmed))}) == 1

    def even_out(self) -> bool:
        """Every layer forgets what not all hold; False, and nothing done, where one cannot.

        Where some have sealed a page and others have not, that page's tokens go too, so that all
        layers are what they would be had the step never begun.
        """
        common = min(map(self.layer_tokens, range(len(self._trimmed))))
        sealed = {layer.tail_start for layer in self.kv.layers}
        if len(sealed) > 1:
            common = min(common, *sealed)
        if not self.kv.can_trim(self.kv.num_tokens - common):
            return False
        self._trimmed = [0] * len(self._trimmed)
        self.kv.trim_to(common)
        return True

    def trim(self, layer: int, count: int) -> None:
        """Notes that `layer` forgets its last `count` tokens; the last layer to ask does it."""
        ahead = self._trimmed[layer] + count
        # What one layer was allowed, all are: the answer is the same until all have asked.
        if ahead > max(self._trimmed) and not self.kv.can_trim(ahead):
            raise InvalidInput(
                f"the last {ahead} of {self.kv.num_tokens} tokens cannot be forgotten: what a "
                "windowed layer saw before them is gone, or layers are not in step",
                doing="trimming the cache",
                remedy="Trim fewer tokens, or start a new cache",
            )
        self._trimmed[layer] = ahead
        common = min(self._trimmed)
        if common:
            self._trimmed = [trimmed - common for trimmed in self._trimmed]
            self.kv.trim(common)

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._require_in_step(layer)
        self.kv.layers[layer].append(keys, values, check_finite=False)

    def append_and_fetch(
        self, layer: int, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        self._require_in_step(layer)
        return self.kv.append_and_fetch(layer, keys, values)

    def _require_in_step(self, layer: int) -> None:
        """InvalidInput where a step that failed, or a trim of some layers, left them apart."""
        if self.kv.layers[layer].is_torn:
            raise InvalidInput(
                f"layer {layer} was interrupted while it changed",
                doing="appending to the cache",
                remedy="Start a new cache; a session does so by itself when it is fed again",
            )
        if any(self._trimmed):
            behind = [index for index, trimmed in enumerate(self._trimmed) if not trimmed]
            raise InvalidInput(
                f"some layers were trimmed and paged layers {behind} were not",
                doing="appending to the cache",
                remedy="Trim every layer of the list by the same number of tokens",
            )
        tokens = self.layer_tokens(layer)
        if tokens == self._step_start:
            return
        self._step_start = min(map(self.layer_tokens, range(len(self._trimmed))))
        if tokens != self._step_start:
            raise InvalidInput(
                f"layer {layer} holds {tokens} tokens where others hold {self._step_start}: a step "
                "did not get to the end",
                doing="appending to the cache",
                remedy="Start a new cache; a session puts its own in order when it is fed again",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        """A fork: pages are shared, so a copy costs the tail."""
        other = PagedSequence(self.kv.fork(), self.model)
        other._trimmed = list(self._trimmed)
        other._step_start = self._step_start
        return other


class PagedLayerCache:
    """One paged layer as an entry of mlx-lm's cache list.  One sequence, one thread.

    Copies made by `copy.deepcopy` of the whole list are independent and share sealed pages.
    """

    def __init__(self, sequence: PagedSequence, layer: int, entry: PagedEntry) -> None:
        self._sequence = sequence
        self._layer = layer
        self._entry = entry
        self._dtype = getattr(mx, entry.dtype)
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def sequence(self) -> PagedSequence:
        return self._sequence

    @property
    def offset(self) -> int:
        """Tokens so far, whatever the window: the position of the next one."""
        return self._sequence.layer_tokens(self._layer)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Appends keys [1, kv_heads, n, head_dim] and values [1, kv_heads, n, value_dim].

        Returns all that the n new queries may see, [1, kv_heads, visible, dim], in the dtypes
        given and in temporal order; the arrays live as long as the step that uses them.  Within
        `packed_attention` it is what attention takes in their place.
        Raises InvalidInput, and appends nothing, for anything else.
        """
        for role, array in (("keys", keys), ("values", values)):
            if array.ndim != 4 or array.shape[0] != 1:
                raise InvalidInput(
                    f"{role} have shape {array.shape}, not [1, heads, tokens, dim]",
                    doing=f"appending to paged layer {self._layer}",
                    remedy="A paged cache holds one sequence; make one for each",
                )
        key_dtype, value_dtype = keys.dtype, values.dtype
        if self._entry.key_dtype != self._entry.value_dtype:
            keys, values = keys.astype(self._dtype), values.astype(self._dtype)
        layer, num_new = self._sequence.kv.layers[self._layer], keys.shape[2]
        if self._entry.attention and stays_packed(layer, num_new, self._sequence.model):
            self._sequence.append(self._layer, keys[0], values[0])
            return pending(layer, num_new, key_dtype, value_dtype)
        seen_keys, seen_values = self._sequence.append_and_fetch(self._layer, keys[0], values[0])
        fetched = (seen_keys[None].astype(key_dtype), seen_values[None].astype(value_dtype))
        if self._entry.is_read_again:
            self._fetched = fetched
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What this step's `update_and_fetch` returned, for layers that share this one's keys."""
        if self._fetched is None:
            raise InvalidInput(
                "nothing was appended in this step",
                doing=f"reading keys and values of paged layer {self._layer}",
            )
        return self._fetched

    def make_mask(
        self,
        num_new: int,
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Mask:
        """The mask for `num_new` queries, to be called before they are appended."""
        entry = self._entry
        if entry.window is None:
            return full_mask(
                num_new, self.offset, return_array=return_array, window_size=window_size
            )
        return windowed_mask(
            num_new,
            self.offset,
            window=entry.window,
            sink_tokens=entry.sink_tokens,
            return_array=return_array,
            window_size=window_size,
        )

    @property
    def state(self) -> list[mx.array]:
        """The arrays that hold this layer's appended tokens: evaluating them ends a step."""
        self._fetched = None
        tail = self._sequence.kv.layers[self._layer].tail  # sealing evaluates pages by itself
        return [tail.keys, tail.values]

    @state.setter
    def state(self, value: object) -> None:  # noqa: ARG002
        raise InvalidInput(
            "a paged layer's state is its pages; it cannot be set from arrays",
            doing="setting a cache's state",
            remedy="Use Store.save and Store.resume, or tqstore.mlx_lm.session",
        )

    def is_trimmable(self) -> bool:
        """Whether the newest tokens, as many as stay exact, can be forgotten."""
        kv = self._sequence.kv
        return kv.can_trim(min(self.offset, kv.spec.recent_tokens))

    def trim(self, n: int) -> int:
        """Forgets the last n tokens (at most all) and returns how many.

        To be called on every layer of the list, as mlx-lm's trim_prompt_cache does.  Raises
        InvalidInput, and forgets nothing, where a windowed layer cannot go back that far.
        """
        if n < 0:
            raise InvalidInput(f"cannot trim {n} tokens", doing="trimming the cache")
        count = min(n, self.offset)
        if count:
            self._sequence.trim(self._layer, count)
        return count

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """This layer's share of the bytes that the shared KVCache holds in memory."""
        kv = self._sequence.kv
        share, rest = divmod(kv.nbytes, len(kv.spec.layers))
        return share + (rest if self._layer == 0 else 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayerCache:
        sequence = copy.deepcopy(self._sequence, memo)
        return PagedLayerCache(sequence, self._layer, self._entry)


def make_cache(
    model: Module,
    *,
    preset: str = DEFAULT_PRESET,
    keys: Codecs | None = None,
    values: Codecs | None = None,
    page_tokens: int = 64,
    recent_tokens: int = 32,
    seed: int = 0,
    rotation: str = "auto",
    memory_budget: int | None = None,
) -> list[Any]:
    """The cache list for any mlx-lm model, to pass as `prompt_cache`.

    Full and sliding-window attention layers become paged; all else stays the model's own.
    `preset` (card, small, balanced, near-lossless, exact) names the codecs of keys and values;
    `keys` and `values` replace its own, one for all or one for each paged layer.  `memory_budget`
    is in bytes.  For speculative decoding append the draft model's list to the model's.

    >>> cache = make_cache(model, preset="balanced")                     # doctest: +SKIP
    >>> for token, _ in generate_step(prompt, model, prompt_cache=cache): ...  # doctest: +SKIP

    Raises InvalidInput for unknown codecs or a model without attention layers to page.
    """
    layout = probe(model)
    spec = layout.cache_spec(
        preset=preset,
        keys=keys,
        values=values,
        page_tokens=page_tokens,
        recent_tokens=recent_tokens,
        seed=seed,
        rotation=rotation,
    )
    return cache_list(model, layout, KVCache(spec, memory_budget=memory_budget))


def cache_list(
    model: Module, layout: ModelLayout, kv: KVCache, *, packed_attention: bool = True
) -> list[Any]:
    """The model's cache list over `kv`, its own objects new and empty.

    With `packed_attention` False it gives decoded arrays whatever the model is asked to do.
    """
    entries = new_own_cache(model)
    sequence = PagedSequence(kv, id(model) if packed_attention else 0)
    paged = {(item.entry, item.part): (layer, item) for layer, item in enumerate(layout.paged)}
    for index, entry in enumerate(entries):
        if isinstance(entry, CacheList):
            entries[index] = as_cache_list(
                [
                    PagedLayerCache(sequence, *paged[index, part])
                    if (index, part) in paged
                    else leaf
                    for part, leaf in enumerate(entry.caches)
                ]
            )
        elif (index, None) in paged:
            entries[index] = PagedLayerCache(sequence, *paged[index, None])
    return entries
