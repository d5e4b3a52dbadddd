"""Writing sealed pages out: all that a save needs, or some in the background to make room.

Owns turning slots into stamped host records and marking slots durable once the store says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tqstore.format.block_hash import BlockRecord
from tqstore.format.page import stamp_headers
from tqstore.paging.arena import Arena, Slots, contiguous_runs
from tqstore.paging.block_chain import Block
from tqstore.paging.hot_pool import HotPool
from tqstore.paging.page_table import PageTable
from tqstore.paging.spiller import Spill, Spiller
from tqstore.paging.staging import Staging
from tqstore.paging.stats import PagingStats

if TYPE_CHECKING:
    from tqstore.store.page_store import Commit, NamespaceStore

# A background spill holds at least this share of the budget, so that packs don't get too small,
# and no more than a pack, since its copy lives beside the pool.
_SPILL_SHARE = 16


class Spilling:
    """The outgoing half of a pager.  Owner's thread only; a Spiller does the waiting."""

    def __init__(self, pool: HotPool, pages: NamespaceStore | None, stats: PagingStats) -> None:
        self._pool = pool
        self._pages = pages
        self._stats = stats
        self._spiller = None if pages is None else Spiller(pages)
        self._in_flight: list[set[int]] = [set() for _ in pool.arenas]  # refs being written
        self._error: Exception | None = None

    def write_all(self, commit: Commit, tables: Sequence[PageTable], num_blocks: int) -> None:
        """Makes every page of a sequence's first `num_blocks` blocks durable now.

        Their tokens must be known.  A pack holds all layers of a range of blocks, layer by layer,
        so that a layer's pages are read in few calls and a range can be evicted with its pack.
        """
        assert self._pages is not None, "spilling needs a store"
        self.drain()
        for layers in self._layers_by_spec():
            unsaved = {layer: self._unsaved(layer, tables[layer], num_blocks) for layer in layers}
            step = max(1, self._max_pages(layers[0]) // len(layers))
            staging = Staging()
            for low in range(0, num_blocks, step):
                chosen = {layer: part[low : low + step] for layer, part in unsaved.items()}
                chosen = {layer: part[part >= 0] for layer, part in chosen.items()}
                if any(map(len, chosen.values())):
                    spill = self._spill_of(chosen, staging)
                    commit.add_pages(
                        self._pages, spill.spec, spill.blocks, spill.keys, spill.records
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

    def start(self, needed: int, layers: Sequence[int]) -> bool:
        """Starts writing the longest unused pages of `layers`: `needed` bytes if there are so many.

        False if no page can be written: all are durable, on their way, or of unknown tokens.
        """
        if self._spiller is None or self._error is not None:
            return False
        needed = max(needed, self._pool.budget_nbytes // _SPILL_SHARE)
        for group in self._layers_by_spec():
            chosen = self._oldest([layer for layer in group if layer in layers], needed)
            if chosen:
                spill = self._spill_of(chosen, Staging())
                for layer, refs in spill.refs.items():
                    self._in_flight[layer].update(refs.tolist())
                self._spiller.submit(spill)
                return True
        return False

    def collect(self, *, wait: bool) -> bool:
        """Takes note of spills that have ended; True if there were any.

        A failed one leaves its pages hot and unsaved, is counted, and stops further background
        spills until a save succeeds or `take_error` is called.
        """
        if self._spiller is None:
            return False
        outcomes = self._spiller.outcomes(wait=wait)
        for outcome in outcomes:
            for layer, refs in outcome.spill.refs.items():
                self._in_flight[layer] -= set(refs.tolist())
            if outcome.error is None:
                self._mark_durable(outcome.spill)
            else:
                self._stats.failed_spills += 1
                self._error = outcome.error
        self._stats.spill_waits = self._spiller.num_waits
        return bool(outcomes)

    def drain(self) -> None:
        """Waits until nothing is being written."""
        while self.collect(wait=True):
            pass

    def take_error(self) -> Exception | None:
        """What made the last background spill fail, once; spills may be tried again then."""
        error, self._error = self._error, None
        return error

    def _layers_by_spec(self) -> list[list[int]]:
        groups: dict[bytes, list[int]] = {}
        for layer, arena in enumerate(self._pool.arenas):
            groups.setdefault(arena.spec.digest, []).append(layer)
        return list(groups.values())

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

    def _oldest(self, layers: Sequence[int], needed: int) -> dict[int, Slots]:
        """Slots by layer of the longest unused pages that can be written, in order of use."""
        found = {layer: self._not_in_flight(layer) for layer in layers}
        if not any(map(len, found.values())):
            return {}
        slots = np.concatenate(list(found.values()))
        owners = np.concatenate([np.full(len(part), layer) for layer, part in found.items()])
        last_used = np.concatenate(
            [self._pool.arenas[layer].last_used[part] for layer, part in found.items()]
        )
        page_nbytes = self._pool.arenas[layers[0]].spec.page_nbytes
        count = min(self._max_pages(layers[0]), -(-needed // page_nbytes))
        chosen = np.lexsort((slots, last_used))[:count]
        return {
            layer: slots[chosen[owners[chosen] == layer]]
            for layer in np.unique(owners[chosen]).tolist()
        }

    def _not_in_flight(self, layer: int) -> Slots:
        arena = self._pool.arenas[layer]
        slots = arena.unsaved()
        flying = self._in_flight[layer]
        if not flying:
            return slots
        return slots[[ref not in flying for ref in arena.refs(slots).tolist()]]

    def _spill_of(self, chosen: Mapping[int, Slots], staging: Staging) -> Spill:
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
        return Spill(spec, list(blocks.values()), keys, records, refs)

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


def _copy_slots(arena: Arena, slots: Slots, out: npt.NDArray[np.uint8]) -> None:
    for first, last in contiguous_runs(slots, arena.segment_pages):
        rows = arena.rows(int(slots[first]), last - first)
        out[first:last] = np.array(rows, copy=False).view(np.uint8)
