"""Page tables: which pool entry holds each block of one layer of one sequence.  Plain integers.

An entry is a `ref` (slot and the generation under which it was handed out, see hot_pool), `COLD`
(read it from the store) or `EXPIRED` (it left the layer's window and is not kept).  A ref whose
generation is over means the pool evicted the page, which it only does to durable pages: such an
entry reads as cold.  So evicting needs no list of the tables that point at a slot.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

COLD = -1
EXPIRED = -2

Refs = npt.NDArray[np.int64]


class PageTable:
    """Logical block index -> ref.  Eight bytes a page.  Not thread-safe: one writer a sequence."""

    __slots__ = ("_refs",)

    def __init__(self, refs: Refs | None = None) -> None:
        self._refs = array("q")
        if refs is not None:
            self.extend(refs)

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def nbytes(self) -> int:
        return self._refs.itemsize * len(self._refs)

    def refs(self, first: int = 0, last: int | None = None) -> Refs:
        """A copy of the entries of blocks first..last-1."""
        return np.array(self._refs[first:last], dtype=np.int64)

    def extend(self, refs: Refs) -> None:
        self._refs.frombytes(np.ascontiguousarray(refs, dtype=np.int64).tobytes())

    def put(self, blocks: npt.NDArray[np.intp], refs: Refs) -> None:
        """Replaces the entries of `blocks`."""
        for block, ref in zip(blocks.tolist(), refs.tolist(), strict=True):
            self._refs[block] = ref

    def truncate(self, num_blocks: int) -> Refs:
        """Drops the entries from `num_blocks` on and returns them."""
        dropped = self.refs(num_blocks)
        del self._refs[num_blocks:]
        return dropped

    def copy(self) -> PageTable:
        return PageTable(self.refs())
