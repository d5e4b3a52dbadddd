"""Page records: header bytes, binding, and streams as arrays."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given

from tests.format import strategies
from tqstore.errors import Corrupt, InvalidInput
from tqstore.format.page import (
    PageHeader,
    bfloat16_to_float32,
    check_records,
    find_unbound,
    stamp_headers,
    stream_arrays,
)
from tqstore.spec import CodecSpec, PageSpec, StreamSpec

SPEC = PageSpec(2, 64, 80, 16, CodecSpec.parse("prod4"), CodecSpec.parse("exact"), "bfloat16")
KEYS = [(0, b"a" * 16), (7, b"b" * 16), (65535, bytes(range(16)))]


def stamped() -> np.ndarray:
    records = np.full((len(KEYS), SPEC.page_nbytes), 0xAB, np.uint8)
    stamp_headers(records, SPEC, KEYS)
    return records


def test_header_bytes_are_what_the_format_says() -> None:
    records = stamped()
    for record, (layer, block_hash) in zip(records, KEYS, strict=True):
        assert record[:64].tobytes() == struct.pack(
            "<4sHHII16s16s16s", b"TQPG", 1, layer, 16, 0, block_hash, SPEC.digest, bytes(16)
        )
        assert (record[64:] == 0xAB).all()
        header = PageHeader.decode(record, "f", 0)
        assert header == PageHeader(layer, 16, block_hash, SPEC.digest)
        assert header.encode() == record[:64].tobytes()


def test_binding_is_checked_in_every_byte_but_the_choice() -> None:
    records = stamped()
    assert find_unbound(records, SPEC, KEYS) is None
    for byte in range(64):
        damaged = records.copy()
        damaged[1, byte] ^= 0x10
        assert find_unbound(damaged, SPEC, KEYS) == (1 if byte < 48 else None)


def test_damaged_headers() -> None:
    record = stamped()[0]
    for byte, what in ((0, "wrong magic"), (4, "unknown page version"), (12, "flags")):
        damaged = record.copy()
        damaged[byte] ^= 1
        with pytest.raises(Corrupt, match=what) as caught:
            PageHeader.decode(damaged, "c.5.0", 3)
        assert (caught.value.file, caught.value.page) == ("c.5.0", 3)
    with pytest.raises(Corrupt, match="cut short"):
        PageHeader.decode(record[:63], "f", 0)


@pytest.mark.parametrize("key", [(-1, b"a" * 16), (1 << 16, b"a" * 16), (0, b"a" * 15)])
def test_keys_no_page_can_have(key: tuple[int, bytes]) -> None:
    with pytest.raises(InvalidInput, match="no page can be of"):
        stamp_headers(np.zeros((1, SPEC.page_nbytes), np.uint8), SPEC, [key])


def test_records_of_another_form_are_refused() -> None:
    records = stamped()
    check_records(records, SPEC, KEYS)
    for bad in (records[:2], records[:, :-1], records.view(np.int8), records[:, ::-1], None):
        with pytest.raises(InvalidInput, match="records must be"):
            check_records(bad, SPEC, KEYS)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="record 1 has no header of layer 8"):
        check_records(records, SPEC, [KEYS[0], (8, b"b" * 16), KEYS[2]])


SIDE_DATA = ("outlier_units", "outlier_channels", "mean_units", "mean_scales")


def is_side_data(stream: StreamSpec) -> bool:
    return stream.name.endswith(SIDE_DATA)


@given(strategies.page_specs())
def test_streams_tile_the_record(spec: PageSpec) -> None:
    record = np.zeros(spec.page_nbytes, np.uint8)
    arrays = stream_arrays(record, spec)
    assert list(arrays) == [stream.name for stream in spec.streams]
    for number, (stream, array) in enumerate(zip(spec.streams, arrays.values(), strict=True), 1):
        assert array.shape == stream.shape
        assert stream.offset % (4 if is_side_data(stream) else 64) == 0
        array.view(np.uint8)[...] = number  # a view: writes land in the record
    assert not record[:64].any()
    assert np.count_nonzero(record) == sum(stream.nbytes for stream in spec.streams)


def test_bfloat16_patterns() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    assert bfloat16_to_float32(bits).tolist() == [1.0, -2.0, np.inf, 2.0**-133]
