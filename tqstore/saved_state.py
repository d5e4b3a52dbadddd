"""A cache as a checkpoint and back: tails and other states as raw arrays, pages as block hashes.

Owns the conversion only.  Which checkpoint, under which name and when is the session's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tqstore.errors import Incompatible, InvalidInput
from tqstore.format.arrays import RawArray
from tqstore.format.block_hash import Tokens, as_tokens
from tqstore.format.checkpoint import Checkpoint, LayerTail, ModelState
from tqstore.kv_cache import KVCache
from tqstore.paging.block_chain import Block
from tqstore.paging.page_table import COLD, EXPIRED
from tqstore.spec import CacheSpec
from tqstore.tail import Tail

_NUMPY_VIEWS = {"bfloat16": "uint16"}


@dataclass(frozen=True)
class NamedState:
    """State of a layer that is not paged, kept exactly.

    `layer` is its index in the model's own list of caches, `arrays` any MLX arrays, `meta` any
    plain value that tells how to put them back.
    """

    layer: int
    class_name: str
    arrays: Sequence[mx.array]
    meta: Any = None


def to_raw(array: mx.array) -> RawArray:
    """Any MLX array, bit for bit."""
    dtype = str(array.dtype).removeprefix("mlx.core.").removesuffix("_")
    flat = mx.contiguous(array).reshape(-1)
    if dtype in _NUMPY_VIEWS:
        flat = flat.view(getattr(mx, _NUMPY_VIEWS[dtype]))
    return RawArray(dtype, tuple(array.shape), np.array(flat).tobytes())


def from_raw(raw: RawArray) -> mx.array:
    """Inverse of `to_raw`."""
    flat = np.frombuffer(raw.data, _NUMPY_VIEWS.get(raw.dtype, raw.dtype))
    array = mx.array(flat)
    if raw.dtype in _NUMPY_VIEWS:
        array = array.view(getattr(mx, raw.dtype))
    return array.reshape(raw.shape)


def to_checkpoint(
    cache: KVCache,
    tokens: Tokens,
    states: Sequence[NamedState] = (),
    metadata: Mapping[str, Any] | None = None,
    ttl: float | None = None,
) -> Checkpoint:
    """The state of `cache`, whose sealed blocks must be named; kept for `ttl` seconds or ever."""
    assert cache.pager.pages is not None, "only a cache with a store has a namespace"
    num_blocks = cache.num_sealed_blocks
    start = num_blocks * cache.spec.page_tokens
    # A step that failed half way and was taken back leaves some layers with a block more than all
    # have sealed: their tails go as decoded from it.
    tails = [layer.fetch(start) for layer in cache.layers]
    flat = as_tokens(tokens)
    now_ns = time.time_ns()
    return Checkpoint(
        namespace_id=cache.pager.pages.id,
        page_tokens=cache.spec.page_tokens,
        num_tokens=cache.num_tokens,
        block_hashes=tuple(cache.chain.hashes_of(np.arange(num_blocks, dtype=np.int64))),
        tail_tokens=flat[start:].astype("<i8").tobytes(),
        layers=tuple(
            LayerTail(
                start=start,
                keys=to_raw(tail.keys),
                values=to_raw(tail.values),
                window=layer.window,
                sink_tokens=layer.sink_tokens,
            )
            for tail, layer in zip(tails, cache.spec.layers, strict=True)
        ),
        states=tuple(
            ModelState(state.layer, state.class_name, tuple(map(to_raw, state.arrays)), state.meta)
            for state in states
        ),
        metadata=dict(metadata or {}),
        created_ns=now_ns,
        expires_ns=0 if ttl is None else now_ns + int(ttl * 1e9),
        recent_tokens=cache.spec.recent_tokens,
        window_history=cache.spec.window_history,
        paging=cache.pager.figures(),
    )


def check_layers(checkpoint: Checkpoint, spec: CacheSpec) -> None:
    """Incompatible if the windows or the tails' shapes and dtypes are not those of `spec`."""
    if len(checkpoint.layers) != len(spec.layers):
        raise Incompatible("number of layers", len(checkpoint.layers), len(spec.layers))
    for index, (tail, layer, page) in enumerate(
        zip(checkpoint.layers, spec.layers, spec.page_specs, strict=True)
    ):
        stored = {
            "window": tail.window,
            "sink_tokens": tail.sink_tokens,
            "tail dtype": tail.keys.dtype,
            "tail heads and dims": (tail.keys.shape[0], tail.keys.shape[2], tail.values.shape[2]),
        }
        given = {
            "window": layer.window,
            "sink_tokens": layer.sink_tokens,
            "tail dtype": page.dtype,
            "tail heads and dims": (page.kv_heads, page.key_dim, page.value_dim),
        }
        for field in stored:
            if stored[field] != given[field]:
                raise Incompatible(
                    f"layers[{index}].{field}", stored[field], given[field], doing="resuming"
                )


def fill_cold(cache: KVCache, blocks: Sequence[Block]) -> None:
    """Gives an empty cache the blocks of a stored prefix; nothing is read yet.

    A page that is not in the store becomes expired: the caller has made sure it is not needed.
    """
    pages = cache.pager.pages
    assert pages is not None, "a cache with a store"
    assert cache.num_tokens == 0, "an empty cache"
    masks: dict[bytes, list[int]] = {}  # page spec -> bit mask of stored layers, a block each
    for layer in cache.layers:
        spec = layer.page_spec
        if spec.digest not in masks:
            index = pages.index(spec)
            masks[spec.digest] = [index.layers_of(block.hash or b"") for block in blocks]
        found = [bool(mask >> layer.layer & 1) for mask in masks[spec.digest]]
        layer.table.extend(np.where(np.array(found, np.bool_), COLD, EXPIRED).astype(np.int64))
    cache.chain.adopt(blocks)


def fill_tails(cache: KVCache, checkpoint: Checkpoint) -> None:
    for layer, saved in zip(cache.layers, checkpoint.layers, strict=True):
        layer.tail = Tail(from_raw(saved.keys), from_raw(saved.values))


def named_states(checkpoint: Checkpoint) -> list[NamedState]:
    return [
        NamedState(state.layer, state.class_name, [from_raw(a) for a in state.arrays], state.meta)
        for state in checkpoint.states
    ]


def require_in_step(cache: KVCache, tokens: Tokens) -> None:
    """InvalidInput unless every layer holds exactly `tokens`, all finite."""
    counts = [layer.num_tokens for layer in cache.layers]
    if cache.is_torn:
        raise InvalidInput(
            "a layer was interrupted while it changed",
            doing="saving",
            remedy="Resume the session from its last checkpoint, or start a new cache",
        )
    if len(set(counts)) > 1:
        raise InvalidInput(
            f"layers hold different numbers of tokens: {min(counts)} to {max(counts)}",
            doing="saving",
            remedy="Save between steps, when every layer has seen the same tokens",
        )
    if len(tokens) != counts[0]:
        raise InvalidInput(
            f"{len(tokens)} tokens given for a cache of {counts[0]}",
            doing="saving",
            remedy="Give exactly the tokens whose keys and values were appended",
        )
    finite = mx.stack([layer.tail.is_finite() for layer in cache.layers])
    if not bool(finite.all()):
        bad = int(mx.argmin(finite))
        raise InvalidInput(
            f"layer {bad}: keys or values in the tail are not finite",
            doing="saving",
            remedy="The model produced inf or NaN; nothing was saved",
        )
