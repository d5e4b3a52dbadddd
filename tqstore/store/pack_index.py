"""Which page is where: the packs of one page spec's folder, by their headers.

Owns the listing of the folder and the dictionaries made from it; there is no index file that
could be wrong.  Pages themselves are `page_reader`'s.  Thread-safe; entries are only added, and
dropped when their pack is found gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePath

from tqstore.errors import Corrupt, NotFound, TqStoreError
from tqstore.format.block_hash import HASH_NBYTES, BlockRecord
from tqstore.format.framing import FRAME_NBYTES
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes
from tqstore.spec import PageSpec
from tqstore.store.folder import Folder
from tqstore.store.fork_lock import ForkLock
from tqstore.store.names import pack_name, pack_number
from tqstore.store.pack_entry import Node, PackEntry, without_packs
from tqstore.store.records import Location
from tqstore.store.root import NAMESPACES

_HEADER_READ_NBYTES = 1 << 12
# A folder's time stamp moves in steps of the kernel's clock, at most 10 ms (1/HZ).  A listing made
# sooner than this after the last change may have missed one that got the same stamp.
SETTLE_NS = 50_000_000
_MAX_LISTINGS = 8  # of a folder that keeps changing
_TOUCH_NS = 1_000_000_000


class PackIndex:
    """The packs of one page spec.  `open_folder` opens their folder, or raises NotFound."""

    def __init__(self, spec: PageSpec, open_folder: Callable[[], Folder]) -> None:
        self.spec = spec
        self.layout = PackLayout.of(spec)
        self.faults: dict[str, TqStoreError] = {}  # packs that could not be indexed, by file name
        self._open_folder = open_folder
        self._folder: Folder | None = None
        self._retired: list[Folder] = []  # removed under us; closed only when no read can use them
        self._shown_as = ""
        self._stamp = -1  # the folder's mtime before it was last listed
        self._is_settled = False
        self._has_vanished = False  # a pack that was listed was gone when it was opened
        self._packs: dict[int, PackEntry] = {}
        self._blocks: dict[bytes, Node] = {}
        self._durable: set[int] = set()
        self.num_losses = 0  # grows whenever a page that was there no longer is
        self._quarantine: set[tuple[int, int]] = set()
        self._touched: dict[int, int] = {}  # pack -> when this process last noted its use
        self._lock = ForkLock()
        self._folder_lock = ForkLock()
        self._last_header: tuple[PackEntry, PackHeader] | None = None

    def close(self) -> None:
        with self._lock:
            self._drop_folder()
            for folder in self._retired:
                folder.close()
            self._retired.clear()

    def folder(self) -> Folder:
        """The folder of the packs; NotFound while there is none."""
        with self._folder_lock:
            if self._folder is None:
                self._folder = self._open_folder()
                self._shown_as = display_path(self._folder.path)
            return self._folder

    @property
    def has_folder(self) -> bool:
        """True if the folder is open and was not removed under us."""
        return self._folder is not None and self._folder.status().st_nlink > 0

    def _drop_folder(self) -> None:
        if self._folder is not None:
            self._retired.append(self._folder)
            self._folder = None
        self._stamp = -1

    @property
    def numbers(self) -> set[int]:
        return set(self._packs)

    @property
    def num_pages(self) -> int:
        return sum(entry.num_pages for entry in list(self._packs.values()))

    def entry(self, number: int) -> PackEntry | None:
        return self._packs.get(number)

    def find(self, layer: int, block_hash: bytes) -> Location | None:
        """A dictionary look-up; does not look at the disk."""
        node = self._blocks.get(block_hash)
        while node is not None:
            entry, block, node = node
            slot = entry.slot(block, layer)
            if slot is not None and (entry.number, slot) not in self._quarantine:
                return Location(entry.number, slot, layer, block_hash)
        return None

    def layers_of(self, block_hash: bytes) -> int:
        """Bit mask of the layers whose page of the block is there."""
        node = self._blocks.get(block_hash)
        mask = 0
        while node is not None:
            entry, block, node = node
            mask |= entry.layers_of(block)
        if mask and self._quarantine:
            return self._without_quarantined(mask, block_hash)
        return mask

    def _without_quarantined(self, mask: int, block_hash: bytes) -> int:
        layers = (layer for layer in range(mask.bit_length()) if mask >> layer & 1)
        return sum(1 << layer for layer in layers if self.find(layer, block_hash) is not None)

    def packs_of(self, block_hash: bytes) -> set[int]:
        """Numbers of the packs that have pages of the block."""
        numbers = set()
        node = self._blocks.get(block_hash)
        while node is not None:
            entry, _, node = node
            numbers.add(entry.number)
        return numbers

    def block(self, block_hash: bytes, namespace_id: bytes) -> BlockRecord | None:
        """The block's parent and tokens, read again from the header of a pack that has it."""
        node = self._blocks.get(block_hash)
        while node is not None:
            entry, index, node = node
            header = self._header(entry)
            if header is not None:
                return header.block(index, namespace_id)
        return None

    def header(self, number: int) -> PackHeader | None:
        """A pack's header, read again; None if the pack is not there.  Raises Corrupt."""
        entry = self._packs.get(number)
        return None if entry is None else self._header(entry)

    def copies(self, layer: int, block_hash: bytes) -> list[Location]:
        """Every place of the page that is not known to be damaged."""
        found = []
        node = self._blocks.get(block_hash)
        while node is not None:
            entry, block, node = node
            slot = entry.slot(block, layer)
            if slot is not None and (entry.number, slot) not in self._quarantine:
                found.append(Location(entry.number, slot, layer, block_hash))
        return found

    def touch(self, numbers: Iterable[int]) -> None:
        """Notes that packs are used: gc spares those used just now, and the budget the latest.

        At most once a second for each; what cannot be noted is no error.
        """
        now = time.time_ns()
        for number in numbers:
            if now - self._touched.get(number, 0) > _TOUCH_NS:
                self._touched[number] = now
                with contextlib.suppress(OSError, TqStoreError):
                    folder = self.folder()
                    folder.files.touch(folder.fd, pack_name(number), now)

    def _header(self, entry: PackEntry) -> PackHeader | None:
        """The pack's header, read again; None if it is no longer there.

        The last one is kept: blocks of a chain are asked for in order, and lie so in packs.
        """
        last = self._last_header
        if last is not None and last[0] is entry:
            return last[1]
        try:
            header, encoded = self._read_header(pack_name(entry.number))
        except NotFound:
            self.forget([entry.number])
            return None
        if encoded[:FRAME_NBYTES] != entry.head:
            return None
        self._last_header = (entry, header)
        return header

    def refresh(self, *, is_forced: bool = False) -> bool:
        """Looks for packs that came or went since the last listing; True if there were any.

        One stat where the folder has not changed.  Packs that cannot be read are noted in
        `faults` and left out: a shorter match, never an error.
        """
        with self._lock:
            try:
                return self._refresh(is_forced)
            except NotFound:
                self._drop_folder()
                return self._forget(self.numbers)

    def _refresh(self, is_forced: bool) -> bool:
        status = self.folder().status()
        if status.st_nlink == 0:
            self._drop_folder()
            status = self.folder().status()
        if status.st_mtime_ns == self._stamp and self._is_settled and not is_forced:
            return False
        has_changed = False
        for _ in range(_MAX_LISTINGS):
            has_changed |= self._list(status)
            # gc links copies of pages before it unlinks the pack they were in: a listing made while
            # the folder changed may show neither.
            status = self.folder().status()
            if status.st_mtime_ns == self._stamp and not self._has_vanished:
                break
        return has_changed

    def _list(self, status: os.stat_result) -> bool:
        """Lists once; `status` is the folder's before.  True if packs came or went."""
        listed_ns = time.time_ns()
        names = self.folder().names()
        self._stamp = status.st_mtime_ns
        self._is_settled = listed_ns - status.st_mtime_ns > SETTLE_NS
        self._has_vanished = False
        found = {number: name for name in names if (number := pack_number(name)) is not None}
        has_changed = self._forget(number for number in self.numbers if number not in found)
        for number in sorted(found.keys() - self._packs.keys()):
            has_changed |= self._index(number, found[number])
        return has_changed

    def _index(self, number: int, name: str) -> bool:
        if name in self.faults:
            return False
        try:
            header, encoded = self._read_header(name)
        except NotFound:
            self._has_vanished = True
            return False
        except TqStoreError as error:
            self.faults[name] = error
            return False
        self._add(number, header, encoded)
        return True

    def _read_header(self, name: str) -> tuple[PackHeader, bytes]:
        """The header and its frame; Corrupt also if the file is not as long as it must be."""
        folder = self.folder()
        path = f"{self._shown_as}/{name}"

        def whole_of(raw: bytes) -> int:
            # What the length field says is checked by `decode`, or before it makes us read more.
            nbytes = FRAME_NBYTES + int.from_bytes(raw[8:16], "little")
            return nbytes if nbytes <= len(raw) else pack_header_nbytes(raw, self.spec, path)

        raw, file_nbytes = folder.read_head(name, _HEADER_READ_NBYTES, whole_of)
        header = PackHeader.decode(raw, self.spec, path, self.layout)
        nbytes = FRAME_NBYTES + int.from_bytes(raw[8:16], "little")
        expected = self.layout.file_nbytes(nbytes, header.num_pages)
        if file_nbytes != expected:
            raise Corrupt(path, f"has {file_nbytes} bytes, its header says {expected}")
        return header, raw[:nbytes]

    def add(self, number: int, header: PackHeader, encoded: bytes) -> None:
        """A pack this process has just written and synced."""
        with self._lock:
            self._add(number, header, encoded)
            self._durable.add(number)

    def _add(self, number: int, header: PackHeader, encoded: bytes) -> None:
        if number in self._packs:
            return
        entry = PackEntry(number, header, encoded, self.layout)
        hashes = header.hashes
        for index in range(header.num_blocks):
            block_hash = hashes[index * HASH_NBYTES : (index + 1) * HASH_NBYTES]
            self._blocks[block_hash] = (entry, index, self._blocks.get(block_hash))
        self._packs[number] = entry

    def forget(self, numbers: Iterable[int], blocks: Collection[bytes] | None = None) -> None:
        """Drops packs that were found gone; `blocks`, if known, are all that they had pages of."""
        with self._lock:
            self._forget(numbers, blocks)

    def _forget(self, numbers: Iterable[int], blocks: Collection[bytes] | None = None) -> bool:
        gone = {number for number in numbers if self._packs.pop(number, None) is not None}
        if not gone:
            return False
        self._durable -= gone
        for number in gone:
            self._touched.pop(number, None)
        self.num_losses += 1
        for block_hash in list(self._blocks) if blocks is None else blocks:
            first = self._blocks.get(block_hash)
            kept = without_packs(first, gone)
            if kept is None:
                self._blocks.pop(block_hash, None)
            elif kept is not first:
                self._blocks[block_hash] = kept
        return True

    def quarantine(self, number: int, slot: int) -> None:
        """The page was found damaged: no look-up of this process returns it again."""
        self._quarantine.add((number, slot))
        self.num_losses += 1

    def is_quarantined(self, layer: int, block_hash: bytes) -> bool:
        """Whether some copy of the page was found damaged by this process."""
        node = self._blocks.get(block_hash)
        while node is not None:
            entry, block, node = node
            if (entry.number, entry.slot(block, layer)) in self._quarantine:
                return True
        return False

    def make_durable(self, numbers: set[int]) -> None:
        """Syncs the folder if one of these packs may not have its name on disk yet.

        A pack is visible to others from its link on, but its writer syncs the folder only after
        that; a checkpoint that names the pack must not be acknowledged before.
        """
        if not numbers <= self._durable:
            known = self.numbers
            self.folder().sync()
            self._durable |= known


def display_path(path: str) -> str:
    """How messages name something of a namespace: from `ns` on."""
    parts = PurePath(path).parts
    start = len(parts) - 1 - parts[::-1].index(NAMESPACES) if NAMESPACES in parts else 0
    return os.path.join(*parts[start:])
