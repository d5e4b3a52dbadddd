"""The page record: its 64-byte header, and its streams as arrays.

Owns the header's bytes, stamping and checking them for many pages at once, and viewing streams.
A page's checksum is kept behind the page by its pack, and what a code means by the quantizers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tqstore.errors import Corrupt, InvalidInput
from tqstore.format.block_hash import HASH_NBYTES
from tqstore.spec import PAGE_HEADER_NBYTES, PageSpec

PAGE_MAGIC = b"TQPG"
PAGE_VERSION = 1
NO_CHOICE = bytes(16)
_HEADER = struct.Struct("<4sHHII16s16s16s")
_ROW = np.dtype(
    [
        ("magic", "u1", 4),
        ("version", "<u2"),
        ("layer", "<u2"),
        ("num_tokens", "<u4"),
        ("flags", "<u4"),
        ("block_hash", "u1", 16),
        ("spec_digest", "u1", 16),
        ("choice_digest", "u1", 16),
    ]
)
# Bytes that bind a record to what it is asked for; the last 16, the choice, belong to the codec.
BINDING_NBYTES = PAGE_HEADER_NBYTES - 16
PageKey = tuple[int, bytes]  # (layer, block hash)
Records = npt.NDArray[np.uint8]  # [pages, page_nbytes]


@dataclass(frozen=True)
class PageHeader:
    """What a page says it is.  `choice_digest` leaves room for codecs whose side data depends on
    a chain's first block; zeros where there is none."""

    layer: int
    num_tokens: int
    block_hash: bytes
    spec_digest: bytes
    choice_digest: bytes = NO_CHOICE

    def encode(self) -> bytes:
        return _HEADER.pack(
            PAGE_MAGIC,
            PAGE_VERSION,
            self.layer,
            self.num_tokens,
            0,
            self.block_hash,
            self.spec_digest,
            self.choice_digest,
        )

    @classmethod
    def decode(cls, record: bytes | memoryview | Records, file: str, page: int) -> PageHeader:
        """The header at the start of `record`; Corrupt if it isn't one."""
        raw = bytes(record[:PAGE_HEADER_NBYTES])
        if len(raw) < PAGE_HEADER_NBYTES:
            raise Corrupt(file, f"cut short: {len(raw)} of {PAGE_HEADER_NBYTES} bytes", page=page)
        magic, version, layer, num_tokens, flags, *digests = _HEADER.unpack(raw)
        if magic != PAGE_MAGIC:
            raise Corrupt(file, f"wrong magic {magic!r}, expected {PAGE_MAGIC!r}", page=page)
        if version != PAGE_VERSION or flags:
            raise Corrupt(file, f"unknown page version {version} or flags {flags:#x}", page=page)
        return cls(layer, num_tokens, *digests)


def stamp_headers(
    records: Records, spec: PageSpec, keys: Sequence[PageKey], choice_digest: bytes = NO_CHOICE
) -> None:
    """Writes the headers of whole pages `records` [pages, page_nbytes] in place, in one go."""
    records[:, :PAGE_HEADER_NBYTES] = _headers(spec, keys, choice_digest)


def _headers(spec: PageSpec, keys: Sequence[PageKey], choice_digest: bytes) -> Records:
    """Header bytes of full pages, [pages, 64]."""
    for layer, block_hash in keys:
        if not 0 <= layer < 1 << 16 or len(block_hash) != HASH_NBYTES:
            raise InvalidInput(f"no page can be of layer {layer}, block {block_hash.hex()}")
    rows = np.zeros(len(keys), _ROW)
    rows["magic"] = np.frombuffer(PAGE_MAGIC, np.uint8)
    rows["version"] = PAGE_VERSION
    rows["layer"] = [layer for layer, _ in keys]
    rows["num_tokens"] = spec.page_tokens
    joined = b"".join(block_hash for _, block_hash in keys)
    rows["block_hash"] = np.frombuffer(joined, np.uint8).reshape(len(keys), 16)
    rows["spec_digest"] = np.frombuffer(spec.digest, np.uint8)
    rows["choice_digest"] = np.frombuffer(choice_digest, np.uint8)
    return rows.view(np.uint8).reshape(len(keys), PAGE_HEADER_NBYTES)


def find_unbound(records: Records, spec: PageSpec, keys: Sequence[PageKey]) -> int | None:
    """Index of the first record whose header doesn't bind it to its key and spec, or None."""
    if not len(keys):
        return None
    expected = _headers(spec, keys, NO_CHOICE)[:, :BINDING_NBYTES]
    wrong = (records[:, :BINDING_NBYTES] != expected).any(axis=1)
    return int(wrong.argmax()) if wrong.any() else None


def check_records(records: Records, spec: PageSpec, keys: Sequence[PageKey]) -> None:
    """InvalidInput unless `records` are C-contiguous uint8 [len(keys), page_nbytes] stamped so."""
    if (
        not isinstance(records, np.ndarray)
        or records.dtype != np.uint8
        or records.shape != (len(keys), spec.page_nbytes)
        or not records.flags.c_contiguous
    ):
        raise InvalidInput(
            f"records must be a C-contiguous uint8 array [{len(keys)}, {spec.page_nbytes}], not "
            f"{getattr(records, 'dtype', type(records).__name__)} {getattr(records, 'shape', '')}"
        )
    if (unbound := find_unbound(records, spec, keys)) is not None:
        layer, block = keys[unbound]
        raise InvalidInput(
            f"record {unbound} has no header of layer {layer}, block {block.hex()}, {spec.name}",
            remedy="Stamp it with format.page.stamp_headers",
        )


def stream_arrays(record: Records, spec: PageSpec) -> dict[str, npt.NDArray[np.generic]]:
    """The streams of one page record as views by name; bfloat16 comes as uint16 bit patterns."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for stream in spec.streams:
        dtype = np.dtype("uint16" if stream.dtype == "bfloat16" else stream.dtype).newbyteorder("<")
        raw = record[stream.offset : stream.offset + stream.nbytes]
        arrays[stream.name] = raw.view(dtype).reshape(stream.shape)
    return arrays


def bfloat16_to_float32(bits: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (uint16) as the float32 numbers they stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
