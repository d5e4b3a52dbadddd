"""Page-aligned host buffers that restores read into.

numpy's own large buffers start 16 bytes past a page, which makes preadv into them 5 to 9 times
slower on some processors (docs/performance.md); anonymous mappings are page-aligned.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


class Staging:
    """One reusable buffer that grows to the largest request.  Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)

    def rows(self, count: int, row_nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [count, row_nbytes]; valid until the next call."""
        needed = count * row_nbytes
        if len(self._buffer) < needed:
            rounded = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            self._buffer = np.frombuffer(mmap.mmap(-1, rounded), np.uint8)
        return self._buffer[:needed].reshape(count, row_nbytes)
