"""Every decoder of the format as one function of bytes: what fuzzing feeds.

A target returns or raises TqStoreError, whatever it is given; anything else is a bug.  It also
uses what it decoded as the store would, since a bad value may only hurt then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from tests.store.synthetic import NAMESPACE, SPEC, chain
from tqstore.format.checkpoint import (
    MAGIC as CHECKPOINT_MAGIC,
)
from tqstore.format.checkpoint import (
    STATE_MAGIC,
    decode_checkpoint,
    decode_summary,
    encode_checkpoint,
    state_nbytes,
    summary_nbytes,
)
from tqstore.format.format_file import MAGIC as FORMAT_MAGIC
from tqstore.format.format_file import FormatFile
from tqstore.format.framing import FRAME_NBYTES, write_frame
from tqstore.format.namespace import MAGIC as NAMESPACE_MAGIC
from tqstore.format.namespace import Namespace
from tqstore.format.pack import MAGIC as PACK_MAGIC
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes
from tqstore.format.page import PageHeader, find_unbound, stream_arrays
from tqstore.format.zarr_metadata import zarr_metadata
from tqstore.store.tombstones import MAGIC as GONE_MAGIC
from tqstore.store.tombstones import Gone

FILE = "fuzzed"
DEMO = chain(3)


def format_file(data: bytes) -> None:
    FormatFile.decode(data, FILE).encode()


def namespace(data: bytes) -> None:
    found = Namespace.decode(data, FILE)
    assert found.encode() == data
    for spec in found.page_specs:
        PackLayout.of(spec)
        zarr_metadata(spec)


def pack_header(data: bytes) -> None:
    header = PackHeader.decode(data, SPEC, FILE)
    PackLayout.of(SPEC).file_nbytes(pack_header_nbytes(data, SPEC, FILE), header.num_pages)
    assert len(header.page_keys) == header.num_pages
    for index in range(header.num_blocks):
        assert len(header.block(index, NAMESPACE.id).tokens) == SPEC.page_tokens


def page(data: bytes) -> None:
    header = PageHeader.decode(data, FILE, 0)
    record = np.frombuffer(data.ljust(SPEC.page_nbytes, b"\0"), np.uint8, SPEC.page_nbytes)
    find_unbound(record[None], SPEC, [(header.layer, header.block_hash)])
    stream_arrays(record, SPEC)


def checkpoint(data: bytes) -> None:
    summary, found = decode_checkpoint(data, FILE)
    for layer in range(len(summary.reach)):
        for _ in summary.needed_blocks(layer):
            pass
    # What was read can be written again: a resumed session is saved on.
    encode_checkpoint(found, summary.session, summary.sequence)


def summary(data: bytes) -> None:
    summary_nbytes(data, FILE)
    for layer in range(len(decode_summary(data, FILE).reach)):
        for _ in decode_summary(data, FILE).needed_blocks(layer):
            pass


def state_head(data: bytes) -> None:
    state_nbytes(data, FILE)


def gone(data: bytes) -> None:
    found = Gone.decode(data, FILE)
    found.reason_of(bytes(16))
    found.encode()


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "FORMAT": format_file,
    "namespace": namespace,
    "pack header": pack_header,
    "page": page,
    "checkpoint": checkpoint,
    "summary": summary,
    "state head": state_head,
    "gone": gone,
}


def sound(target: str) -> bytes:
    """A record that the target takes: where mutation starts."""
    if target == "FORMAT":
        return FormatFile(bytes(16), 5).encode()
    if target == "namespace":
        return NAMESPACE.encode()
    if target == "pack header":
        return PackHeader.of(SPEC, DEMO.blocks, DEMO.keys(SPEC)).encode()
    if target == "gone":
        known = Gone()
        known.add(dict.fromkeys(DEMO.hashes, "evicted"), {"demo-0123456789abcdef": "expired"})
        return known.encode()
    if target == "page":
        return DEMO.records(SPEC, DEMO.keys(SPEC)[:1]).tobytes()
    return encode_checkpoint(DEMO.checkpoint(2), "demo", 1)


FRAMES = {
    "FORMAT": (FORMAT_MAGIC,),
    "namespace": (NAMESPACE_MAGIC,),
    "pack header": (PACK_MAGIC,),
    "checkpoint": (CHECKPOINT_MAGIC, STATE_MAGIC),
    "summary": (CHECKPOINT_MAGIC,),
    "gone": (GONE_MAGIC,),
}


def bodies(target: str) -> list[Any]:
    """The plain values in the frames of the sound record."""
    data = sound(target)
    found = []
    for _ in FRAMES[target]:
        nbytes = int.from_bytes(data[8:16], "little")
        found.append(msgpack.unpackb(data[FRAME_NBYTES : FRAME_NBYTES + nbytes]))
        data = data[FRAME_NBYTES + nbytes :]
    return found


def framed(target: str, values: list[Any]) -> bytes:
    """`values` in sound frames with right checksums: gets past everything but the fields."""
    packed = (msgpack.packb(value, use_bin_type=True) for value in values)
    return b"".join(
        write_frame(magic, 1, body) for magic, body in zip(FRAMES[target], packed, strict=True)
    )
