"""Why a prefix is not, or not wholly, in the store.

Every miss has one of these kinds, told to callers, counted, and shown by `tqstore why-miss`.
Nothing here is on the way of a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tqstore.errors import TqStoreError
from tqstore.format.block_hash import BlockRecord, block_hash, needed_blocks
from tqstore.format.namespace import Namespace, differences
from tqstore.store.namespace_store import NamespaceStore

Kind = Literal[
    "hit",
    "shorter than a block",
    "no such prefix",
    "namespace differs",
    "evicted",
    "expired",
    "corrupt",
]


@dataclass(frozen=True)
class Miss:
    """`num_blocks` of the `asked_blocks` are there; `kind` says why not more, `detail` which.

    As text: "evicted: layer 3 of block 12", or the kind alone.
    """

    kind: Kind
    detail: str
    num_blocks: int
    asked_blocks: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def explain(
    ns: NamespaceStore,
    windows: Sequence[int | None],
    sink_tokens: Sequence[int],
    block_hashes: Sequence[bytes],
    first_block: BlockRecord | None = None,
    found: int | None = None,
) -> Miss:
    """Why a cache of these blocks can't be resumed whole.  Counts what it tells.

    `windows` and `sink_tokens` are those of each layer of the namespace.  With `first_block`, whose
    tokens it has, other namespaces are searched too.  `found`: what `ns.match` said, if known.
    """
    if found is None:
        found = ns.match(ns.namespace.layers, windows, sink_tokens, block_hashes)
    miss = _explain(ns, windows, sink_tokens, block_hashes, first_block, found)
    if miss.kind != "hit":
        misses = ns.store.counters.misses
        misses[miss.kind] = misses.get(miss.kind, 0) + 1
    return miss


def _explain(
    ns: NamespaceStore,
    windows: Sequence[int | None],
    sink_tokens: Sequence[int],
    block_hashes: Sequence[bytes],
    first_block: BlockRecord | None,
    found: int,
) -> Miss:
    asked = len(block_hashes)
    if not asked:
        return Miss("shorter than a block", "", 0, 0)
    layers = ns.namespace.layers
    if found == asked:
        return Miss("hit", "", found, asked)
    missing = _missing(ns, windows, sink_tokens, block_hashes, found + 1)
    for layer, block in missing:
        index = ns.index(layers[layer])
        where = f"layer {layer} of block {block}"
        if index.is_quarantined(layer, block_hashes[block]):
            return Miss("corrupt", where, found, asked)
    gone = ns.store.gone()
    for layer, block in missing:
        reason = gone.reason_of(block_hashes[block])
        if reason is not None:
            return Miss(reason, f"layer {layer} of block {block}", found, asked)
    faults = [error for index in ns.indexes for error in index.faults.values()]
    if faults:
        return Miss("corrupt", str(faults[0]), found, asked)
    if not found and first_block is not None:
        differing = _other_namespace(ns, first_block)
        if differing is not None:
            return Miss("namespace differs", differing, found, asked)
    return Miss("no such prefix", "", found, asked)


def _missing(
    ns: NamespaceStore,
    windows: Sequence[int | None],
    sink_tokens: Sequence[int],
    block_hashes: Sequence[bytes],
    num_blocks: int,
) -> list[tuple[int, int]]:
    """(layer, block) of each page that a cache of the first `num_blocks` would need in vain."""
    found = []
    page_tokens = ns.namespace.page_tokens
    for layer, spec in enumerate(ns.namespace.layers):
        index = ns.index(spec)
        sinks, first = needed_blocks(num_blocks, page_tokens, windows[layer], sink_tokens[layer])
        for block in (*range(sinks), *range(first, num_blocks)):
            if not index.layers_of(block_hashes[block]) >> layer & 1:
                found.append((layer, block))
    return found


def _other_namespace(ns: NamespaceStore, first_block: BlockRecord) -> str | None:
    """In which field a namespace that has these tokens differs: "field, stored, given"."""
    for other in _namespaces(ns):
        if other.tenant != ns.namespace.tenant:
            continue  # tenants must not learn what others have stored
        if other.id == ns.id or other.page_tokens != len(first_block.tokens):
            continue
        if ns.store.namespace(other).block(block_hash(other.id, first_block.token_bytes)):
            for field, stored, given in differences(other.fields, ns.namespace.fields):
                return f"{field}, stored {stored!r}, given {given!r}"
    return None


def _namespaces(ns: NamespaceStore) -> list[Namespace]:
    found = []
    for namespace_id in ns.store.namespace_ids():
        try:
            found.append(ns.store.stored_namespace(namespace_id))
        except TqStoreError:
            continue  # one that cannot be read has no pages that could be
    return found
