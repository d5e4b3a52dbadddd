"""The pack: a header of ours, page slots, and zarr's own shard index, as bytes.

Owns where everything of a pack file lies (`PackLayout`), the header record, and the shard index.
The file is a legal zarr v3 shard (docs/format.md); reading and writing files is the store's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tqstore.errors import Corrupt, InvalidInput
from tqstore.format.block_hash import HASH_NBYTES, BlockRecord
from tqstore.format.format_file import FORMAT_VERSION
from tqstore.format.framing import Buffer, crc32c, frame_nbytes, read_frame, write_frame
from tqstore.format.page import PageKey
from tqstore.format.plain import pack_plain, unpack_map
from tqstore.spec import PageSpec, align

MAGIC = b"TQPK"
CRC_NBYTES = 4
MAX_PACK_NBYTES = 1 << 24
MAX_PAGES = 256
NO_PARENT = bytes(HASH_NBYTES)  # stands for the namespace id, the parent of a chain's first block
ABSENT = (1 << 64) - 1
_PAGE_REF = struct.Struct("<HH")  # index into the header's blocks, layer


@dataclass(frozen=True)
class PackLayout:
    """Where the pages of one page spec lie in its packs.  All in bytes but `max_pages`."""

    page_nbytes: int
    page_tokens: int
    alignment: int
    stride: int
    max_pages: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, spec: PageSpec) -> PackLayout:
        """Alignment: the largest whose padding of a page and its crc is at most 3% of them.

        `max_pages`: the largest power of two that keeps a pack within 16 MiB, 1 to 256.
        """
        stored = spec.page_nbytes + CRC_NBYTES
        alignment = 4096
        while alignment > 64 and (align(stored, alignment) - stored) * 100 > 3 * stored:
            alignment //= 2
        stride = align(stored, alignment)
        fitting = max(1, min(MAX_PAGES, MAX_PACK_NBYTES // stride))
        return cls(
            spec.page_nbytes, spec.page_tokens, alignment, stride, 1 << (fitting.bit_length() - 1)
        )

    @property
    def index_nbytes(self) -> int:
        """Zarr's shard index: (offset, nbytes) of every slot, and its crc32c."""
        return 16 * self.max_pages + CRC_NBYTES

    @property
    def max_header_nbytes(self) -> int:
        """No header body of this layout is larger: what a reader may be made to allocate."""
        block_nbytes = 2 * HASH_NBYTES + 8 * self.page_tokens
        return self.max_pages * (block_nbytes + _PAGE_REF.size) + 256

    def first_slot(self, header_nbytes: int) -> int:
        """Offset of slot 0 behind a header frame of `header_nbytes`."""
        return align(header_nbytes, self.alignment)

    def file_nbytes(self, header_nbytes: int, num_pages: int) -> int:
        return self.first_slot(header_nbytes) + num_pages * self.stride + self.index_nbytes


@dataclass(frozen=True)
class PackHeader:
    """What a pack holds.  Slot i is the page of `pages[i]` = (index into the blocks, layer).

    Kept in columns, as in the file: `hashes` and `parents` 16 bytes a block, `tokens` 8 *
    page_tokens bytes a block, `pages` 4 bytes a page.  Layers that share a block share its row.
    """

    spec_digest: bytes
    hashes: bytes
    parents: bytes
    tokens: bytes
    pages: bytes
    page_tokens: int

    @classmethod
    def of(
        cls, spec: PageSpec, blocks: Sequence[BlockRecord], keys: Sequence[PageKey]
    ) -> PackHeader:
        """The header of a pack with the pages `keys`; only the blocks they use are kept."""
        by_hash = {block.hash: block for block in blocks}
        used = list(dict.fromkeys(block_hash for _, block_hash in keys))
        for block_hash in used:
            if block_hash not in by_hash:
                raise InvalidInput(f"a page names block {block_hash.hex()}, which was not given")
        row = {block_hash: i for i, block_hash in enumerate(used)}
        return cls(
            spec_digest=spec.digest,
            hashes=b"".join(used),
            parents=b"".join(_stored_parent(by_hash[h]) for h in used),
            tokens=b"".join(by_hash[h].token_bytes for h in used),
            pages=b"".join(_PAGE_REF.pack(row[h], layer) for layer, h in keys),
            page_tokens=spec.page_tokens,
        )

    @property
    def num_pages(self) -> int:
        return len(self.pages) // _PAGE_REF.size

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_NBYTES

    @property
    def block_hashes(self) -> list[bytes]:
        return _pieces(self.hashes, HASH_NBYTES)

    @property
    def page_refs(self) -> list[tuple[int, int]]:
        """(block index, layer) of each slot."""
        return list(_PAGE_REF.iter_unpack(self.pages))

    @property
    def page_keys(self) -> list[PageKey]:
        """(layer, block hash) of each slot."""
        hashes = self.block_hashes
        return [(layer, hashes[block]) for block, layer in self.page_refs]

    def block(self, index: int, namespace_id: bytes) -> BlockRecord:
        at, width = index * HASH_NBYTES, 8 * self.page_tokens
        parent = self.parents[at : at + HASH_NBYTES]
        return BlockRecord(
            self.hashes[at : at + HASH_NBYTES],
            namespace_id if parent == NO_PARENT else parent,
            np.frombuffer(self.tokens[index * width : (index + 1) * width], "<i8"),
        )

    def encode(self) -> bytes:
        body = {
            "spec": self.spec_digest,
            "hashes": self.hashes,
            "parents": self.parents,
            "tokens": self.tokens,
            "pages": self.pages,
        }
        return write_frame(MAGIC, FORMAT_VERSION, pack_plain(body, "pack header"))

    @classmethod
    def decode(
        cls, data: Buffer, spec: PageSpec, file: str, layout: PackLayout | None = None
    ) -> PackHeader:
        """The header frame that `data` starts with; Corrupt, or Incompatible if newer.

        `layout`, if known, is that of `spec`: finding it takes as long as decoding.
        """
        layout = layout or PackLayout.of(spec)
        limit = layout.max_header_nbytes
        body = read_frame(data, MAGIC, FORMAT_VERSION, file=file, max_nbytes=limit, is_whole=False)
        fields = unpack_map(body, file)
        header = cls(
            spec_digest=fields.take_bytes("spec", 16),
            hashes=fields.take("hashes", bytes),
            parents=fields.take("parents", bytes),
            tokens=fields.take("tokens", bytes),
            pages=fields.take("pages", bytes),
            page_tokens=spec.page_tokens,
        )
        fields.done()
        header._check(spec, layout, file)
        return header

    def _check(self, spec: PageSpec, layout: PackLayout, file: str) -> None:
        if self.spec_digest != spec.digest:
            raise Corrupt(file, f"the pack's page spec is not {spec.name}, whose folder it is in")
        num_blocks, num_pages = self.num_blocks, self.num_pages
        if (
            len(self.hashes) != num_blocks * HASH_NBYTES
            or len(self.parents) != len(self.hashes)
            or len(self.tokens) != num_blocks * 8 * self.page_tokens
            or len(self.pages) != num_pages * _PAGE_REF.size
        ):
            raise Corrupt(file, "the header's columns do not fit together")
        if not 1 <= num_blocks <= num_pages <= layout.max_pages:
            raise Corrupt(file, f"{num_pages} pages of {num_blocks} blocks in one pack")
        if max(_block_column(self.pages)) >= num_blocks:
            raise Corrupt(file, "a page names a block the header doesn't have")


def _stored_parent(block: BlockRecord) -> bytes:
    return NO_PARENT if block.is_first else block.parent


def _block_column(pages: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(pages) // 2}H", pages)[::2]


def _pieces(joined: bytes, width: int) -> list[bytes]:
    return [joined[at : at + width] for at in range(0, len(joined), width)]


def pack_header_nbytes(head: Buffer, spec: PageSpec, file: str) -> int:
    """Bytes of the header frame, from the first 24 bytes of the file."""
    limit = PackLayout.of(spec).max_header_nbytes
    return frame_nbytes(head, MAGIC, FORMAT_VERSION, file=file, max_nbytes=limit)


def shard_index(layout: PackLayout, first_slot: int, num_pages: int) -> bytes:
    """Zarr's index: little-endian (offset, nbytes) a slot, absent slots all ones, then crc32c."""
    table = np.full((layout.max_pages, 2), ABSENT, "<u8")  # [slots, (offset, nbytes)]
    table[:num_pages, 0] = first_slot + np.arange(num_pages, dtype=np.uint64) * layout.stride
    table[:num_pages, 1] = layout.page_nbytes + CRC_NBYTES
    raw = table.tobytes()
    return raw + struct.pack("<I", crc32c(raw))


def pack_buffers(
    layout: PackLayout, header: bytes, records: Sequence[npt.NDArray[np.uint8]]
) -> list[bytes | memoryview]:
    """The pack file as buffers in file order; the pages' uint8 [page_nbytes] are not copied."""
    num_pages = len(records)
    padding = bytes(layout.stride - layout.page_nbytes - CRC_NBYTES)
    first_slot = layout.first_slot(len(header))
    buffers: list[bytes | memoryview] = [header + bytes(first_slot - len(header))]
    for record in records:
        buffers += [record.data, struct.pack("<I", crc32c(record)) + padding]
    buffers.append(shard_index(layout, first_slot, num_pages))
    return buffers
