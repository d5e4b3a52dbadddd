"""The pager: the only mover of pages between the hot pool and the store.

Owns sealing into slots, reading in runs, restoring, and making room.  Hot pages are read as views
of the pool; cold ones are restored while the budget has room and streamed past it otherwise, so
that a sequence may be larger than memory.  Writing out is spilling.py's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import PoolExhausted
from tqstore.paging.arena import Arena, Slots
from tqstore.paging.block_chain import Block, BlockChain
from tqstore.paging.cold_reader import ColdReader
from tqstore.paging.eviction import choose_victims
from tqstore.paging.holdings import Holdings
from tqstore.paging.hot_pool import HotPool
from tqstore.paging.page_table import COLD, EXPIRED, PageTable, Refs
from tqstore.paging.spilling import Spilling
from tqstore.paging.stats import PagingStats

if TYPE_CHECKING:
    from tqstore.store.page_store import NamespaceStore

# Pages used within this many reads of any layer are in use by some sequence (see `runs`).
_RECENT_READS_A_LAYER = 4
# Well within the time for which gc spares pages that were used (store.gc_plan.GRACE_SECONDS).
_NOTE_USE_SECONDS = 120.0

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Some pages of a layer: `records` uint32 [n, page_words] and the logical block of each.

    `is_streamed` tells that they are not in the pool, so that memory is bounded only if what is
    made of them is evaluated before the next run is taken.
    """

    blocks: Blocks
    records: mx.array
    is_streamed: bool


@dataclass
class Pager:
    """Moves the pages of every sequence that shares `pool`.  Used by one thread.

    `pages` is None for a cache without a store: then nothing can be evicted.
    """

    pool: HotPool
    pages: NamespaceStore | None = None
    stats: PagingStats = field(default_factory=PagingStats)
    identity: int = field(default_factory=partial(secrets.randbits, 53))  # exact in JSON
    holdings: Holdings = field(default_factory=Holdings, repr=False)

    def __post_init__(self) -> None:
        self._noted_at: dict[int, float] = {}  # layer -> when its packs were last marked as used
        self.cold = ColdReader(self.pages)
        self.spilling = Spilling(self.pool, self.pages, self.stats)

    def figures(self) -> dict[str, int]:
        """Counters and bytes of the pool for other processes to read, and which pool it is."""
        return {
            "pool": self.identity,
            "hot_nbytes": self.pool.allocated_nbytes,
            "used_nbytes": self.pool.used_nbytes,
            "budget_nbytes": self.pool.budget_nbytes,
            **asdict(self.stats),
        }

    def reap(self) -> None:
        """Takes back the slots and pins of caches that are gone."""
        self.holdings.reap(self.pool)

    def max_sealed_pages(self, layer: int) -> int:
        """Pages of a layer to seal at a time: a quarter of its share, what spilling ahead of need
        leaves free (`spilling.HIGH_WATER`)."""
        return max(1, self.pool.shares[layer] // (4 * self.pool.arenas[layer].spec.page_nbytes))

    def seal(
        self,
        layer: int,
        records: mx.array,
        blocks: Sequence[Block],
        *,
        first_block: int,
        spill_ahead: bool,
    ) -> Refs:
        """Puts new records uint32 [n, page_words], pages of `blocks`, into slots of their own.

        `first_block` is the index of the first of `blocks` in its sequence.
        `spill_ahead`: pages of this layer pile up until they are written out, so that it begins
        before there is no room.  Others leave their window unwritten, if memory allows.
        Raises PoolExhausted if the budget is full of pages that cannot be written out.
        """
        self.reap()
        count = records.shape[0]
        arena = self.pool.arenas[layer]
        needed = count * arena.spec.page_nbytes
        self.pool.require(needed)
        self._make_room(layer, needed)
        self.pool.clock += 1
        slots = self.pool.allocate(layer, count)
        arena.write(slots, records)
        arena.last_used[slots] = self.pool.clock
        arena.block_idx[slots] = np.arange(first_block, first_block + count)
        arena.block_of.update(zip(slots.tolist(), blocks, strict=True))
        self.stats.sealed_pages += count
        if spill_ahead and blocks[-1].record is not None:  # pages of unknown tokens cannot leave
            self.spilling.start_ahead(layer)
        return arena.refs(slots)

    def runs(
        self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks, *, max_pages: int
    ) -> Generator[Run]:
        """Every page of `blocks` once, in order, in runs of at most `max_pages`.

        Where runs begin and end depends on `blocks` alone and not on where the pages happen to be,
        so that a resumed sequence computes bit for bit what one that never stopped does.
        Raises NotFound or Corrupt if a cold page cannot be read.
        """
        arena = self.pool.arenas[layer]
        slots = self.restore(layer, table, chain, blocks)
        step = min(max_pages, arena.segments.pages)
        starts = range(0, len(blocks), step)
        missing = [
            blocks[first : first + step][slots[first : first + step] < 0] for first in starts
        ]
        streamed = self.cold.stream(
            arena.spec, layer, [chain.hashes_of(part) for part in missing if len(part)]
        )
        for first, part_missing in zip(starts, missing, strict=True):
            part, part_slots = blocks[first : first + step], slots[first : first + step]
            read = next(streamed) if len(part_missing) else None
            self.stats.streamed_pages += len(part_missing)
            self.stats.streamed_nbytes += len(part_missing) * arena.spec.page_nbytes
            yield Run(part, _merged(arena, part_slots, read), is_streamed=read is not None)

    def restore(self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks) -> Slots:
        """Makes `blocks` hot as far as the budget has room: their slots, -1 where it has not."""
        self.reap()
        self.pool.clock += 1
        arena = self.pool.arenas[layer]
        slots = slots_of(arena, table, blocks)
        cold = blocks[slots < 0]
        self.stats.hits += len(blocks) - len(cold)
        self._note_use(layer, chain, blocks)
        if len(cold):
            self._restore(layer, table, chain, cold, keep=slots[slots >= 0])
            slots = slots_of(arena, table, blocks)
        arena.last_used[slots[slots >= 0]] = self.pool.clock
        return slots

    def is_readable(self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks) -> bool:
        """Whether each of `blocks` is hot or known to the store; reads none."""
        arena = self.pool.arenas[layer]
        cold = blocks[slots_of(arena, table, blocks) < 0]
        return not len(cold) or self.cold.has(arena.spec, layer, chain.hashes_of(cold))

    def release(self, layer: int, refs: Refs) -> None:
        """The caller's table no longer holds these entries."""
        arena = self.pool.arenas[layer]
        arena.release(arena.hot(refs))

    def retain(self, layer: int, refs: Refs) -> None:
        """One more table holds these entries (fork)."""
        arena = self.pool.arenas[layer]
        arena.retain(arena.hot(refs))

    def pin(self, layer: int, refs: Refs) -> None:
        """Keeps the hot pages among `refs` from being evicted."""
        arena = self.pool.arenas[layer]
        arena.pin(arena.hot(refs))

    def unpin(self, layer: int, refs: Refs) -> None:
        """Undoes `pin` of the same refs; pages that are gone meanwhile are passed over."""
        arena = self.pool.arenas[layer]
        arena.unpin(arena.hot(refs))

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

    def _note_use(self, layer: int, chain: BlockChain, blocks: Blocks) -> None:
        """Keeps gc away from pages this process uses, though no saved session may need them."""
        now = time.monotonic()
        if self.pages is None or now - self._noted_at.get(layer, -np.inf) < _NOTE_USE_SECONDS:
            return
        self._noted_at[layer] = now
        named = blocks[blocks < chain.num_named]
        self.pages.note_use(chain.hashes_of(named))

    def _make_room(self, layer: int, needed: int) -> None:
        """Evicts durable pages until `needed` bytes fit, writing pages out first if it must.

        Slots of one layer are of no use to another, so a layer gives way to itself once it has its
        share of the budget.  It may take more only where nothing of its own can be written out.
        Shared pages and sinks go only when no other page of theirs can be written out either.
        """
        arena = self.pool.arenas[layer]
        everywhere = range(len(self.pool.arenas))
        self.spilling.collect(wait=False)
        while (over := arena.used_nbytes + needed - self.pool.shares[layer]) > 0:
            over = self._evict(over, [layer], spares_last=True)
            if not over or self.spilling.wait(over, [layer]):
                continue
            self._evict(over, [layer])
            break
        error: Exception | None = None
        while (missing := needed - self.pool.room_nbytes) > 0:
            above = [i for i in everywhere if self.pool.arenas[i].used_nbytes > self.pool.shares[i]]
            missing = self._evict(missing, above, spares_last=True)
            if not missing or self.spilling.wait(missing, everywhere):
                continue
            if not self._evict(needed - self.pool.room_nbytes, everywhere):
                continue
            # What failed some time ago may succeed now: refused only if it fails once more.
            is_second = error is not None
            error = self.spilling.take_error() or error
            if error is None or is_second:
                self._refuse(layer, needed, error)

    def _refuse(self, layer: int, needed: int, error: Exception | None) -> None:
        raise PoolExhausted(
            f"the memory budget of {self.pool.budget_nbytes} bytes is full of pages that are "
            f"pinned or could not be written out" + (f" ({error})" if error else ""),
            doing=f"sealing {needed} bytes of layer {layer}",
            remedy="Save the cache to its store, tell it its tokens, or raise memory_budget",
        ) from error

    def _evict(
        self,
        excess: int,
        layers: Iterable[int],
        *,
        used_before: int | None = None,
        spares_last: bool = False,
    ) -> int:
        """Frees durable pages worth `excess` bytes; how many bytes are still missing.

        `spares_last` leaves alone what eviction says goes last.
        """
        if excess <= 0:
            return 0
        candidates = []
        for layer in layers:
            arena = self.pool.arenas[layer]
            slots = arena.evictable
            if used_before is not None:
                slots = slots[arena.last_used[slots] < used_before]
            if len(slots):
                candidates.append(self.pool.candidates(layer, slots))
        for layer, victims in choose_victims(candidates, excess, spares_last=spares_last):
            self.pool.arenas[layer].evict(victims)
            self.stats.evicted_pages += len(victims)
            excess -= len(victims) * self.pool.arenas[layer].spec.page_nbytes
        return max(0, excess)

    def _restore(
        self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks, keep: Slots
    ) -> None:
        """Makes cold pages hot: shared ones for nothing, others as far as the budget has room.

        Room is also made from pages that no sequence has read lately, never from pages in use:
        evicting those would only make every step read all over again.
        """
        arena = self.pool.arenas[layer]
        arena.last_used[keep] = self.pool.clock
        shared = [arena.slot_of.get(name, -1) for name in chain.hashes_of(blocks)]
        slots = np.array(shared, np.int64)
        found = slots >= 0
        if found.any():
            arena.retain(slots[found])
            table.put(blocks[found], arena.refs(slots[found]))
            arena.last_used[slots[found]] = self.pool.clock
            self.stats.shared_pages += int(found.sum())
        missing = blocks[~found]
        wanted = len(missing) * arena.spec.page_nbytes
        recent = self.pool.clock - _RECENT_READS_A_LAYER * len(self.pool.arenas)
        self._evict(wanted - self._room(layer), [layer], used_before=recent)
        self._evict(
            wanted - self.pool.room_nbytes, range(len(self.pool.arenas)), used_before=recent
        )
        self._fill(layer, table, chain, missing[: self._room(layer) // arena.spec.page_nbytes])

    def _room(self, layer: int) -> int:
        """Bytes that may be read into a layer's slots without taking another's share."""
        own = self.pool.shares[layer] - self.pool.arenas[layer].used_nbytes
        return max(0, min(own, self.pool.room_nbytes))

    def _fill(self, layer: int, table: PageTable, chain: BlockChain, blocks: Blocks) -> None:
        """Reads pages into slots; what was read before an error stays."""
        arena = self.pool.arenas[layer]
        slots = self.pool.allocate(layer, len(blocks))
        names = chain.hashes_of(blocks)
        done = 0
        try:
            # A segment at a time: a new one that is filled whole is the very array that was read.
            # Not read ahead: there is nothing to compute meanwhile, and two buffers of this size
            # push each other out of the processor's cache (docs/performance.md).
            for part in arena.by_segment(slots):
                some = names[done : done + len(part)]
                arena.write(part, self.cold.read(arena.spec, layer, some))
                arena.mark_durable(part, some)
                arena.last_used[part] = self.pool.clock
                arena.block_idx[part] = blocks[done : done + len(part)]
                table.put(blocks[done : done + len(part)], arena.refs(part))
                done += len(part)
        finally:
            arena.release(slots[done:])
            self.stats.restored_pages += done
            self.stats.restored_nbytes += done * arena.spec.page_nbytes


def slots_of(arena: Arena, table: PageTable, blocks: Blocks) -> Slots:
    """Slots of `blocks`, -1 where a page is not hot."""
    return arena.resolve(table.refs()[blocks]) if len(blocks) else np.zeros(0, np.int64)


def _merged(arena: Arena, slots: Slots, read: mx.array | None) -> mx.array:
    """Records in order: hot ones from their slots, the others (-1) from `read` in turn."""
    hot = slots >= 0
    if read is not None and not hot.any():
        return read
    pieces: list[mx.array] = []
    taken = 0
    edges = np.flatnonzero(np.diff(hot)) + 1
    for part in np.split(slots, edges):
        if part[0] < 0:
            assert read is not None, "cold pages were read"
            pieces.append(read[taken : taken + len(part)])
            taken += len(part)
            continue
        pieces += arena.views(part)
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
