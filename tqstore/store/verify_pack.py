"""One pack checked to the last byte, and what a finding is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tqstore.errors import Corrupt
from tqstore.format.block_hash import block_hash
from tqstore.format.framing import crc32c
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes, shard_index
from tqstore.format.page import find_unbound
from tqstore.spec import PageSpec
from tqstore.store.folder import Folder

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """`kind` is one word to group by, `path` relative to the store, `what` a sentence.

    An error is damage or loss; a warning is harmless but not as it should be.
    """

    kind: str
    path: str
    what: str
    severity: Severity = "error"


# What is in the store by namespace id: (layer, block hash) of every sound page.
Pages = set[tuple[int, bytes]]


def verify_pack(
    folder: Folder, name: str, spec: PageSpec, namespace: Namespace, pages: Pages
) -> Iterator[Finding]:
    """Every finding of one pack; its sound pages are added to `pages`.

    Raises Corrupt where nothing more can be said, NotFound.
    """
    path, layout = folder.path_of(name), PackLayout.of(spec)
    limit = layout.file_nbytes(layout.max_header_nbytes + 64, layout.max_pages)
    raw = folder.read(name, limit)
    header = PackHeader.decode(raw, spec, path)
    header_nbytes = pack_header_nbytes(raw, spec, path)
    first_slot = layout.first_slot(header_nbytes)
    if len(raw) != layout.file_nbytes(header_nbytes, header.num_pages):
        raise Corrupt(path, f"has {len(raw)} bytes, which its header doesn't say")
    if any(raw[header_nbytes:first_slot]):
        yield Finding("pack", path, "the padding after the header is not zero")
    if raw[-layout.index_nbytes :] != shard_index(layout, first_slot, header.num_pages):
        yield Finding("index", path, "zarr's index is not what the pages' places say")
    yield from _blocks(header, namespace, path)
    for slot, (layer, block) in enumerate(header.page_keys):
        start = first_slot + slot * layout.stride
        record = raw[start : start + layout.stride]
        what = page_fault(record, spec, layout, (layer, block))
        if what is None and not (layer < len(namespace.layers) and namespace.layers[layer] == spec):
            what = f"the namespace's layer {layer} has another page spec"
        if what is None:
            pages.add((layer, block))
        else:
            yield Finding("page", path, f"page {slot}, layer {layer}, block {block.hex()}: {what}")


def page_fault(
    record: bytes, spec: PageSpec, layout: PackLayout, key: tuple[int, bytes]
) -> str | None:
    """What is wrong with a page, given with its checksum and padding; None if it is sound."""
    page = np.frombuffer(record, np.uint8, layout.page_nbytes)
    if crc32c(page).to_bytes(4, "little") != record[layout.page_nbytes : layout.page_nbytes + 4]:
        return "bad checksum"
    if any(record[layout.page_nbytes + 4 :]):
        return "the padding after it is not zero"
    if find_unbound(page[None], spec, [key]) is not None:
        return "its header names another page"
    return None


def _blocks(header: PackHeader, namespace: Namespace, path: str) -> Iterator[Finding]:
    for i in range(header.num_blocks):
        block = header.block(i, namespace.id)
        if block_hash(block.parent, block.token_bytes) != block.hash:
            yield Finding("block", path, f"block {block.hash.hex()} is not the hash of its tokens")
