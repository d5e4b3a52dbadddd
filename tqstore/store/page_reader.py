"""Reading pages: scattered straight into the caller's rows, every byte checked.

Owns the open descriptors of packs and their number.  Reads with preadv rather than through a map:
cold single pages come in one disk access, and every copy is checked as it is handed out.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from tqstore.errors import Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.framing import FRAME_NBYTES, crc32c
from tqstore.format.page import Records, find_unbound
from tqstore.store.files import IOV_MAX, Files, failure
from tqstore.store.fork_lock import ForkLock
from tqstore.store.names import pack_name
from tqstore.store.pack_entry import PackEntry
from tqstore.store.pack_index import PackIndex, display_path
from tqstore.store.records import Location
from tqstore.store.transfer import read_all

MAX_OPEN_PACKS = 64  # of the 256 descriptors that macOS gives a process
_RUN_NBYTES = 4 << 20  # what one system call reads


class OpenPacks:
    """Descriptors of recently read packs of one spec.  An unlinked pack stays readable in it."""

    def __init__(self, index: PackIndex, files: Files) -> None:
        self._index = index
        self._files = files
        self._idle: OrderedDict[int, int] = OrderedDict()  # pack number -> descriptor
        self._lock = ForkLock()

    @contextlib.contextmanager
    def opened(self, entry: PackEntry) -> Iterator[int]:
        """A descriptor nobody else uses meanwhile.  NotFound if the pack is gone."""
        with self._lock:
            fd = self._idle.pop(entry.number, None)
        if fd is None:
            fd = self._open(entry)
        try:
            yield fd
        finally:
            self._put_back(entry.number, fd)

    def _open(self, entry: PackEntry) -> int:
        folder = self._index.folder()
        name = pack_name(entry.number)
        try:
            fd = self._files.open_file(folder.fd, name)
        except OSError as error:
            raise failure(error, "opening a pack", display_path(folder.path_of(name))) from error
        if folder.read_range(name, fd, 0, FRAME_NBYTES) != entry.head:
            self._files.close(fd)
            raise Corrupt(display_path(folder.path_of(name)), "is not the pack that was indexed")
        return fd

    def _put_back(self, number: int, fd: int) -> None:
        with self._lock:
            surplus = [fd] if number in self._idle else []
            if not surplus:
                self._idle[number] = fd
                if len(self._idle) > MAX_OPEN_PACKS:
                    surplus.append(self._idle.popitem(last=False)[1])
        for unused in surplus:
            self._files.close(unused)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for fd in idle.values():
            self._files.close(fd)


class _Unreadable(Corrupt):
    """Bytes of an encrypted pack that cannot be decrypted: some page of a run is damaged."""


class PageReader:
    """Reads pages of one page spec.  Thread-safe."""

    def __init__(self, index: PackIndex, files: Files) -> None:
        self._index = index
        self._files = files
        self._packs = OpenPacks(index, files)
        # Two buffers a page: the page and what follows it.
        self._max_run = max(1, min(IOV_MAX // 2, _RUN_NBYTES // index.layout.stride))

    def close(self) -> None:
        self._packs.close()

    def read(self, locations: Sequence[Location], out: memoryview | Records) -> None:
        """Fills row i of `out`, uint8 [n, page_nbytes], with the page at `locations[i]`.

        Raises NotFound if a pack is gone, Corrupt for a damaged page, which look-ups then no
        longer return.  Rows are undefined after an error.
        """
        rows = self._as_rows(out, len(locations))
        for first, last in adjacent_runs(locations, self._max_run):
            self._read_run(locations, rows, first, last)
        keys = [(location.layer, location.block_hash) for location in locations]
        unbound = find_unbound(rows, self._index.spec, keys)
        if unbound is not None:
            raise self._damaged(locations[unbound], "the page's header names another page")

    def _read_run(
        self, locations: Sequence[Location], rows: Records, first: int, last: int
    ) -> None:
        try:
            trailers = self._fetch(locations, rows, first, last)
        except _Unreadable as error:
            if last - first == 1:
                raise self._damaged(locations[first], error.what) from error
            for i in range(first, last):  # which of them it is
                self._read_run(locations, rows, i, i + 1)
            return
        self._check(locations, rows, trailers, first)

    def _as_rows(self, out: memoryview | Records, count: int) -> Records:
        rows = np.asarray(out)
        shape = (count, self._index.spec.page_nbytes)
        if rows.dtype == np.uint8 and rows.ndim == 1 and rows.size == shape[0] * shape[1]:
            rows = rows.reshape(shape)
        if rows.dtype != np.uint8 or rows.shape != shape or not rows.flags.c_contiguous:
            raise InvalidInput(
                f"out must be C-contiguous uint8 {list(shape)}, not {rows.dtype} {list(rows.shape)}"
            )
        if not rows.flags.writeable:
            raise InvalidInput("out must be writeable")
        return rows

    def _fetch(
        self, locations: Sequence[Location], rows: Records, first: int, last: int
    ) -> Records:
        """Reads pages first .. last - 1, which lie in adjacent slots of one pack, in one call.

        Returns what follows each page in its slot, [pages, stride - page_nbytes].
        """
        layout = self._index.layout
        where = locations[first]
        entry = self._index.entry(where.pack)
        if entry is None:
            raise NotFound(f"pack {where.pack} is no longer in the store", doing="reading pages")
        if not 0 <= where.slot <= entry.num_pages - (last - first):
            raise InvalidInput(f"pack {where.pack} has no slot {where.slot + last - first - 1}")
        gap = layout.stride - layout.page_nbytes  # the page's crc32c, then padding
        trailers = np.empty((last - first, gap), np.uint8)
        pages = rows[first:last].reshape(-1).data
        ends = trailers.reshape(-1).data
        buffers: list[memoryview] = []
        for i in range(last - first):
            buffers.append(pages[i * layout.page_nbytes : (i + 1) * layout.page_nbytes])
            buffers.append(ends[i * gap : (i + 1) * gap])
        offset = entry.first_slot + where.slot * layout.stride
        try:
            with self._packs.opened(entry) as fd:
                count = self._read_all(fd, buffers, offset)
        except NotFound:
            self._index.forget([where.pack])
            raise
        except OSError as error:
            if isinstance(error, TqStoreError):
                raise
            raise failure(error, "reading pages", self._path(where)) from error
        if count < (last - first) * layout.stride:
            raise self._damaged(where, "the pack ends inside its pages")
        return trailers

    def _read_all(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        try:
            return read_all(self._files, fd, buffers, offset)
        except Corrupt as error:
            raise _Unreadable(error.file, error.what) from error

    def _check(
        self, locations: Sequence[Location], rows: Records, trailers: Records, first: int
    ) -> None:
        """Compares the checksum of each page from row `first` on with the one read behind it."""
        stored = trailers[:, :4].copy().view("<u4")[:, 0].tolist()
        found = list(map(crc32c, rows[first : first + len(stored)]))
        if found != stored:
            bad = next(i for i, crc in enumerate(stored) if found[i] != crc)
            raise self._damaged(locations[first + bad], "bad checksum")

    def _damaged(self, location: Location, what: str) -> Corrupt:
        self._index.quarantine(location.pack, location.slot)
        return Corrupt(
            self._path(location),
            what,
            page=location.slot,
            doing=f"reading layer {location.layer} of block {location.block_hash.hex()}",
            remedy="A shorter prefix is still good; `tqstore verify --repair` sets the page aside",
        )

    def _path(self, location: Location) -> str:
        return display_path(self._index.folder().path_of(pack_name(location.pack)))


def adjacent_runs(locations: Sequence[Location], max_run: int) -> Iterator[tuple[int, int]]:
    """(first, last) index ranges of at most `max_run` pages in adjacent slots of one pack."""
    first = 0
    for i in range(1, len(locations) + 1):
        if (
            i == len(locations)
            or i - first == max_run
            or locations[i].pack != locations[first].pack
            or locations[i].slot - locations[first].slot != i - first
        ):
            yield first, i
            first = i
