"""Which hot pages to drop when room is needed.  Pure: numbers in, an order out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Candidates:
    """Slots of one layer that could be evicted, with one entry each in the other arrays."""

    layer: int
    slots: npt.NDArray[np.int64]
    last_used: npt.NDArray[np.int64]
    num_references: npt.NDArray[np.int32]
    page_nbytes: int


def choose_victims(
    candidates: list[Candidates], needed_nbytes: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(layer, slots) whose pages add up to `needed_nbytes`, or all of them if they don't.

    Oldest use first; pages that several sequences share go last, whatever their age.
    """
    layers = np.concatenate([np.full(len(c.slots), c.layer) for c in candidates])
    slots = np.concatenate([c.slots for c in candidates])
    last_used = np.concatenate([c.last_used for c in candidates])
    is_shared = np.concatenate([c.num_references for c in candidates]) > 1
    nbytes = np.concatenate([np.full(len(c.slots), c.page_nbytes) for c in candidates])
    order = np.lexsort((slots, layers, last_used, is_shared))
    freed = np.cumsum(nbytes[order])
    chosen = order[: int(np.searchsorted(freed, needed_nbytes)) + 1]
    for layer in np.unique(layers[chosen]).tolist():
        yield layer, np.sort(slots[chosen[layers[chosen] == layer]])
