"""Who holds pages of the pool: the tables and pins of every layer cache there is.

Owns the list of holders, and giving back what those that are gone have held.  A cache goes when
the garbage collector takes it, which may be inside any other call: its holding is only noted then,
and given back at the pager's next step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tqstore.paging.hot_pool import HotPool
from tqstore.paging.page_table import PageTable, Refs


@dataclass(eq=False)
class Holding:
    """What one layer of one sequence holds: the table's pages, and `pins` of some of them."""

    layer: int
    table: PageTable
    pins: list[Refs]


class Holdings:
    """Every holding of one pool, until it has been given back.  Used by one thread."""

    def __init__(self) -> None:
        self._open: set[Holding] = set()
        self._dead: deque[Holding] = deque()

    def add(self, holding: Holding) -> None:
        self._open.add(holding)

    def bury(self, holding: Holding) -> None:
        """Notes that the holder is gone.  May run inside any other call (finalizer)."""
        self._dead.append(holding)

    def reap(self, pool: HotPool) -> None:
        """Gives back the pins and then the pages of holders that are gone."""
        while self._dead:
            holding = self._dead.popleft()
            arena = pool.arenas[holding.layer]
            for refs in holding.pins:
                arena.unpin(arena.hot(refs))
            arena.release(arena.hot(holding.table.refs()))
            self._open.discard(holding)

    def check(self, pool: HotPool) -> None:
        """Raises AssertionError unless the arenas count exactly what is held here."""
        for layer, arena in enumerate(pool.arenas):
            references = np.zeros_like(arena.num_references)
            pins = np.zeros_like(arena.num_pins)
            for holding in self._open:
                if holding.layer == layer:
                    np.add.at(references, arena.hot(holding.table.refs()), 1)
                    for refs in holding.pins:
                        np.add.at(pins, arena.hot(refs), 1)
            wrong = np.flatnonzero(references != arena.num_references).tolist()
            assert not wrong, f"layer {layer} slots {wrong}: references are not tables that hold it"
            wrong = np.flatnonzero(pins != arena.num_pins).tolist()
            assert not wrong, f"layer {layer} slots {wrong}: pins are not those of live caches"
