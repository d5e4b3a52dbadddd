"""A pack file read for inspection: what it says, and whether its bytes are what was written.

Finds the page spec in the zarr.json beside the pack, so that a pack may be looked into wherever
its folder lies.  Reads a damaged pack as far as its header can be trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tqstore.errors import Corrupt, InvalidInput, NotFound
from tqstore.format.framing import crc32c
from tqstore.format.pack import CRC_NBYTES, PackHeader, PackLayout, pack_header_nbytes, shard_index
from tqstore.format.page import Records, find_unbound
from tqstore.spec import PageSpec
from tqstore.store.files import Files, failure
from tqstore.store.folder import Folder
from tqstore.store.names import pack_number
from tqstore.store.root import ZARR_FILE, default_path, open_below

_MAX_ZARR_NBYTES = 1 << 20
_DOING = "inspecting a pack"


@dataclass(frozen=True)
class PackContents:
    """The whole file in memory, at most about 16 MiB."""

    path: Path
    spec: PageSpec
    header: PackHeader
    header_nbytes: int
    raw: bytes

    @property
    def layout(self) -> PackLayout:
        return PackLayout.of(self.spec)

    @property
    def first_slot(self) -> int:
        return self.layout.first_slot(self.header_nbytes)

    @property
    def expected_nbytes(self) -> int:
        return self.layout.file_nbytes(self.header_nbytes, self.header.num_pages)

    @property
    def padding_nbytes(self) -> int:
        """Bytes that only align what follows them."""
        per_page = self.layout.stride - self.spec.page_nbytes - CRC_NBYTES
        return self.first_slot - self.header_nbytes + per_page * self.header.num_pages

    def record(self, slot: int) -> Records:
        """Page bytes uint8 [page_nbytes]; Corrupt if the file ends before them."""
        start = self.first_slot + slot * self.layout.stride
        page = self.raw[start : start + self.spec.page_nbytes]
        if len(page) < self.spec.page_nbytes:
            raise Corrupt(str(self.path), "cut off", page=slot, doing=_DOING)
        return np.frombuffer(page, np.uint8)

    def slot_fault(self, slot: int) -> str | None:
        """What is wrong with the bytes of a slot, None if nothing is."""
        start = self.first_slot + slot * self.layout.stride
        stored = self.raw[start : start + self.layout.stride]
        if len(stored) < self.layout.stride:
            return "cut off"
        end = self.spec.page_nbytes
        page = np.frombuffer(stored, np.uint8, end)
        if crc32c(page).to_bytes(CRC_NBYTES, "little") != stored[end : end + CRC_NBYTES]:
            return "bad checksum"
        if find_unbound(page[None], self.spec, [self.header.page_keys[slot]]) is not None:
            return "its header names another page"
        return "padding is not zero" if any(stored[end + CRC_NBYTES :]) else None

    @cached_property
    def slot_faults(self) -> dict[int, str]:
        """The faulty slots and what is wrong with each."""
        found = ((slot, self.slot_fault(slot)) for slot in range(self.header.num_pages))
        return {slot: fault for slot, fault in found if fault is not None}

    def file_faults(self) -> Iterator[str]:
        """What is wrong with the file around its pages."""
        if len(self.raw) != self.expected_nbytes:
            yield f"has {len(self.raw)} bytes, its header says {self.expected_nbytes}"
        elif self.raw[-self.layout.index_nbytes :] != self._expected_index():
            yield "zarr's index is not what the pages' places say"
        if any(self.raw[self.header_nbytes : self.first_slot]):
            yield "the padding after the header is not zero"

    def _expected_index(self) -> bytes:
        return shard_index(self.layout, self.first_slot, self.header.num_pages)


def find_pack(target: str, store: str | None) -> Path:
    """The pack at `target`: below the store's folder, or a path of its own.

    Raises NotFound if it is in neither place, InvalidInput if it is no pack's name.
    """
    home = (Path(store) if store else default_path()).expanduser()
    for path in (home / target, Path(target).expanduser()):
        try:
            is_file = path.is_file()
        except OSError as error:
            raise failure(error, _DOING, str(path)) from error
        if not is_file:
            continue
        if pack_number(path.name) is None:
            raise InvalidInput(
                f"{path} is no pack",
                doing=_DOING,
                remedy="Packs are named c.<number>.0; `tqstore ls --packs` lists them",
            )
        return path.absolute()
    raise NotFound(
        f"there is no pack {target!r}, neither in {home} nor in the current folder",
        doing=_DOING,
        remedy="`tqstore ls --packs` lists packs; a session's name never holds a '/'",
    )


def read_pack(path: Path) -> PackContents:
    """Raises Corrupt if the header cannot be trusted, Incompatible for a newer format."""
    with _opened(path.parent) as folder:
        spec = _spec_beside(folder)
        layout = PackLayout.of(spec)
        limit = layout.file_nbytes(layout.max_header_nbytes + 64, layout.max_pages)
        raw = folder.read(path.name, limit)
    header = PackHeader.decode(raw, spec, str(path))
    return PackContents(path, spec, header, pack_header_nbytes(raw, spec, str(path)), raw)


def _opened(path: Path) -> Folder:
    """A pack's folder, decrypting if it is that of an encrypted store."""
    sealed = open_below(path)
    if sealed is not None:
        return sealed
    files = Files()
    try:
        return Folder(files, files.open_root(str(path)), str(path))
    except OSError as error:
        raise failure(error, _DOING, str(path)) from error


def _spec_beside(folder: Folder) -> PageSpec:
    """The page spec that zarr.json tells in its attributes."""
    path = os.path.join(folder.path, ZARR_FILE)
    try:
        stored = json.loads(folder.read(ZARR_FILE, _MAX_ZARR_NBYTES))
        told = stored["attributes"]["tqstore"]["page_spec"]
        if not isinstance(told, dict):
            raise TypeError("page_spec is not an object")
        return PageSpec.from_fields(told)
    except NotFound as error:
        raise NotFound(
            f"{path} is missing, which says what the pack's pages are",
            doing=_DOING,
            remedy="Inspect the pack in the folder it was written to",
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(path, f"does not tell a page spec: {error}", doing=_DOING) from error
