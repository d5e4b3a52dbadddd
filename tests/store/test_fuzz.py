"""Hostile bytes: whatever a decoder is given, a value or a TqStoreError comes out, at once.

tools/fuzz feeds the same decoders by coverage for as long as one likes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.synthetic import chain, check_readable, save
from tools.faults.cuts import memory_folder
from tools.faults.decoders import FRAMES, TARGETS, bodies, framed, sound
from tqstore.errors import Corrupt, TqStoreError
from tqstore.format.framing import FRAME_NBYTES, crc32c, write_frame
from tqstore.store.gc_plan import GcOptions
from tqstore.store.page_store import PageStore

MIB = 1 << 20

# Anything msgpack can say, also what no record of ours has.
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -1])
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=5) | st.integers(0, 9), inner)
    ),
    max_leaves=8,
)


def feed(target: str, data: bytes) -> None:
    with contextlib.suppress(TqStoreError):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_the_decoder_takes_what_is_sound(target: str) -> None:
    TARGETS[target](_input(target, sound(target)))


def _input(target: str, data: bytes) -> bytes:
    """The state's head is in the middle of a checkpoint."""
    if target != "state head":
        return data
    return data[FRAME_NBYTES + int.from_bytes(data[8:16], "little") :]


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_any_bytes(target: str, data: st.DataObject) -> None:
    feed(target, data.draw(st.binary(max_size=200)))


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_a_sound_record_with_bytes_changed(target: str, data: st.DataObject) -> None:
    record = bytearray(_input(target, sound(target)))
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    feed(target, bytes(record[: data.draw(st.integers(0, len(record)))]))
    feed(target, bytes(record))


def mutate(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one thing in it replaced, left out or added."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        changed = dict(value)
        name = draw(st.sampled_from(list(value)))
        match draw(st.sampled_from(["inside", "inside", "without", "more"])):
            case "inside":
                changed[name] = mutate(draw, value[name])
            case "without":
                del changed[name]
            case "more":
                changed[draw(st.text(max_size=3) | st.binary(max_size=3))] = draw(values)
        return changed
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutate(draw, value[at]), *value[at + draw(st.integers(0, 1)) :]]
    if isinstance(value, bytes) and draw(st.booleans()):
        return value[: draw(st.integers(0, len(value)))] + draw(st.binary(max_size=20))
    return draw(values)


@pytest.mark.parametrize("target", FRAMES)
@given(data=st.data())
def test_right_checksums_around_wrong_fields(target: str, data: st.DataObject) -> None:
    """What one who can write files would try: everything is right but what the record says."""
    changed = copy.deepcopy(bodies(target))
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] = data.draw(st.composite(lambda draw: mutate(draw, changed[at]))())
    feed(target, framed(target, changed))


@pytest.mark.parametrize("target", FRAMES)
@given(body=st.binary(max_size=100))
def test_right_checksums_around_any_body(target: str, body: bytes) -> None:
    feed(target, write_frame(FRAMES[target][0], 1, body))


CLAIMS = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 items
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # as many bytes
    b"\xdb\xff\xff\xff\xff",  # a text of as many
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x81\xa1x\xdd\xff\xff\xff\xff" * 3,
    b"\x91" * 100_000,  # a list in a list in a list ...
    b"\x81\xa1a" * 100_000,
    b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 1000,
]


@pytest.mark.parametrize("target", FRAMES)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[:6].hex())
def test_lengths_that_are_only_claimed_take_no_memory(target: str, claim: bytes) -> None:
    data = write_frame(FRAMES[target][0], 1, claim)
    tracemalloc.start()
    try:
        with pytest.raises(TqStoreError):
            TARGETS[target](data)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("target", FRAMES)
@pytest.mark.parametrize("claimed", [1, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_frames_that_claim_more_than_there_is(target: str, claimed: int) -> None:
    head = struct.pack("<4sHHQI", FRAMES[target][0], 1, 0, claimed, 0)
    data = head + struct.pack("<I", crc32c(head))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            TARGETS[target](data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_map_keys_that_are_not_text() -> None:
    """msgpack lets bytes be keys; sorted beside text they would raise a TypeError."""
    body = bodies("namespace")[0]
    body["model"]["parts"] = {"weights": "w", b"x": "y"}
    with pytest.raises(Corrupt, match="not text"):
        TARGETS["namespace"](framed("namespace", [body]))
    summary, state = bodies("checkpoint")
    summary["metadata"] = {"a": [{b"x": 1}]}
    with pytest.raises(Corrupt, match="not text"):
        TARGETS["checkpoint"](framed("checkpoint", [summary, state]))


def test_a_page_spec_of_terabytes() -> None:
    """Each number is in its range; a sparse file would be as long as the page claims to be."""
    body = bodies("namespace")[0]
    large = {"kv_heads": 1 << 12, "key_dim": 1 << 14, "page_tokens": 1 << 14, "keys": "exact"}
    body["layers"] = [body["layers"][0] | large]
    with pytest.raises(Corrupt, match="more than 1073741824"):
        TARGETS["namespace"](framed("namespace", [body]))


def forged_files(draw: st.DrawFn, store: Path) -> None:
    """Puts records with right checksums and wrong fields where the store looks for them."""
    kind = draw(st.sampled_from(["checkpoint", "namespace", "pack", "gone"]))
    target = "pack header" if kind == "pack" else kind
    changed = copy.deepcopy(bodies(target))
    at = draw(st.integers(0, len(changed) - 1))
    changed[at] = mutate(draw, changed[at])
    record = framed(target, changed)
    if kind == "checkpoint":
        place = next(store.glob("sessions/*")) / "000000000007.ckpt"
        if isinstance(changed[0], dict):
            changed[0] |= {"session": "demo", "sequence": 7}
            record = framed(target, changed)
    elif kind == "namespace":
        body = record[FRAME_NBYTES:]
        place = store / "ns" / hashlib.sha256(body).hexdigest() / "namespace.msgpack"
    elif kind == "gone":
        place = store / "gone" / "000000000001.gone"
    else:
        place = next(store.glob("ns/*/pages/*")) / "c.7.0"
        record += bytes(draw(st.sampled_from([0, 100, 40_000])))
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.write_bytes(record)


@given(data=st.data())
@settings(max_examples=80)
def test_forged_records_in_a_store(data: st.DataObject) -> None:
    """Whatever is done with it only TqStoreError comes out, and what is good is found."""
    logging.getLogger("tqstore").setLevel(logging.CRITICAL)
    with memory_folder() as folder:
        path, sequence = folder / "store", chain(2)
        with PageStore.open(path) as store:
            save(store, "demo", sequence)
            save(store, "good", sequence)
        data.draw(st.composite(lambda draw: forged_files(draw, path))())
        for act in (
            lambda store: list(store.verify()),
            lambda store: store.sessions(),
            lambda store: store.namespaces(),
            lambda store: store.latest("demo"),
            lambda store: store.stats(),
            lambda store: store.gc(GcOptions(grace_seconds=0)),
            lambda store: save(store, "demo", sequence, 0, 1),
            lambda store: store.repair(),
            lambda store: store.purge("demo"),
        ):
            with PageStore.open(path) as store, contextlib.suppress(TqStoreError):
                act(store)
        with PageStore.open(path) as store:
            check_readable(store, "good", sequence, 2)
    logging.getLogger("tqstore").setLevel(logging.NOTSET)
