"""Writing sealed pages out: all that a save needs, or some in the background before room is needed.

Owns when and how much is handed to the writer thread, turning slots into stamped host records, and
marking slots durable once the store says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tqstore.format.block_hash import BlockRecord
from tqstore.format.page import stamp_headers
from tqstore.paging.arena import Arena, Slots
from tqstore.paging.block_chain import Block
from tqstore.paging.eviction import choose_victims
from tqstore.paging.hot_pool import HotPool
from tqstore.paging.page_table import PageTable
from tqstore.paging.spiller import MAX_PENDING_SPILLS, Payload, Spill, Spiller
from tqstore.paging.staging import Staging
from tqstore.paging.stats import PagingStats

if TYPE_CHECKING:
    from tqstore.store.page_store import Commit, NamespaceStore

# Pages are written ahead once this much of a layer's share, or of the pool, is used.  Below it
# memory is not scarce, and what is dropped early need never be written.  The quarter above it is
# room for one more seal (`Pager.max_sealed_pages`), encoded while what is below is being written.
HIGH_WATER = 0.75
# Pages of layers that are this full go along: layers fill in step, and a pack should hold them all.
_COMING_NEXT = 0.5
# A spill is a pack, but no more than this part of the budget: its copy lives beside the pool.
_SPILL_SHARE = 8


class Spilling:
    """The outgoing half of a pager.  Owner's thread only; a Spiller does the writing."""

    def __init__(self, pool: HotPool, pages: NamespaceStore | None, stats: PagingStats) -> None:
        self._pool = pool
        self._pages = pages
        self._stats = stats
        self._spiller = None if pages is None else Spiller(pages)
        self._error: Exception | None = None
        self._groups = _layers_by_spec(pool)

    @property
    def max_in_flight_nbytes(self) -> int:
        """The most that copies of pages on their way out take beside the pool: three spills, each
        an eighth of the budget or a pack, whichever is less, or else one page."""
        if self._pages is None:
            return 0
        specs = (arena.spec for arena in self._pool.arenas)
        return MAX_PENDING_SPILLS * max(
            self._batch_pages(layer) * spec.page_nbytes for layer, spec in enumerate(specs)
        )

    @property
    def num_unsaved(self) -> int:
        """Sealed pages that are in memory only."""
        return sum(len(arena.block_of) for arena in self._pool.arenas)

    def write_all(self, commit: Commit, tables: Sequence[PageTable], num_blocks: int) -> None:
        """Makes every page of a sequence's first `num_blocks` blocks durable now.

        Their tokens must be known.  A pack holds all layers of a range of blocks, layer by layer,
        so that a layer's pages are read in few calls and a range can be evicted with its pack.
        """
        assert self._pages is not None, "spilling needs a store"
        self.drain()
        for layers in self._groups:
            unsaved = {layer: self._unsaved(layer, tables[layer], num_blocks) for layer in layers}
            step = max(1, self._max_pages(layers[0]) // len(layers))
            staging = Staging()
            for low in range(0, num_blocks, step):
                chosen = {layer: part[low : low + step] for layer, part in unsaved.items()}
                chosen = {layer: part[part >= 0] for layer, part in chosen.items()}
                if any(map(len, chosen.values())):
                    spill, payload = self._copied(chosen, staging)
                    commit.add_pages(
                        self._pages, spill.spec, payload.blocks, spill.keys, payload.records
                    )
                    self._mark_durable(spill)
        self._error = None

    def mark_lost(self, tables: Sequence[PageTable], blocks: Sequence[Block]) -> bool:
        """Hot pages that the store no longer has count as unsaved again; True if there are any.

        gc may have taken what no saved session needed.
        """
        assert self._pages is not None, "spilling needs a store"
        found = False
        for layer, table in enumerate(tables):
            arena = self._pool.arenas[layer]
            slots = arena.resolve(table.refs())
            for index in np.flatnonzero(slots >= 0).tolist():
                slot, block = int(slots[index]), blocks[index]
                if not arena.is_durable[slot] or block.hash is None or block.record is None:
                    continue
                if self._pages.locate(arena.spec, layer, block.hash) is None:
                    arena.mark_unsaved(slot, block)
                    found = True
        return found

    def start_ahead(self, layer: int) -> None:
        """Hands pages to the writer, without waiting, if `layer` or the pool is nearly full.

        A batch is handed over when it is whole, so that a pack holds many pages; or when most of
        the layer's own share is unsaved, which a layer that is filled alone comes to first.
        """
        if self._spiller is None or self._error is not None:
            return
        if not self._filled([layer], HIGH_WATER):
            return
        group = next(group for group in self._groups if layer in group)
        due = self._filled(group, _COMING_NEXT)
        batch = self._batch_pages(layer)
        own = self._pool.shares[layer] // (2 * self._pool.arenas[layer].spec.page_nbytes) + 1
        while not self._spiller.is_full:
            # Counted before they are looked at: a look costs time for every unsaved page.
            if self._num_waiting(due) < batch and self._num_waiting([layer]) < own:
                return
            found = self._writable(due)
            if sum(map(len, found.values())) < batch and len(found[layer]) < own:
                return
            self._submit(self._first_to_go(found, batch))

    def wait(self, needed: int, layers: Sequence[int]) -> bool:
        """Waits until more pages are durable; False if none will be.

        Unless pages of `layers` are on their way, starts with those to be evicted first, `needed`
        bytes if there are so many: all others are durable or of unknown tokens.
        """
        if self._spiller is None:
            return False
        if not any(layer in spill.refs for spill in self._spiller.pending for layer in layers):
            self._start(needed, layers)
        while self._spiller.pending:
            if self.collect(wait=True):
                return True
        return False

    def collect(self, *, wait: bool) -> bool:
        """Takes note of spills that have ended; True if any made pages durable.

        A failed one leaves its pages hot and unsaved, is counted, and stops further background
        spills until a save succeeds or `take_error` is called.
        """
        if self._spiller is None:
            return False
        is_any_durable = False
        for outcome in self._spiller.outcomes(wait=wait):
            if outcome.error is None:
                self._mark_durable(outcome.spill)
                is_any_durable = True
            else:
                self._stats.failed_spills += 1
                self._error = outcome.error
        self._stats.spill_waits = self._spiller.num_waits
        return is_any_durable

    def drain(self) -> None:
        """Waits until nothing is being written."""
        while self._spiller is not None and self._spiller.pending:
            self.collect(wait=True)

    def take_error(self) -> Exception | None:
        """What made the last background spill fail, once; spills may be tried again then."""
        error, self._error = self._error, None
        return error

    def _start(self, needed: int, layers: Sequence[int]) -> None:
        """Hands over the pages of `layers` to be evicted first, worth `needed` bytes, as far as
        the writer takes them."""
        assert self._spiller is not None, "spilling needs a store"
        for group in self._groups:
            chosen = [layer for layer in group if layer in layers]
            while chosen and needed > 0 and self._error is None and not self._spiller.is_full:
                found = self._writable(chosen)
                if not any(map(len, found.values())):
                    break
                pages = self._first_to_go(found, self._batch_pages(group[0]))
                self._submit(pages)
                needed -= sum(map(len, pages.values())) * self._page_nbytes(group[0])

    def _submit(self, chosen: Mapping[int, Slots]) -> None:
        assert self._spiller is not None, "spilling needs a store"
        self._spiller.submit(*self._copied(chosen, Staging()))

    def _filled(self, layers: Sequence[int], part: float) -> Sequence[int]:
        """Those with `part` of their share in use; all of them if it is so of the pool."""
        pool = self._pool
        if pool.used_nbytes >= part * pool.budget_nbytes:
            return layers
        return [
            layer for layer in layers if pool.arenas[layer].used_nbytes >= part * pool.shares[layer]
        ]

    def _batch_pages(self, layer: int) -> int:
        """Pages of one spill: those of a pack or of a part of the budget, whichever is less."""
        part = self._pool.budget_nbytes // _SPILL_SHARE
        return max(1, min(self._max_pages(layer), part // self._page_nbytes(layer)))

    def _page_nbytes(self, layer: int) -> int:
        return self._pool.arenas[layer].spec.page_nbytes

    def _max_pages(self, layer: int) -> int:
        assert self._pages is not None, "spilling needs a store"
        return self._pages.pack_pages(self._pool.arenas[layer].spec)

    def _unsaved(self, layer: int, table: PageTable, num_blocks: int) -> Slots:
        """Slot of each block whose page is hot and not yet durable, -1 of the others."""
        arena = self._pool.arenas[layer]
        slots = arena.resolve(table.refs(0, num_blocks))
        hot = np.flatnonzero(slots >= 0)
        slots[hot[arena.is_durable[slots[hot]]]] = -1
        return slots

    def _num_waiting(self, layers: Iterable[int]) -> int:
        """Pages of `layers` neither durable nor on their way; their tokens may be unknown."""
        assert self._spiller is not None, "spilling needs a store"
        return sum(
            len(self._pool.arenas[layer].block_of)
            - sum(len(spill.refs.get(layer, ())) for spill in self._spiller.pending)
            for layer in layers
        )

    def _writable(self, layers: Sequence[int]) -> dict[int, Slots]:
        """Slots of each layer that could be written: unsaved, of known tokens, not on their way."""
        assert self._spiller is not None, "spilling needs a store"
        found = {}
        for layer in layers:
            arena = self._pool.arenas[layer]
            slots = arena.unsaved()
            for spill in self._spiller.pending:
                if layer in spill.refs:
                    slots = slots[~np.isin(arena.refs(slots), spill.refs[layer])]
            found[layer] = slots
        return found

    def _first_to_go(self, found: Mapping[int, Slots], count: int) -> dict[int, Slots]:
        """The `count` pages of `found` that would be evicted first; all are of one page spec."""
        some = [self._pool.candidates(layer, slots) for layer, slots in found.items() if len(slots)]
        return dict(choose_victims(some, count * some[0].page_nbytes))

    def _copied(self, chosen: Mapping[int, Slots], staging: Staging) -> tuple[Spill, Payload]:
        """Copies pages of one page spec out of their slots and stamps their headers."""
        spec = self._pool.arenas[next(iter(chosen))].spec
        records = staging.rows(sum(map(len, chosen.values())), spec.page_nbytes)
        keys: list[tuple[int, bytes]] = []
        blocks: dict[bytes, BlockRecord] = {}
        refs = {}
        for layer, slots in chosen.items():
            arena = self._pool.arenas[layer]
            refs[layer] = arena.refs(slots)
            _copy_slots(arena, slots, records[len(keys) : len(keys) + len(slots)])
            for slot in slots.tolist():
                record = arena.block_of[slot].record
                assert record is not None, "only pages of known tokens are written"
                keys.append((layer, record.hash))
                blocks.setdefault(record.hash, record)
        stamp_headers(records, spec, keys)
        return Spill(spec, keys, refs), Payload(list(blocks.values()), records)

    def _mark_durable(self, spill: Spill) -> None:
        """The slots, where they still hold these pages, may be evicted from now on."""
        start = 0
        for layer, refs in spill.refs.items():
            arena = self._pool.arenas[layer]
            names = [name for _, name in spill.keys[start : start + len(refs)]]
            start += len(refs)
            slots = arena.resolve(refs)
            still = np.flatnonzero(slots >= 0)
            arena.mark_durable(slots[still], [names[index] for index in still.tolist()])
        self._stats.spilled_pages += len(spill.keys)
        self._stats.spilled_nbytes += len(spill.keys) * spill.spec.page_nbytes


def _layers_by_spec(pool: HotPool) -> list[list[int]]:
    groups: dict[bytes, list[int]] = {}
    for layer, arena in enumerate(pool.arenas):
        groups.setdefault(arena.spec.digest, []).append(layer)
    return list(groups.values())


def _copy_slots(arena: Arena, slots: Slots, out: npt.NDArray[np.uint8]) -> None:
    first = 0
    for view in arena.views(slots):
        last = first + view.shape[0]
        out[first:last] = np.array(view, copy=False).view(np.uint8)
        first = last
