"""Every record: round trips, damage, and what a decoder does with anything at all."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format import strategies
from tqstore.errors import Corrupt, Incompatible, InvalidInput, TqStoreError
from tqstore.format import checkpoint as ck
from tqstore.format import format_file, namespace, pack
from tqstore.format.arrays import RawArray
from tqstore.format.block_hash import (
    BlockRecord,
    as_tokens,
    chain_blocks,
    extend_chain,
    needed_blocks,
)
from tqstore.format.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from tqstore.format.format_file import FormatFile
from tqstore.format.framing import write_frame
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout
from tqstore.format.plain import canonical, pack_plain, unpack_map
from tqstore.spec import CodecSpec, PageSpec

SPEC = PageSpec(2, 64, 64, 16, CodecSpec.parse("prod4"), CodecSpec.parse("int8"), "float16")

EMPTY = RawArray("int8", (1, 0, 1), b"")
ONE_TOKEN = RawArray("int8", (1, 1, 1), b"x")


def header_of(spec: PageSpec = SPEC) -> PackHeader:
    blocks = chain_blocks(bytes(32), range(3 * spec.page_tokens), spec.page_tokens)
    return PackHeader.of(spec, blocks, [(layer, b.hash) for layer in range(2) for b in blocks])


CHECKPOINT = encode_checkpoint(
    Checkpoint(bytes(32), 4, 4, (bytes(16),), b"", (ck.LayerTail(4, EMPTY, EMPTY, 9, 1),)), "s", 1
)
SUMMARY_NBYTES = ck.summary_nbytes(CHECKPOINT, "f")

# (magic, decoder of a file, a good file) of each record
RECORDS: list[tuple[bytes, Callable[[bytes], Any], bytes]] = [
    (format_file.MAGIC, FormatFile.decode, FormatFile(bytes(16), 1).encode()),
    (namespace.MAGIC, Namespace.decode, Namespace.of("ab" * 8, [SPEC], tenant_salt="x").encode()),
    (pack.MAGIC, lambda data: PackHeader.decode(data, SPEC, "f"), header_of().encode()),
    (ck.MAGIC, lambda data: ck.decode_summary(data, "f"), CHECKPOINT[:SUMMARY_NBYTES]),
    (ck.MAGIC, lambda data: decode_checkpoint(data, "f"), CHECKPOINT),
]


@given(strategies.namespaces())
def test_namespace_round_trip(given_namespace: Namespace) -> None:
    encoded = given_namespace.encode()
    decoded = Namespace.decode(encoded)
    assert decoded == given_namespace
    assert decoded.id == given_namespace.id == hashlib.sha256(encoded[24:]).digest()


@given(strategies.namespaces(), strategies.namespaces())
def test_namespaces_differ_exactly_if_their_ids_do(a: Namespace, b: Namespace) -> None:
    if a.id == b.id:
        a.check_same(b)
    else:
        with pytest.raises(Incompatible):
            a.check_same(b)


def test_namespace_mismatch_names_the_first_field_and_both_values() -> None:
    base = Namespace.of("ab" * 8, [SPEC] * 4, parts={"adapter": "none", "weights": "w"})
    other_keys = PageSpec(2, 64, 64, 16, CodecSpec.parse("mse4"), SPEC.values, "float16")
    cases = [
        (Namespace.of("ab" * 8, [SPEC] * 4, parts={"adapter": "lora", "weights": "w"}),
         "model.parts.adapter", "none", "lora"),
        (Namespace.of("cd" * 8, [SPEC] * 4, parts=dict(base.parts)),
         "model.fingerprint", "ab" * 8, "cd" * 8),
        (Namespace.of("ab" * 8, [SPEC] * 3 + [other_keys], parts=dict(base.parts)),
         "layers[3].keys", "prod4", "mse4"),
        (Namespace.of("ab" * 8, [SPEC] * 3, parts=dict(base.parts)), "number of layers", 4, 3),
        (Namespace.of("ab" * 8, [SPEC] * 4, seed=7, parts=dict(base.parts)), "seed", 0, 7),
    ]  # fmt: skip
    for given_namespace, field, stored, given_value in cases:
        with pytest.raises(Incompatible) as caught:
            base.check_same(given_namespace, doing="resuming")
        assert (caught.value.field, caught.value.stored, caught.value.given) == (
            field,
            stored,
            given_value,
        )
        assert field in str(caught.value)
        assert "resuming" in str(caught.value)


def test_the_tenant_salt_itself_is_not_stored() -> None:
    salted = Namespace.of("ab" * 8, [SPEC], tenant_salt="s3cret")
    assert b"s3cret" not in salted.encode()
    assert salted.id != Namespace.of("ab" * 8, [SPEC]).id


@pytest.mark.parametrize(
    ("fingerprint", "layers", "options"),
    [
        ("", [SPEC], {}),
        ("XY" * 8, [SPEC], {}),
        ("ab" * 8, [], {}),
        ("ab" * 8, [SPEC, PageSpec(1, 8, 8, 8, SPEC.keys, SPEC.values, "float16")], {}),
        ("ab" * 8, [SPEC], {"seed": -1}),
        ("ab" * 8, [SPEC], {"tenant_salt": ""}),
        ("ab" * 8, [SPEC], {"parts": {"a": 1}}),
    ],
)
def test_impossible_namespaces(fingerprint: str, layers: list[PageSpec], options: Any) -> None:
    with pytest.raises(InvalidInput):
        Namespace.of(fingerprint, layers, **options)


@given(strategies.checkpoints(), st.integers(1, 1000))
def test_checkpoint_round_trip(given_checkpoint: Checkpoint, sequence: int) -> None:
    encoded = encode_checkpoint(given_checkpoint, "name", sequence)
    summary, decoded = decode_checkpoint(encoded, "f")
    assert decoded == given_checkpoint
    assert (summary.session, summary.sequence) == ("name", sequence)
    assert summary == ck.decode_summary(encoded[: ck.summary_nbytes(encoded, "f")], "f")


def test_checkpoint_size_is_the_tail_plus_16_bytes_a_block() -> None:
    def nbytes(num_blocks: int) -> int:
        hashes = tuple(i.to_bytes(16, "big") for i in range(num_blocks))
        made = Checkpoint(bytes(32), 64, 64 * num_blocks, hashes, b"", ())
        return len(encode_checkpoint(made, "s", 1))

    assert nbytes(10_000) - nbytes(1_000) == 16 * 9_000 + 4
    # 2 bytes more for the length of the hashes, 2 for the number of tokens


@pytest.mark.parametrize(
    "change",
    [
        {"namespace_id": b"short"},
        {"page_tokens": 0},
        {"num_tokens": 5},
        {"block_hashes": (b"short",), "num_tokens": 4},
        {"tail_tokens": b"123"},
        {"created_ns": -1},
        {"expires_ns": -1},
        {"paging": {"hits": -1}},
        {"paging": {"hits": True}},
        {"paging": {5: 1}},
        {"layers": (ck.LayerTail(1, EMPTY, EMPTY),)},
        {"layers": (ck.LayerTail(0, EMPTY, RawArray("int8", (2, 0, 1), b"")),)},
        {"layers": (ck.LayerTail(0, ONE_TOKEN, ONE_TOKEN),)},
        {"layers": (ck.LayerTail(0, EMPTY, EMPTY, window=0),)},
    ],
)
def test_inconsistent_checkpoints_cannot_be_made(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "namespace_id": bytes(32),
        "page_tokens": 4,
        "num_tokens": 0,
        "block_hashes": (),
        "tail_tokens": b"",
        "layers": (),
    }
    with pytest.raises(InvalidInput):
        Checkpoint(**(fields | change))


@pytest.mark.parametrize("bad", [object(), {1: 2}, {"a": {b"k": 1}}, 1 << 70, float("nan"), {1}])
def test_metadata_that_is_not_plain_is_refused(bad: Any) -> None:
    made = Checkpoint(bytes(32), 4, 0, (), b"", (), metadata={"m": bad})
    with pytest.raises(InvalidInput, match="metadata"):
        encode_checkpoint(made, "s", 1)


def test_metadata_nested_too_deep_is_refused() -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(InvalidInput, match="nested deeper"):
        encode_checkpoint(Checkpoint(bytes(32), 4, 0, (), b"", (), metadata={"m": deep}), "s", 1)


@given(strategies.plain_values(30))
def test_canonical_plain_values_round_trip(value: object) -> None:
    packed = pack_plain({"v": value}, "test")
    decoded = unpack_map(packed, "f").take_any("v")
    assert decoded == canonical(value, "test")
    assert pack_plain({"v": decoded}, "test") == packed


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9)))
def test_equal_maps_are_equal_bytes_in_any_order(value: dict[str, int]) -> None:
    assert pack_plain(dict(reversed(value.items())), "m") == pack_plain(value, "m")


@given(strategies.raw_arrays())
def test_raw_array_round_trip(array: RawArray) -> None:
    again = RawArray.of(array.numpy(), array.dtype)
    assert again == array
    assert array.numpy().shape == array.shape


@given(strategies.page_specs(), st.data())
@settings(max_examples=50)
def test_pack_header_round_trip(spec: PageSpec, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, min(5, PackLayout.of(spec).max_pages)))
    root = data.draw(st.binary(min_size=32, max_size=32))
    tokens = data.draw(st.lists(st.integers(-5, 1 << 40), min_size=spec.page_tokens * num_blocks,
                                max_size=spec.page_tokens * num_blocks))  # fmt: skip
    blocks = chain_blocks(root, tokens, spec.page_tokens)
    keys = [(layer, b.hash) for b in blocks for layer in (3, 0)][: PackLayout.of(spec).max_pages]
    header = PackHeader.of(spec, blocks, keys)
    decoded = PackHeader.decode(header.encode() + b"pages follow", spec, "f")
    assert decoded == header
    assert decoded.page_keys == keys
    for i in range(decoded.num_blocks):
        block = decoded.block(i, root)
        assert (block.hash, block.parent) == (blocks[i].hash, blocks[i].parent)
        assert block.tokens.tolist() == blocks[i].tokens.tolist()


def test_layers_that_share_a_block_share_its_row() -> None:
    header = header_of()
    assert (header.num_blocks, header.num_pages) == (3, 6)
    assert len(header.tokens) == 3 * 16 * 8


@given(strategies.page_specs())
def test_layout_follows_the_rules(spec: PageSpec) -> None:
    layout = PackLayout.of(spec)
    stored = spec.page_nbytes + 4
    assert layout.stride % layout.alignment == 0
    assert layout.alignment == 64 or (layout.stride - stored) / stored <= 0.03
    larger = 2 * layout.alignment
    assert larger > 4096 or (-stored % larger) / stored > 0.03
    assert 1 <= layout.max_pages <= 256
    assert layout.max_pages & (layout.max_pages - 1) == 0
    assert layout.max_pages == 1 or layout.max_pages * layout.stride <= 1 << 24
    assert layout.max_pages == 256 or 2 * layout.max_pages * layout.stride > 1 << 24


@pytest.mark.parametrize("record", range(len(RECORDS)))
def test_every_flip_and_cut_of_a_record_is_found(record: int) -> None:
    _, decode, good = RECORDS[record]
    decode(good)
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TqStoreError):
            decode(bytes(damaged))
    for length in range(len(good)):
        with pytest.raises(TqStoreError):
            decode(good[:length])


@pytest.mark.parametrize("record", range(len(RECORDS)))
@given(data=st.data())
@settings(max_examples=60)
def test_decoders_raise_only_typed_errors_for_any_msgpack(record: int, data: st.DataObject) -> None:
    """A valid frame around hostile content: random bytes, or a good record with fields replaced."""
    magic, decode, good = RECORDS[record]
    body = data.draw(st.binary(max_size=100))
    if data.draw(st.booleans()):
        fields = msgpack.unpackb(_first_body(good), raw=False)
        for name in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
            fields[name] = data.draw(strategies.plain_values())
        body = msgpack.packb(fields)
    with contextlib.suppress(TqStoreError):
        decode(write_frame(magic, 1, body))


def _first_body(record: bytes) -> bytes:
    nbytes = int.from_bytes(record[8:16], "little")
    return record[24 : 24 + nbytes]


@pytest.mark.parametrize(
    "body",
    [
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion entries
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 10,  # an array of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\x91" * 100_000,  # 100,000 levels of nesting
        b"\x81\xa1a\xd4\x05x",  # an extension type
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x81\x01\x02",  # a key that is no text
        b"\x81\xa1\xff\x02",  # a key that is not UTF-8
        b"\xc1",
        b"",
    ],
)
@pytest.mark.parametrize("record", range(len(RECORDS)))
def test_hostile_msgpack(record: int, body: bytes) -> None:
    magic, decode, _ = RECORDS[record]
    with pytest.raises(TqStoreError):
        decode(write_frame(magic, 1, body))


def test_unknown_required_feature_is_refused() -> None:
    with pytest.raises(Incompatible, match="required_features") as caught:
        FormatFile.decode(FormatFile(bytes(16), 1, ("encryption",)).encode())
    assert caught.value.stored == "encryption"


def test_namespace_in_another_form_is_refused() -> None:
    """Only the canonical form hashes to the id, so another must not be believed."""
    fields = Namespace.of("ab" * 8, [SPEC]).fields
    body = msgpack.packb(dict(reversed(fields.items())))
    with pytest.raises(Corrupt, match="canonical"):
        Namespace.decode(write_frame(namespace.MAGIC, 1, body))


def test_block_hash_is_what_the_format_says() -> None:
    root = bytes(range(32))
    tokens = [-1, 2, 1 << 40, 0]
    first = hashlib.sha256(
        root + b"".join(t.to_bytes(8, "little", signed=True) for t in tokens[:2])
    )
    second = hashlib.sha256(
        first.digest()[:16] + b"".join(t.to_bytes(8, "little", signed=True) for t in tokens[2:])
    )
    blocks = chain_blocks(root, [*tokens, 9], 2)
    assert [b.hash for b in blocks] == [first.digest()[:16], second.digest()[:16]]
    assert [b.parent for b in blocks] == [root, first.digest()[:16]]
    assert extend_chain(root, np.array(tokens).reshape(2, 2)) == [b.hash for b in blocks]


@pytest.mark.parametrize(
    "bad", [[1.5], ["a"], [[1, 2]], [1 << 64], np.array([1 << 63], np.uint64), [[1], [1, 2]]]
)
def test_tokens_must_be_integers(bad: Any) -> None:
    with pytest.raises(InvalidInput):
        as_tokens(bad)


@given(st.integers(0, 40), st.integers(1, 9), st.none() | st.integers(1, 100), st.integers(0, 30))
def test_needed_blocks_covers_what_the_window_sees(
    num_blocks: int, page_tokens: int, window: int | None, sinks: int
) -> None:
    num_sinks, first = needed_blocks(num_blocks, page_tokens, window, sinks)
    needed = {*range(num_sinks), *range(first, num_blocks)}
    length = num_blocks * page_tokens
    # The next token, at position `length`, sees itself and the window - 1 before it, and sinks.
    seen = {
        position
        for position in range(length)
        if window is None or position > length - window or position < sinks
    }
    assert {position // page_tokens for position in seen} <= needed
    assert 0 <= num_sinks <= first <= num_blocks or num_blocks == 0


def test_a_page_of_an_unknown_block_is_refused() -> None:
    block = BlockRecord(bytes(16), bytes(32), np.zeros(16, np.int64))
    with pytest.raises(InvalidInput, match="was not given"):
        PackHeader.of(SPEC, [block], [(0, b"x" * 16)])


def test_counters_are_left_out_where_there_are_none_and_may_have_any_names() -> None:
    plain = Checkpoint(bytes(32), 4, 0, (), b"", ())
    assert b"paging" not in encode_checkpoint(plain, "s", 1)
    told = replace(plain, paging={"hits": 3, "of the future": (1 << 63) - 1})
    raw = encode_checkpoint(told, "s", 1)
    assert decode_checkpoint(raw, "file") == (ck.summarize(told, "s", 1), told)
    assert ck.decode_summary(raw, "file").paging == told.paging
