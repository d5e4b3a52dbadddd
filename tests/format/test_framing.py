"""The frame: three different errors for three different faults, and no flip goes unseen."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqstore.errors import Corrupt, Incompatible, TqStoreError
from tqstore.format.framing import FRAME_NBYTES, crc32c, read_frame, write_frame


def read(data: bytes, **options: object) -> bytes:
    return bytes(read_frame(data, b"TEST", 3, file="f", max_nbytes=1000, **options))  # type: ignore[arg-type]


def crc32c_by_bits(data: bytes) -> int:
    """The definition: reflected polynomial 0x82F63B78, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=200))
def test_crc_is_castagnoli(data: bytes) -> None:
    assert (
        crc32c(data) == crc32c(memoryview(data)) == crc32c(bytearray(data)) == crc32c_by_bits(data)
    )


@given(st.binary(max_size=200))
def test_round_trip(body: bytes) -> None:
    frame = write_frame(b"TEST", 3, body)
    assert len(frame) == FRAME_NBYTES + len(body)
    assert read(frame) == body
    assert read(frame + b"more", is_whole=False) == body


@given(st.integers(1, 3))
def test_older_versions_are_read(version: int) -> None:
    assert read(write_frame(b"TEST", version, b"body")) == b"body"


def test_wrong_magic_newer_version_and_bad_checksum_differ() -> None:
    with pytest.raises(Corrupt, match="wrong magic"):
        read(write_frame(b"ELSE", 3, b"body"))
    with pytest.raises(Incompatible, match="format version differs: stored 4, given 3"):
        read(write_frame(b"TEST", 4, b"body"))
    damaged = bytearray(write_frame(b"TEST", 3, b"body"))
    damaged[-1] ^= 1
    with pytest.raises(Corrupt, match="bad checksum of the body"):
        read(bytes(damaged))


def test_flags_belong_to_newer_formats() -> None:
    head = bytearray(write_frame(b"TEST", 3, b"")[:20])
    head[6] = 1
    with pytest.raises(Incompatible, match="frame flags"):
        read(bytes(head) + struct.pack("<I", crc32c_by_bits(head)))


def test_every_flip_and_every_cut_is_found() -> None:
    frame = write_frame(b"TEST", 3, b"some body")
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TqStoreError):
            read(bytes(damaged))
    for length in range(len(frame)):
        with pytest.raises(Corrupt, match="cut short"):
            read(frame[:length])
    with pytest.raises(Corrupt, match="follow the record"):
        read(frame + b"x")


def test_a_huge_claim_is_refused_before_anything_is_allocated() -> None:
    head = struct.pack("<4sHHQI", b"TEST", 3, 0, 1 << 62, 0)
    with pytest.raises(Corrupt, match="claims a body"):
        read(head + struct.pack("<I", crc32c_by_bits(head)))


@given(st.binary(max_size=64))
def test_any_bytes_give_only_typed_errors(data: bytes) -> None:
    with pytest.raises(TqStoreError):
        read(data)
