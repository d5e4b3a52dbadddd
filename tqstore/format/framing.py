"""The frame around every msgpack record of the store: magic, version, length, two checksums.

Owns the 24 bytes in front of a body, and the three ways they can be wrong (not ours, newer than
this release, damaged).  What a body means belongs to the record's own module.
"""

from __future__ import annotations

import struct
from typing import Any

import google_crc32c
import numpy as np

from tqstore.errors import Corrupt, Incompatible

# magic, version, flags, bytes of the body, crc32c of the body, crc32c of the 20 bytes before
_HEAD = struct.Struct("<4sHHQII")
_CRC = struct.Struct("<I")
FRAME_NBYTES = _HEAD.size
Buffer = Any  # whatever has the buffer protocol: bytes, memoryview, mmap, a C-contiguous array

NEWER_REMEDY = "Read it with a newer tqstore; this release leaves it alone"


def crc32c(data: Buffer) -> int:
    """CRC-32C (Castagnoli) of the bytes of `data`, without copying them."""
    if not isinstance(data, bytes | np.ndarray):
        data = np.frombuffer(data, np.uint8)
    value: int = google_crc32c.value(data)
    return value


def write_frame(magic: bytes, version: int, body: bytes) -> bytes:
    """`body` behind its 24-byte head."""
    head = _HEAD.pack(magic, version, 0, len(body), crc32c(body), 0)[:-4]
    return head + _CRC.pack(crc32c(head)) + body


def frame_nbytes(head: Buffer, magic: bytes, version: int, *, file: str, max_nbytes: int) -> int:
    """Bytes of the whole frame that starts with `head`, from its first 24 bytes alone.

    Raises Corrupt for another magic or a damaged head, Incompatible for a newer version, Corrupt
    for a body that claims more than `max_nbytes`: nothing is allocated on a claim's word.
    """
    if len(head) < FRAME_NBYTES:
        raise Corrupt(file, f"cut short: {len(head)} bytes where a {FRAME_NBYTES}-byte head starts")
    raw = bytes(head[:FRAME_NBYTES])
    found_magic, found_version, flags, body_nbytes, _, head_crc = _HEAD.unpack(raw)
    if found_magic != magic:
        raise Corrupt(
            file, f"wrong magic {found_magic!r}, expected {magic!r}: another kind of file"
        )
    if crc32c(raw[:-4]) != head_crc:
        raise Corrupt(file, "bad checksum of the head")
    if found_version > version or found_version < 1:
        raise Incompatible(
            "format version", found_version, version, doing=f"reading {file}", remedy=NEWER_REMEDY
        )
    if flags:
        raise Incompatible("frame flags", flags, 0, doing=f"reading {file}", remedy=NEWER_REMEDY)
    if body_nbytes > max_nbytes:
        raise Corrupt(file, f"claims a body of {body_nbytes} bytes, more than {max_nbytes}")
    return FRAME_NBYTES + int(body_nbytes)


def read_frame(
    data: Buffer, magic: bytes, version: int, *, file: str, max_nbytes: int, is_whole: bool = True
) -> memoryview:
    """The body of the frame `data` starts with, checked.

    `is_whole` demands that nothing follows it; a pack's pages follow its header.
    """
    view = memoryview(data)
    nbytes = frame_nbytes(view, magic, version, file=file, max_nbytes=max_nbytes)
    if len(view) < nbytes:
        raise Corrupt(file, f"cut short: {len(view)} of {nbytes} bytes")
    if is_whole and len(view) > nbytes:
        raise Corrupt(file, f"{len(view) - nbytes} bytes follow the record")
    body = view[FRAME_NBYTES:nbytes]
    if crc32c(body) != _HEAD.unpack(bytes(view[:FRAME_NBYTES]))[4]:
        raise Corrupt(file, "bad checksum of the body")
    return body
