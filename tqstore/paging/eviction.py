"""Which hot pages to drop, or to write out first, when room is needed.

Pure: numbers in, an order out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Candidates:
    """Slots of one layer that could go, with one entry each in the other arrays."""

    layer: int
    slots: npt.NDArray[np.int64]
    last_used: npt.NDArray[np.int64]
    num_references: npt.NDArray[np.int32]
    is_sink: npt.NDArray[np.bool_]
    page_nbytes: int

    @property
    def goes_last(self) -> npt.NDArray[np.bool_]:
        """Pages that several sequences share, and sinks: every token to come sees those."""
        return (self.num_references > 1) | self.is_sink


def choose_victims(
    candidates: list[Candidates], needed_nbytes: int, *, spares_last: bool = False
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(layer, slots) whose pages add up to `needed_nbytes`, or all of them if they don't.

    Oldest use first; those that go last, whatever their age, or with `spares_last` not at all.
    """
    if not candidates:
        return
    layers = np.concatenate([np.full(len(c.slots), c.layer) for c in candidates])
    slots = np.concatenate([c.slots for c in candidates])
    last_used = np.concatenate([c.last_used for c in candidates])
    goes_last = np.concatenate([c.goes_last for c in candidates])
    nbytes = np.concatenate([np.full(len(c.slots), c.page_nbytes) for c in candidates])
    order = np.lexsort((slots, layers, last_used, goes_last))
    if spares_last:
        order = order[~goes_last[order]]
    freed = np.cumsum(nbytes[order])
    chosen = order[: int(np.searchsorted(freed, needed_nbytes)) + 1]
    for layer in np.unique(layers[chosen]).tolist():
        yield layer, np.sort(slots[chosen[layers[chosen] == layer]])
