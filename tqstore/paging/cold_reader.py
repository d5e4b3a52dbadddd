"""Reading cold pages: located, checked, and read ahead while the caller computes.

A worker thread fills one host buffer while the pages of the other are used; MLX arrays are made on
the caller's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import NotFound
from tqstore.paging.staging import Staging
from tqstore.spec import PageSpec

if TYPE_CHECKING:
    from tqstore.store.page_store import NamespaceStore
    from tqstore.store.records import Location

Rows = npt.NDArray[np.uint8]


class ColdReader:
    """Reads pages of one namespace; `pages` None has none.  Used by one thread at a time."""

    def __init__(self, pages: NamespaceStore | None) -> None:
        self._pages = pages
        self._idle: list[Staging] = []  # buffers that no stream uses

    def stream(
        self, spec: PageSpec, layer: int, batches: Sequence[Sequence[bytes]]
    ) -> Iterator[mx.array]:
        """For each batch of block hashes its records, uint32 [n, page_words].

        The next batch is read while the caller works on this one.  Raises NotFound if a page is
        not in the store any more, Corrupt if it is damaged.
        """
        if len(batches) == 1:
            yield self.read(spec, layer, batches[0])
        if len(batches) < 2:
            return
        with (
            self._buffers(2) as buffers,
            ThreadPoolExecutor(1, thread_name_prefix="tqstore-read") as worker,
        ):

            def start(index: int) -> Future[Rows]:
                buffer = buffers[index % 2]
                return worker.submit(self._read, spec, layer, batches[index], buffer)

            ahead = start(0)
            for index in range(len(batches)):
                rows = ahead.result()
                if index + 1 < len(batches):
                    ahead = start(index + 1)
                yield _to_mlx(rows)

    def has(self, spec: PageSpec, layer: int, hashes: Sequence[bytes]) -> bool:
        """Whether all these pages are in the store as far as its index knows."""
        if self._pages is None:
            return False
        index = self._pages.index(spec)
        return all(index.find(layer, name) is not None for name in hashes)

    def read(self, spec: PageSpec, layer: int, hashes: Sequence[bytes]) -> mx.array:
        """Records of pages, uint32 [n, page_words], by this thread.  Raises as `stream` does."""
        with self._buffers(1) as [buffer]:
            return _to_mlx(self._read(spec, layer, hashes, buffer))

    @contextmanager
    def _buffers(self, count: int) -> Iterator[list[Staging]]:
        """Buffers of one's own: a stream that was left unfinished may still be reading into its."""
        taken = [self._idle.pop() if self._idle else Staging() for _ in range(count)]
        try:
            yield taken
        finally:
            self._idle += taken

    def _read(self, spec: PageSpec, layer: int, hashes: Sequence[bytes], buffer: Staging) -> Rows:
        locations = self._located(spec, layer, hashes)
        rows = buffer.rows(len(locations), spec.page_nbytes)
        assert self._pages is not None
        self._pages.read_pages(spec, locations, rows)
        return rows

    def _located(self, spec: PageSpec, layer: int, hashes: Sequence[bytes]) -> list[Location]:
        """Where pages are.  Dictionary look-ups first: only a miss looks at the disk again."""
        if self._pages is None:
            raise NotFound(f"layer {layer}: {len(hashes)} pages are neither hot nor in a store")
        index = self._pages.index(spec)
        located = []
        for name in hashes:
            location = index.find(layer, name) or self._pages.locate(spec, layer, name)
            if location is None:
                raise NotFound(
                    f"the page of layer {layer}, block {name.hex()} is no longer in the store",
                    doing="restoring",
                    remedy="Resume the sequence again: a shorter prefix may still be there",
                )
            located.append(location)
        return located


def _to_mlx(rows: Rows) -> mx.array:
    """One contiguous copy: strided ones run at a quarter of the speed."""
    return mx.array(rows.view(np.uint32))
