"""The pager: the only mover of pages between the hot pool and the store.

Owns sealing into slots, restoring, spilling and evicting.  Reads go through in runs: hot pages as
views of the pool, cold ones restored while the budget has room and streamed past it otherwise, so
that a sequence may be larger than memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import NotFound, PoolExhausted
from tqstore.format.page import stamp_headers
from tqstore.paging.block_chain import BlockChain
from tqstore.paging.eviction import choose_victims
from tqstore.paging.hot_pool import Arena, HotPool, Slots, by_segment, contiguous_runs
from tqstore.paging.page_table import COLD, EXPIRED, PageTable, Refs
from tqstore.paging.staging import Staging

if TYPE_CHECKING:
    from tqstore.store.page_store import Commit, NamespaceStore
    from tqstore.store.records import Location

Blocks = npt.NDArray[np.int64]


@dataclass
class PagingStats:
    """Counters since the pool was made; anyone may read them."""

    sealed_pages: int = 0
    hits: int = 0
    restored_pages: int = 0
    restored_nbytes: int = 0
    shared_pages: int = 0
    streamed_pages: int = 0
    spilled_pages: int = 0
    spilled_nbytes: int = 0
    evicted_pages: int = 0
    reopened_pages: int = 0
    expired_pages: int = 0


@dataclass(frozen=True)
class Run:
    """Some pages of a layer: `records` uint32 [n, page_words] and the logical block of each."""

    blocks: Blocks
    records: mx.array


@dataclass
class Pager:
    """Moves the pages of every sequence that shares `pool`.  Used by one thread.

    `pages` is None for a cache without a store: then nothing can be evicted.
    """

    pool: HotPool
    pages: NamespaceStore | None = None
    stats: PagingStats = field(default_factory=PagingStats)
    _staging: Staging = field(default_factory=Staging, repr=False)
    _dead: deque[tuple[int, PageTable]] = field(default_factory=deque, repr=False)

    def bury(self, layer: int, table: PageTable) -> None:
        """Notes the table of a cache that is gone.  May run inside any other call (finalizer)."""
        self._dead.append((layer, table))

    def reap(self) -> None:
        """Takes back the slots of caches that are gone."""
        while self._dead:
            layer, table = self._dead.popleft()
            self.release(layer, table.refs())

    def seal(self, layer: int, records: mx.array) -> Refs:
        """Puts new records uint32 [n, page_words] into slots of their own."""
        self.reap()
        count = records.shape[0]
        self._make_room(layer, count)
        arena = self.pool.arenas[layer]
        slots = arena.allocate(count)
        arena.write(slots, records)
        arena.last_used[slots] = self.pool.clock
        self.stats.sealed_pages += count
        return arena.refs(slots)

    def runs(
        self,
        layer: int,
        table: PageTable,
        chain: BlockChain,
        blocks: Blocks,
        *,
        max_pages: int,
    ) -> Iterator[Run]:
        """Every page of `blocks` once, in order, in runs of at most `max_pages`.

        Where runs begin and end depends on `blocks` alone and not on where the pages happen to be,
        so that a resumed sequence computes bit for bit what one that never stopped does.
        Raises NotFound or Corrupt if a cold page cannot be read.
        """
        self.reap()
        self.pool.clock += 1
        arena = self.pool.arenas[layer]
        slots = self._slots_of(arena, table, blocks)
        cold = blocks[slots < 0]
        if len(cold):
            self._restore_into_room(layer, table, chain, cold)
            slots = self._slots_of(arena, table, blocks)
        arena.last_used[slots[slots >= 0]] = self.pool.clock
        self.stats.hits += len(blocks) - len(cold)
        step = min(max_pages, arena.segment_pages)
        for first in range(0, len(blocks), step):
            part, part_slots = blocks[first : first + step], slots[first : first + step]
            yield Run(part, self._records(layer, chain, part, part_slots))

    def _records(self, layer: int, chain: BlockChain, blocks: Blocks, slots: Slots) -> mx.array:
        """Records of `blocks`, uint32 [n, page_words]: a view where they are adjacent slots."""
        arena = self.pool.arenas[layer]
        hot = slots >= 0
        if not hot.any():
            self.stats.streamed_pages += len(blocks)
            return self._read(layer, chain, blocks)
        pieces = []
        edges = np.flatnonzero(np.diff(hot)) + 1
        for part, part_slots in zip(np.split(blocks, edges), np.split(slots, edges), strict=True):
            if part_slots[0] < 0:
                self.stats.streamed_pages += len(part)
                pieces.append(self._read(layer, chain, part))
                continue
            for first, last in contiguous_runs(part_slots, arena.segment_pages):
                pieces.append(arena.rows(int(part_slots[first]), last - first))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def release(self, layer: int, refs: Refs) -> None:
        """The caller's table no longer holds these entries."""
        arena = self.pool.arenas[layer]
        slots = arena.resolve(refs)
        arena.release(slots[slots >= 0])

    def retain(self, layer: int, refs: Refs) -> None:
        """One more table holds these entries (fork)."""
        arena = self.pool.arenas[layer]
        slots = arena.resolve(refs)
        arena.retain(slots[slots >= 0])

    def expire(self, layer: int, table: PageTable, blocks: Blocks, *, keep_unsaved: bool) -> int:
        """Drops hot copies of pages that left the window; unsaved ones only if they may be lost.

        Returns the first block of `blocks` that stays hot, or the end of the range.
        """
        arena = self.pool.arenas[layer]
        refs = table.refs()[blocks]
        slots = arena.resolve(refs)
        hot = slots >= 0
        durable = ~hot & (refs != EXPIRED)
        durable[hot] = arena.is_durable[slots[hot]]
        gone = hot & (durable | (not keep_unsaved))
        if gone.any():
            arena.release(slots[gone])
            table.put(blocks[gone], np.where(durable[gone], COLD, EXPIRED).astype(np.int64))
            self.stats.expired_pages += int(gone.sum())
        kept = np.flatnonzero(hot & ~gone)
        return int(blocks[kept[0]]) if len(kept) else int(blocks[-1]) + 1

    def unsaved(self, layer: int, table: PageTable, num_blocks: int) -> Blocks:
        """Blocks below `num_blocks` whose page is hot and not yet durable."""
        arena = self.pool.arenas[layer]
        slots = arena.resolve(table.refs(0, num_blocks))
        if not arena.num_slots:
            return np.zeros(0, np.int64)
        return np.flatnonzero((slots >= 0) & ~arena.is_durable[np.maximum(slots, 0)])

    def spill(
        self, commit: Commit, tables: Sequence[PageTable], chain: BlockChain, num_blocks: int
    ) -> None:
        """Writes every unsaved page of the first `num_blocks` blocks, all of them named.

        A pack holds all layers of a range of blocks, layer by layer, so that a layer's pages are
        read in few calls and a whole range can be evicted with its pack.
        """
        assert self.pages is not None, "spill needs a store"
        by_spec: dict[bytes, list[int]] = {}
        for layer, arena in enumerate(self.pool.arenas):
            by_spec.setdefault(arena.spec.digest, []).append(layer)
        for layers in by_spec.values():
            unsaved = {layer: self.unsaved(layer, tables[layer], num_blocks) for layer in layers}
            starts = {int(b) for blocks in unsaved.values() for b in blocks}
            step = max(1, self.pages.pack_pages(self.pool.arenas[layers[0]].spec) // len(layers))
            ordered = sorted(starts)
            for first in range(0, len(ordered), step):
                chosen = set(ordered[first : first + step])
                entries = {
                    layer: np.array([b for b in blocks.tolist() if b in chosen], np.int64)
                    for layer, blocks in unsaved.items()
                }
                self._write_pack(commit, entries, tables, chain)

    def _write_pack(
        self,
        commit: Commit,
        entries: dict[int, Blocks],
        tables: Sequence[PageTable],
        chain: BlockChain,
    ) -> None:
        assert self.pages is not None
        spec = self.pool.arenas[next(iter(entries))].spec
        total = sum(len(blocks) for blocks in entries.values())
        records = self._staging.rows(total, spec.page_nbytes)
        keys: list[tuple[int, bytes]] = []
        for layer, blocks in entries.items():
            arena = self.pool.arenas[layer]
            slots = self._slots_of(arena, tables[layer], blocks)
            for first, last in contiguous_runs(slots, arena.segment_pages):
                rows = arena.rows(int(slots[first]), last - first)
                start = len(keys)
                records[start : start + last - first] = np.array(rows, copy=False).view(np.uint8)
                keys += [(layer, name) for name in chain.hashes_of(blocks[first:last])]
        stamp_headers(records, spec, keys)
        wanted = sorted({block for blocks in entries.values() for block in blocks.tolist()})
        commit.add_pages(
            self.pages, spec, chain.records_of(np.array(wanted, np.int64)), keys, records
        )
        for layer, blocks in entries.items():
            slots = self._slots_of(self.pool.arenas[layer], tables[layer], blocks)
            self.pool.arenas[layer].mark_durable(slots, chain.hashes_of(blocks))
        self.stats.spilled_pages += total
        self.stats.spilled_nbytes += total * spec.page_nbytes

    def _slots_of(self, arena: Arena, table: PageTable, blocks: Blocks) -> Slots:
        return arena.resolve(table.refs()[blocks]) if len(blocks) else np.zeros(0, np.int64)

    def _make_room(self, layer: int, count: int) -> None:
        """Evicts durable pages until `count` new ones of `layer` fit, or PoolExhausted."""
        budget = self.pool.budget_nbytes
        if budget is None:
            return
        needed = count * self.pool.arenas[layer].spec.page_nbytes
        self.pool.require(needed)
        order = sorted(range(len(self.pool.arenas)), key=lambda other: other != layer)
        for other in order:
            excess = self.pool.used_nbytes + needed - budget
            if excess <= 0:
                return
            arena = self.pool.arenas[other]
            candidates = np.flatnonzero((arena.num_references > 0) & arena.is_durable)
            victims = choose_victims(
                candidates,
                arena.last_used[candidates],
                arena.num_references[candidates],
                -(-excess // arena.spec.page_nbytes),
            )
            arena.evict(victims)
            self.stats.evicted_pages += len(victims)
        if self.pool.used_nbytes + needed > budget:
            raise PoolExhausted(
                f"memory budget of {budget} bytes is full of pages that are not saved yet",
                doing=f"sealing {count} pages of layer {layer}",
                remedy="Save the cache to its store, or raise memory_budget",
            )

    def _restore_into_room(
        self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks
    ) -> None:
        """Makes cold pages hot: shared ones for nothing, others as far as the budget has room."""
        arena = self.pool.arenas[layer]
        shared = [arena.slot_of.get(name, -1) for name in chain.hashes_of(blocks)]
        slots = np.array(shared, np.int64)
        found = slots >= 0
        if found.any():
            arena.retain(slots[found])
            table.put(blocks[found], arena.refs(slots[found]))
            self.stats.shared_pages += int(found.sum())
        missing = blocks[~found]
        if self.pool.budget_nbytes is not None:
            room = (self.pool.budget_nbytes - self.pool.used_nbytes) // arena.spec.page_nbytes
            missing = missing[: max(0, room)]
        slots = arena.allocate(len(missing))
        done = 0
        try:
            # A segment at a time: a new one that is filled whole is the array that was read.
            for part_slots in by_segment(slots, arena.segment_pages):
                part = missing[done : done + len(part_slots)]
                arena.write(part_slots, self._read(layer, chain, part))
                arena.mark_durable(part_slots, chain.hashes_of(part))
                table.put(part, arena.refs(part_slots))
                done += len(part)
        finally:
            arena.release(slots[done:])
            self.stats.restored_pages += done
            self.stats.restored_nbytes += done * arena.spec.page_nbytes

    def _located(self, layer: int, hashes: Sequence[bytes]) -> list[Location | None]:
        """Where pages are.  Dictionary look-ups first: only a miss looks at the disk again."""
        assert self.pages is not None
        spec = self.pool.arenas[layer].spec
        index = self.pages.index(spec)
        found = [index.find(layer, name) for name in hashes]
        if None not in found:
            return found
        return [self.pages.locate(spec, layer, name) for name in hashes]

    def _read(self, layer: int, chain: BlockChain, blocks: Blocks) -> mx.array:
        """Records of cold pages, checked, uint32 [n, page_words]."""
        spec = self.pool.arenas[layer].spec
        if self.pages is None:
            raise NotFound(f"layer {layer}: {len(blocks)} pages are neither hot nor in a store")
        locations = self._located(layer, chain.hashes_of(blocks))
        known = [location for location in locations if location is not None]
        if len(known) < len(locations):
            gone = int(blocks[locations.index(None)])
            raise NotFound(
                f"page of layer {layer}, block {gone} is no longer in the store",
                doing="restoring",
                remedy="Resume the sequence again: a shorter prefix may still be there",
            )
        rows = self._staging.rows(len(known), spec.page_nbytes)
        self.pages.read_pages(spec, known, rows)
        return mx.array(rows.view(np.uint32))
