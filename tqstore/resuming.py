"""Taking up what is stored: a session's checkpoint, or the longest prefix of some tokens.

Owns what comes back (`Resumed`, `Match`) and the reasons when it is less than was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tqstore.errors import NotFound
from tqstore.format.block_hash import BlockRecord, as_tokens
from tqstore.format.checkpoint import Checkpoint
from tqstore.format.namespace import Namespace
from tqstore.kv_cache import KVCache
from tqstore.paging.block_chain import Block
from tqstore.saved_state import NamedState, check_layers, fill_cold, fill_tails, named_states
from tqstore.spec import CacheSpec, LayerSpec
from tqstore.store.misses import Miss, explain
from tqstore.store.page_store import NamespaceStore


@dataclass(frozen=True)
class Resumed:
    """A session taken up again.

    `cache` holds `num_tokens` tokens, all cold.  `lost_tokens` > 0 if pages were missing, so that
    only a prefix could be taken (and no `states`); `reason` says why.  `tokens` are those it
    holds, or None where windowed layers alone need no record of old blocks and it is gone.
    """

    cache: KVCache
    num_tokens: int
    tokens: list[int] | None
    states: list[NamedState]
    metadata: dict[str, Any]
    lost_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of some tokens; `cache` is None if there is none.

    `reason` says why it is no longer: "no such prefix", "shorter than a block", "evicted: ...",
    "expired: ...", "corrupt: ...", "namespace differs: field, stored, given" (docs/concurrency.md);
    empty if all of it was found.
    """

    num_tokens: int
    cache: KVCache | None
    reason: str


def _tokens_of(blocks: Sequence[Block], tail: bytes) -> list[int] | None:
    """The tokens of named blocks and of a tail, or None if the record of a block is gone."""
    records = [block.record for block in blocks]
    found = [record.tokens for record in records if record is not None]
    if len(found) < len(records):
        return None
    flat = np.concatenate([*(as_tokens(tokens) for tokens in found), np.frombuffer(tail, "<i8")])
    listed: list[int] = flat.tolist()
    return listed


def spec_of(namespace: Namespace, checkpoint: Checkpoint) -> CacheSpec:
    """The cache a checkpoint was taken of, as far as it says."""
    layers = tuple(
        LayerSpec(
            kv_heads=page.kv_heads,
            head_dim=page.key_dim,
            value_dim=page.value_dim,
            window=tail.window,
            sink_tokens=tail.sink_tokens,
            keys=page.keys,
            values=page.values,
            dtype=page.dtype,
        )
        for page, tail in zip(namespace.layers, checkpoint.layers, strict=True)
    )
    return CacheSpec(
        layers,
        page_tokens=namespace.page_tokens,
        recent_tokens=checkpoint.recent_tokens,
        seed=namespace.seed,
        rotation=namespace.layers[0].rotation,
        window_history=checkpoint.window_history,
    )


def longest(pages: NamespaceStore, spec: CacheSpec, hashes: Sequence[bytes]) -> int:
    """Blocks of the longest prefix that a cache of `spec` could be resumed at."""
    return pages.match(
        spec.page_specs,
        [layer.window for layer in spec.layers],
        [layer.sink_tokens for layer in spec.layers],
        hashes,
    )


def why(
    pages: NamespaceStore,
    spec: CacheSpec,
    hashes: Sequence[bytes],
    first: Sequence[BlockRecord] = (),
    found: int | None = None,
) -> Miss:
    windows = [layer.window for layer in spec.layers]
    sinks = [layer.sink_tokens for layer in spec.layers]
    return explain(pages, windows, sinks, hashes, first[0] if first else None, found)


def take_up(cache: KVCache, checkpoint: Checkpoint) -> Resumed:
    check_layers(checkpoint, cache.spec)
    pages = cache.pager.pages
    assert pages is not None
    hashes = checkpoint.block_hashes
    num_blocks = longest(pages, cache.spec, hashes)
    blocks = [Block(name, pages.block(name)) for name in hashes[:num_blocks]]
    fill_cold(cache, blocks)
    if num_blocks == len(hashes):
        fill_tails(cache, checkpoint)
        return Resumed(
            cache,
            cache.num_tokens,
            _tokens_of(blocks, checkpoint.tail_tokens),
            named_states(checkpoint),
            dict(checkpoint.metadata),
        )
    if checkpoint.states:
        raise NotFound(
            f"pages from block {num_blocks} on are missing ({why(pages, cache.spec, hashes)}), "
            f"and the model's own states cannot go back from token {checkpoint.num_tokens}",
            doing="resuming",
            remedy="Start the session anew; `tqstore verify` tells what is damaged",
        )
    return Resumed(
        cache,
        cache.num_tokens,
        _tokens_of(blocks, b""),
        [],
        dict(checkpoint.metadata),
        lost_tokens=checkpoint.num_tokens - cache.num_tokens,
        reason=f"pages from block {num_blocks} on are missing: {why(pages, cache.spec, hashes)}",
    )
