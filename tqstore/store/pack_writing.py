"""Packs as new files: which pages go into them, how large they get, under which number.

The order of a commit's steps is `commit`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tqstore.errors import BackendFailed, Corrupt
from tqstore.format.block_hash import BlockRecord
from tqstore.format.pack import PackHeader, PackLayout, pack_buffers
from tqstore.format.page import PageKey, Records
from tqstore.format.zarr_metadata import MAX_PACKS
from tqstore.spec import PageSpec
from tqstore.store.folder import Folder
from tqstore.store.names import pack_name, pack_number
from tqstore.store.pack_index import PackIndex


@dataclass(frozen=True)
class WrittenPack:
    """A pack whose bytes are durable; its name is so only once the folder is synced."""

    number: int
    header: PackHeader
    encoded: bytes
    nbytes: int


def not_stored(index: PackIndex, keys: Sequence[PageKey]) -> dict[PageKey, int]:
    """Pages that no pack has, each once, with their row."""
    new: dict[PageKey, int] = {}
    for i, (layer, name) in enumerate(keys):
        if index.find(layer, name) is None:
            new.setdefault((layer, name), i)
    return new


def packs_nbytes(spec: PageSpec, blocks: Sequence[BlockRecord], new: Mapping[PageKey, int]) -> int:
    """Bytes of the packs that these pages fill."""
    layout = PackLayout.of(spec)
    headers = ((PackHeader.of(spec, blocks, keys), keys) for keys in _batches(new, layout))
    return sum(layout.file_nbytes(len(header.encode()), len(keys)) for header, keys in headers)


def write_packs(
    folder: Folder,
    index: PackIndex,
    blocks: Sequence[BlockRecord],
    new: Mapping[PageKey, int],
    records: Records,
) -> list[WrittenPack]:
    """Writes page `key` from row `new[key]` of `records`; the folder is the caller's to sync."""
    layout = PackLayout.of(index.spec)
    written: list[WrittenPack] = []
    for keys in _batches(new, layout):
        header = PackHeader.of(index.spec, blocks, keys)
        encoded = header.encode()
        buffers = pack_buffers(layout, encoded, [records[new[key]] for key in keys])
        taken = [*index.numbers, *(pack.number for pack in written)]
        number = _write_pack(folder, max(taken, default=-1), buffers)
        written.append(WrittenPack(number, header, encoded, sum(map(len, buffers))))
    return written


def ensure_file(folder: Folder, name: str, content: bytes, max_nbytes: int) -> None:
    """The file with exactly this content, durable; Corrupt if another content is there."""
    if folder.create_if_absent(name, [content]):
        return
    if folder.read(name, max_nbytes) != content:
        raise Corrupt(
            folder.path_of(name),
            "is not what this release writes for these settings",
            remedy="Run `tqstore verify`; `tqstore verify --repair` sets a damaged file aside",
        )


def _write_pack(folder: Folder, largest: int, buffers: Sequence[bytes | memoryview]) -> int:
    """Numbers are microseconds since 1970, so that one freed by gc is never used again."""
    first = max(time.time_ns() // 1000, largest + 1)
    name = folder.create((pack_name(number) for number in range(first, MAX_PACKS)), buffers)
    number = pack_number(name) if name else None
    if number is None:
        raise BackendFailed("no pack number is free", doing="adding pages")
    return number


def _batches(new: Mapping[PageKey, int], layout: PackLayout) -> Iterator[Sequence[PageKey]]:
    keys = list(new)
    size = layout.max_pages
    return (keys[at : at + size] for at in range(0, len(keys), size))
