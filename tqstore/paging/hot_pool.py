"""The hot pool: one arena of slots a layer, under one byte budget.

Owns the budget and each layer's share of it.  Does not choose victims and moves nothing to or from
disk (pager).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tqstore.errors import PoolExhausted
from tqstore.paging.arena import Arena, Slots
from tqstore.paging.eviction import Candidates
from tqstore.spec import PageSpec


class HotPool:
    """Every layer's arena under one byte budget.  Touched by one thread.

    `most_pages` says how many pages a layer can use at most (a window's), None for any number.
    A layer's share of the budget follows from it; slots of one layer are of no use to another.
    `sink_blocks` is how many blocks at a sequence's start hold the layer's sinks.
    """

    def __init__(
        self,
        page_specs: Sequence[PageSpec],
        budget_nbytes: int,
        most_pages: Sequence[int | None] | None = None,
        sink_blocks: Sequence[int] | None = None,
    ) -> None:
        self.arenas = [Arena(spec) for spec in page_specs]
        self.budget_nbytes = budget_nbytes
        self.clock = 0
        self.sink_blocks = sink_blocks or [0] * len(page_specs)
        self.shares = _shares(page_specs, budget_nbytes, most_pages or [None] * len(page_specs))

    @property
    def used_nbytes(self) -> int:
        """Bytes of the pages held, shared pages once."""
        return sum(arena.used_nbytes for arena in self.arenas)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of MLX memory, free slots included."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def room_nbytes(self) -> int:
        """Bytes of pages that may still be added without evicting any."""
        return self.budget_nbytes - self.used_nbytes

    def candidates(self, layer: int, slots: Slots) -> Candidates:
        """What eviction has to know of some pages of a layer."""
        arena = self.arenas[layer]
        return Candidates(
            layer,
            slots,
            arena.last_used[slots],
            arena.num_references[slots],
            arena.block_idx[slots] < self.sink_blocks[layer],
            arena.spec.page_nbytes,
        )

    def allocate(self, layer: int, count: int) -> Slots:
        """Slots of a layer, for which there must be room; spare ones for later only within its
        share, and never more memory than the budget."""
        arena = self.arenas[layer]
        page_nbytes = arena.spec.page_nbytes
        growth = max(0, count - arena.num_free) * page_nbytes
        self._give_back(growth, but=arena)
        spare = min(
            self.shares[layer] - arena.used_nbytes - count * page_nbytes,
            self.budget_nbytes - self.allocated_nbytes - growth,
        )
        return arena.allocate(count, spare // page_nbytes)

    def _give_back(self, growth: int, but: Arena) -> None:
        """Takes free slots' memory from other layers if with `growth` it were over the budget."""
        others = [arena for arena in self.arenas if arena is not but and arena.num_free]
        for arena in sorted(others, key=lambda arena: arena.used_nbytes - arena.nbytes):
            if self.allocated_nbytes + growth <= self.budget_nbytes:
                return
            arena.compact()

    def check(self) -> None:
        """Raises AssertionError where an invariant of design section 8 does not hold."""
        assert self.used_nbytes <= self.budget_nbytes, "more pages than the budget allows"
        assert self.allocated_nbytes <= self.budget_nbytes, "more memory than the budget allows"
        for layer, arena in enumerate(self.arenas):
            used = int((arena.num_references > 0).sum())
            assert used + arena.num_free == arena.num_rows, f"layer {layer}: slots leak"
            held = len(arena.segments)
            assert held == arena.num_rows, f"layer {layer}: memory for {held} slots"
            rows = arena.row_of[arena.num_references > 0]
            assert len(np.unique(rows)) == used, f"layer {layer}: pages in one place"
            assert (rows < held).all(), f"layer {layer}: pages in no place"
            assert not (arena.num_references < 0).any(), f"layer {layer}: over-released"
            assert not (arena.num_pins < 0).any(), f"layer {layer}: over-unpinned"
            idle = arena.num_references == 0
            assert not (arena.num_pins[idle] > 0).any(), f"layer {layer}: free slots are pinned"
            unsaved = np.flatnonzero((arena.num_references > 0) & ~arena.is_durable)
            assert sorted(arena.block_of) == unsaved.tolist(), f"layer {layer}: blocks not known"
            for slot in arena.hash_of:
                assert arena.is_durable[slot], f"layer {layer} slot {slot}: named, not durable"
                assert arena.num_references[slot] > 0, f"layer {layer} slot {slot}: named, free"
            for block_hash, slot in arena.slot_of.items():
                assert arena.hash_of.get(slot) == block_hash, f"layer {layer} slot {slot}: renamed"

    def require(self, nbytes: int) -> None:
        """PoolExhausted if `nbytes` alone exceed the budget."""
        if nbytes > self.budget_nbytes:
            raise PoolExhausted(
                f"{nbytes} bytes do not fit the memory budget of {self.budget_nbytes}",
                remedy="Give memory_budget room for at least one page of every layer",
            )


def _shares(
    page_specs: Sequence[PageSpec], budget_nbytes: int, most_pages: Sequence[int | None]
) -> list[int]:
    """Bytes a layer may hold before it has to give way to others: equal parts of the budget, less
    where a layer has no use for so much, more for the others then."""
    shares = [0] * len(page_specs)
    open_layers = list(range(len(page_specs)))
    rest = budget_nbytes
    while open_layers:
        equal = rest // len(open_layers)
        sated = [
            layer
            for layer in open_layers
            if (most := most_pages[layer]) is not None
            and most * page_specs[layer].page_nbytes <= equal
        ]
        for layer in sated or open_layers:
            most = most_pages[layer]
            shares[layer] = most * page_specs[layer].page_nbytes if sated and most else equal
            rest -= shares[layer]
        open_layers = [layer for layer in open_layers if layer not in sated] if sated else []
    return [share + rest // len(shares) for share in shares]
