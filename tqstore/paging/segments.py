"""Rows of page records in MLX memory, in segments so that growing copies a bounded amount.

Owns the memory.  What lies in which row, and which rows are free, is the arena's.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.paging.page_records import page_words
from tqstore.spec import PageSpec

SEGMENT_NBYTES = 16 << 20
MIN_SEGMENT_PAGES = 8
MAX_SEGMENT_PAGES = 256

Rows = npt.NDArray[np.int64]


def pages_of(spec: PageSpec) -> int:
    """Pages a segment: a power of two, about 16 MiB."""
    fitting = power_of_two(SEGMENT_NBYTES // spec.page_nbytes)
    return min(MAX_SEGMENT_PAGES, max(MIN_SEGMENT_PAGES, fitting))


def power_of_two(limit: int) -> int:
    """The largest one up to `limit`, at least 1: what has so many pages lies within a segment."""
    return 1 << (max(1, limit).bit_length() - 1)


class Segments:
    """Arrays uint32 [pages, page_words]: all full-size but the last, which doubles until it is."""

    def __init__(self, spec: PageSpec) -> None:
        self.pages = pages_of(spec)
        self.arrays: list[mx.array] = []
        self._words = page_words(spec)

    def __len__(self) -> int:
        """Rows there are."""
        return sum(array.shape[0] for array in self.arrays)

    def grow(self, missing: int, spare: int) -> int:
        """Adds some of `missing` rows, and up to `spare` more; how many in all."""
        in_last = len(self) % self.pages
        if in_last:
            # Doubling, so that growing page by page copies each page a bounded number of times.
            added = min(self.pages - in_last, max(missing, min(in_last, missing + spare)))
            room = mx.zeros((added, self._words), dtype=mx.uint32)
            self.arrays[-1] = mx.concatenate([self.arrays[-1], room])
        else:
            added = min(self.pages, max(missing, min(MIN_SEGMENT_PAGES, missing + spare)))
            self.arrays.append(mx.zeros((added, self._words), dtype=mx.uint32))
        return added

    def truncate(self, num_rows: int) -> None:
        """Gives back the memory of the rows from `num_rows` on."""
        num_full, rest = divmod(num_rows, self.pages)
        del self.arrays[num_full + bool(rest) :]
        if rest and self.arrays[-1].shape[0] > rest:
            self.arrays[-1] = self.arrays[-1][:rest] + 0  # a slice would keep the whole in memory
            mx.eval(self.arrays[-1])

    def write(self, rows: Rows, records: mx.array) -> None:
        """records uint32 [len(rows), page_words] into their rows, in place.

        Evaluated at once: a pending write would keep the records alive beside their copy.
        """
        for first, last in contiguous_runs(rows, self.pages):
            index, row = divmod(int(rows[first]), self.pages)
            count = last - first
            if row == 0 and count == self.arrays[index].shape[0]:
                self.arrays[index] = records[first:last]
            else:
                self.arrays[index][row : row + count] = records[first:last]
            mx.eval(self.arrays[index])

    def views(self, rows: Rows) -> list[mx.array]:
        """Records of `rows` in order, uint32 [n, page_words], one view for adjacent rows."""
        found = []
        for first, last in contiguous_runs(rows, self.pages):
            index, row = divmod(int(rows[first]), self.pages)
            found.append(self.arrays[index][row : row + last - first])
        return found


def contiguous_runs(rows: Rows, segment_pages: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of `rows` that ascend by one within one segment."""
    if len(rows) == 0:
        return []
    breaks = (np.diff(rows) != 1) | (rows[1:] % segment_pages == 0)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
    return list(pairwise(edges))
