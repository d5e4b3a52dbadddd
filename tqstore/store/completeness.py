"""Whether every page a checkpoint needs is there, at a cost that follows what is new.

A block's hash stands for all blocks before it, so once a chain was found complete up to a block,
only later blocks are looked at.  Owns that memory; it is dropped whenever a page is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tqstore.format.checkpoint import CheckpointSummary
from tqstore.format.namespace import Namespace
from tqstore.spec import PageSpec
from tqstore.store.fork_lock import ForkLock
from tqstore.store.pack_index import PackIndex

_MAX_TIPS = 4096


class Completeness:
    """`_tips`: (page spec, mask of layers) -> blocks up to which whole chains are durable."""

    def __init__(self) -> None:
        self._tips: dict[tuple[bytes, int], set[bytes]] = {}
        self._num_losses: dict[bytes, int] = {}
        self._lock = ForkLock()

    def missing_page(
        self,
        namespace: Namespace,
        summary: CheckpointSummary,
        index_of: Callable[[PageSpec], PackIndex],
    ) -> tuple[int, bytes] | None:
        """(layer, block hash) of a needed page that isn't there, or None.  Thread-safe."""
        with self._lock:
            return self._missing_page(namespace, summary, index_of)

    def _missing_page(
        self,
        namespace: Namespace,
        summary: CheckpointSummary,
        index_of: Callable[[PageSpec], PackIndex],
    ) -> tuple[int, bytes] | None:
        for (spec, window, _, _), layers in self._groups(namespace, summary).items():
            index = index_of(spec)
            if self._num_losses.get(spec.digest) != index.num_losses:
                self._tips = {
                    key: tips for key, tips in self._tips.items() if key[0] != spec.digest
                }
                self._num_losses[spec.digest] = index.num_losses
            mask = sum(1 << layer for layer in layers)
            tips = self._tips.setdefault((spec.digest, mask), set()) if window is None else set()
            needed = list(summary.needed_blocks(layers[0]))  # newest first
            missing = _first_missing(index, mask, needed, tips)
            if missing is not None:
                block_hash, found = missing
                return next(layer for layer in layers if not found >> layer & 1), block_hash
            if needed and window is None:
                if len(tips) >= _MAX_TIPS:
                    tips.clear()
                tips.add(needed[0])
        return None

    def _groups(
        self, namespace: Namespace, summary: CheckpointSummary
    ) -> dict[tuple[PageSpec, int | None, int, int], list[int]]:
        """Layers by (spec, window, sinks, tail start): all of a group need the same blocks."""
        groups: dict[tuple[PageSpec, int | None, int, int], list[int]] = {}
        for layer, (spec, reach) in enumerate(zip(namespace.layers, summary.reach, strict=True)):
            groups.setdefault((spec, *reach), []).append(layer)
        return groups


def _first_missing(
    index: PackIndex, mask: int, needed: Iterable[bytes], tips: set[bytes]
) -> tuple[bytes, int] | None:
    """The first block without all layers of `mask`, and those it has; packs are made durable."""
    packs: set[int] = set()
    for block_hash in needed:
        if block_hash in tips:
            break
        found = index.layers_of(block_hash)
        if found & mask != mask:
            return block_hash, found
        packs |= index.packs_of(block_hash)
    index.make_durable(packs)
    return None
