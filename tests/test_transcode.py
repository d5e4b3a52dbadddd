"""Transcoding: the same session in other codecs, and nothing changed where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tqstore
from tqstore import Store
from tqstore.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from tqstore.format.page import PAGE_HEADER_NBYTES, stream_arrays
from tqstore.saved_state import NamedState
from tqstore.transcode import transcode

MODEL = "cd" * 32
PAGE, RECENT, WINDOW = 16, 8, 40
TOKENS = [3 * number - 50 for number in range(150)]


def spec(keys: str, values: str, **options: object) -> tqstore.CacheSpec:
    layers = [
        tqstore.LayerSpec(2, 64, keys=keys, values=values),
        tqstore.LayerSpec(2, 64, window=WINDOW, keys=keys, values=values),
        tqstore.LayerSpec(1, 32, keys=keys, values=values, dtype="bfloat16", value_dim=48),
    ]
    return tqstore.CacheSpec(layers, page_tokens=PAGE, recent_tokens=RECENT, seed=5, **options)


def inputs(layer: int, count: int = len(TOKENS)) -> tuple[mx.array, mx.array]:
    """The same keys and values in every test, with a few channels far off."""
    like = spec("exact", "exact").page_specs[layer]
    dtype = getattr(mx, like.dtype)
    draws = [
        mx.random.normal((like.kv_heads, count, dim), key=mx.random.key(10 * layer + side))
        for side, dim in enumerate((like.key_dim, like.value_dim))
    ]
    draws[0][..., 3] += 15.0
    return draws[0].astype(dtype), draws[1].astype(dtype)


def saved(path: Path, keys: str, values: str, name: str = "chat", **options: object) -> Store:
    store = Store.open(path)
    cache = store.new_cache(spec(keys, values, **options), model=MODEL)
    for first in range(0, len(TOKENS), 30):
        for layer in range(3):
            keys_part, values_part = (side[:, first : first + 30] for side in inputs(layer))
            cache.append(layer, keys_part, values_part)
    state = NamedState(3, "ArraysCache", [mx.arange(6).reshape(2, 3)], {"offset": 1})
    store.save(name, cache, TOKENS, states=[state], metadata={"title": "a"})
    return store


def records_of(store: Store, name: str) -> dict[tuple[int, int], np.ndarray]:
    """Every stored page of the newest checkpoint by (layer, block), without its header."""
    checkpoint = store.pages.latest(name)
    pages = store.pages.namespace(store.pages.stored_namespace(checkpoint.namespace_id))
    found = {}
    for layer, page in enumerate(pages.namespace.layers):
        for block, hashed in enumerate(checkpoint.block_hashes):
            location = pages.locate(page, layer, hashed)
            if location is not None:
                rows = np.zeros((1, page.page_nbytes), np.uint8)
                pages.read_pages(page, [location], rows)
                found[layer, block] = rows[0]
    return found


def bodies(store: Store, name: str) -> dict[tuple[int, int], bytes]:
    return {key: row[PAGE_HEADER_NBYTES:].tobytes() for key, row in records_of(store, name).items()}


@pytest.fixture
def twin(tmp_path):
    """A second store, checked as the first one is."""
    from tests.conftest import check_store

    path = tmp_path / "twin"
    yield path
    check_store(path)


@pytest.mark.parametrize(
    ("keys", "values"),
    [("prod4", "int8"), ("mse3+mean+out8", "uni4"), ("card", "balanced"), ("split2.5", "exact")],
)
def test_from_exact_it_is_what_would_have_been_saved_directly(store_dir, twin, keys, values):
    """The oracle: other stores to which the same numbers were appended in those codecs at once."""
    with saved(store_dir, "exact", "exact") as store, saved(twin, keys, values) as direct:
        report = transcode(store.pages, "chat", keys=keys, values=values)
        assert bodies(store, "chat") == bodies(direct, "chat")
        assert report.sequence == 2
        assert report.num_pages == len(bodies(store, "chat"))
        one, other = store.resume("chat"), direct.resume("chat")
        assert one.tokens == other.tokens == TOKENS
        assert one.metadata == {"title": "a"}
        assert one.cache.spec == other.cache.spec
        assert mx.array_equal(one.states[0].arrays[0], mx.arange(6).reshape(2, 3))
        queries = mx.random.normal((2, 1, 64), key=mx.random.key(1))
        for layer in (0, 1):
            given = one.cache.attend(layer, queries)
            assert mx.array_equal(given, other.cache.attend(layer, queries))
        for resumed in (one, other):  # and goes on as the other does
            for layer in range(3):
                resumed.cache.append(layer, *inputs(layer, 60))
        for layer in (0, 2):
            assert mx.array_equal(one.cache.get_keys(layer), other.cache.get_keys(layer))


def test_a_side_that_stays_is_copied_bit_for_bit(store_dir):
    with saved(store_dir, "prod4", "mse3") as store:
        before = records_of(store, "chat")
        report = transcode(store.pages, "chat", keys="int8", to="other")
        after = records_of(store, "other")
        assert report.values.is_copied
        assert report.values.relative_errors == (None, None, None)
        assert report.keys.was_lossy
        assert not report.values.was_lossy
        assert before.keys() == after.keys()
        old, new = (spec(keys, "mse3").page_specs for keys in ("prod4", "int8"))
        for (layer, block), row in before.items():
            one = stream_arrays(row, old[layer])
            other = stream_arrays(after[layer, block], new[layer])
            values = [stream for stream in one if stream.startswith("value_")]
            assert len(values) >= 2
            for stream in values:
                assert np.array_equal(one[stream], other[stream])


def test_the_error_is_that_to_what_was_decoded_before(store_dir):
    with saved(store_dir, "mse4", "int8") as store:
        cache = store.resume("chat").cache
        before = [np.array(cache.get_keys(layer).astype(mx.float32)) for layer in (0, 2)]
        report = transcode(store.pages, "chat", keys="mse2", to="small")
        cache = store.resume("small").cache
        sealed = cache.num_sealed_blocks * PAGE
        for layer, old, wanted in zip(
            (0, 2), before, report.keys.relative_errors[::2], strict=True
        ):
            new = np.array(cache.get_keys(layer).astype(mx.float32))
            assert np.array_equal(old[:, sealed:], new[:, sealed:])  # the tail
            difference = np.linalg.norm((new - old)[:, :sealed]) / np.linalg.norm(old[:, :sealed])
            assert difference == pytest.approx(wanted, rel=0.01)
            assert 0.05 < wanted < 0.6
        assert report.keys.worst_error == max(report.keys.relative_errors)
        assert report.nbytes_after < report.nbytes_before


def test_to_exact_keeps_what_was_decoded(store_dir):
    with saved(store_dir, "prod4", "uni4") as store:
        cache = store.resume("chat").cache
        before = [(cache.get_keys(layer), cache.get_values(layer)) for layer in (0, 2)]
        report = transcode(store.pages, "chat", keys="exact", values="exact")
        assert report.keys.was_lossy
        cache = store.resume("chat").cache
        for layer, (keys, values) in zip((0, 2), before, strict=True):
            assert mx.array_equal(cache.get_keys(layer), keys)
            assert mx.array_equal(cache.get_values(layer), values)


def test_numbers_at_the_edge_of_float16_stay_finite(store_dir):
    layer = tqstore.LayerSpec(1, 64, keys="mse3", values="mse4")
    with Store.open(store_dir) as store:
        cache = store.new_cache(tqstore.CacheSpec([layer], page_tokens=PAGE), model=MODEL)
        numbers = mx.random.uniform(-1, 1, (1, 100, 64), key=mx.random.key(0))
        numbers = (mx.sign(numbers) * 65504).astype(mx.float16)
        cache.append(0, numbers, numbers)
        store.save("chat", cache, list(range(100)))
        store.convert("chat", keys="exact", values="exact")
        cache = store.resume("chat").cache
        for got in (cache.get_keys(0), cache.get_values(0)):
            assert bool(mx.isfinite(got).all())


def test_windows_keep_what_was_kept(store_dir):
    """Without history a windowed layer has its window only; that is what is re-coded."""
    with saved(store_dir, "exact", "exact", window_history=False) as store:
        kept = [block for layer, block in records_of(store, "chat") if layer == 1]
        num_blocks = (len(TOKENS) - RECENT) // PAGE
        assert 0 < len(kept) < num_blocks
        report = transcode(store.pages, "chat", keys="prod4", values="int8", to="packed")
        assert [block for layer, block in records_of(store, "packed") if layer == 1] == kept
        assert report.num_pages == 2 * num_blocks + len(kept)
        cache = store.resume("packed").cache
        assert cache.attend(1, mx.ones((2, 1, 64))).shape == (2, 1, 64)


def test_in_place_the_checkpoint_before_stays(store_dir):
    with saved(store_dir, "exact", "exact") as store:
        transcode(store.pages, "chat", keys="prod4")
        assert [info.name for info in store.sessions()] == ["chat"]
        assert store.sessions()[0].sequence == 2
        assert len(list(store_dir.glob("sessions/*/*.ckpt"))) == 2
        transcode(store.pages, "chat", keys="exact")  # back, as far as that goes
        assert store.sessions()[0].sequence == 3


def test_a_session_shorter_than_a_block(store_dir):
    with Store.open(store_dir) as store:
        cache = store.new_cache(spec("exact", "exact"), model=MODEL)
        for layer in range(3):
            cache.append(layer, *inputs(layer, 5))
        store.save("chat", cache, TOKENS[:5])
        report = transcode(store.pages, "chat", keys="prod4", values="int8")
        assert (report.num_pages, report.keys.worst_error) == (0, None)
        again = store.resume("chat").cache
        assert mx.array_equal(again.get_keys(0), inputs(0, 5)[0])


def test_progress_is_told(store_dir):
    told = []
    with saved(store_dir, "exact", "exact") as store:
        report = transcode(
            store.pages, "chat", keys="int8", on_pages=lambda *counts: told.append(counts)
        )
    assert told == sorted(told)
    assert told[-1] == (report.num_pages, report.num_pages)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, InvalidInput, "no codec"),
        ({"keys": "exact"}, InvalidInput, "already.* For a copy, resume it and save"),
        ({"keys": "best"}, InvalidInput, "unknown codec"),
        ({"keys": "int8+out64"}, InvalidInput, "channels apart"),
        ({"keys": "int8", "to": "other"}, AlreadyExists, "other"),
        ({"keys": "int8", "to": "chat"}, AlreadyExists, "chat"),
        ({"keys": "int8", "to": "../up"}, InvalidInput, "cannot name"),
        ({"name": "nobody", "keys": "int8"}, NotFound, "nobody"),
    ],
)
def test_what_cannot_be_done_changes_nothing(store_dir, given, error, said):
    with saved(store_dir, "exact", "exact") as store:
        store.save("other", store.new_cache(spec("exact", "exact"), model=MODEL), [])
        before = sorted(store_dir.rglob("*"))
        name = given.get("name", "chat")
        rest = {key: value for key, value in given.items() if key != "name"}
        with pytest.raises(error, match=said):
            transcode(store.pages, name, **rest)
        assert sorted(store_dir.rglob("*")) == before


def test_a_missing_page_is_not_found(store_dir, expected_findings):
    with saved(store_dir, "exact", "exact") as store:
        packs = sorted(store_dir.glob("ns/*/pages/*/c.*"))
    packs[0].unlink()
    expected_findings.add("reference")
    with Store.open(store_dir) as store, pytest.raises(NotFound, match="missing"):
        transcode(store.pages, "chat", keys="int8")


@pytest.mark.parametrize("to", [None, "other"])
def test_a_session_saved_meanwhile_wins(store_dir, to):
    with saved(store_dir, "exact", "exact") as store, Store.open(store_dir) as another:

        def save(*_: int) -> None:
            cache = another.new_cache(spec("exact", "exact"), model=MODEL)
            another.save("chat" if to is None else to, cache, [])

        with pytest.raises(Conflict, match="meanwhile"):
            transcode(store.pages, "chat", keys="int8", to=to, on_pages=save)
        assert store.resume("chat" if to is None else to).num_tokens == 0


def test_stopped_half_way_nothing_was_published(store_dir):
    """Ctrl-C after the first pack: the session is as it was, and the next attempt succeeds."""

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with saved(store_dir, "exact", "exact") as store:
        with pytest.raises(KeyboardInterrupt):
            store.convert("chat", keys="prod4", on_pages=stop)
        assert store.sessions()[0].sequence == 1
        assert str(store.resume("chat").cache.spec.page_specs[0].keys) == "exact"
        report = store.convert("chat", keys="prod4")
        assert store.sessions()[0].sequence == report.sequence == 2
        assert len(bodies(store, "chat")) == report.num_pages


def test_neither_packs_nor_runs_make_a_difference(store_dir, twin, monkeypatch):
    codecs = {"keys": "mse4+mean+out8", "values": "uni4"}
    with saved(twin, "exact", "exact") as store:
        store.convert("chat", **codecs)
        at_once = bodies(store, "chat")
    monkeypatch.setattr("tqstore.transcode.TRANSIENT_NBYTES", 1)
    monkeypatch.setattr("tqstore.store.namespace_store.NamespaceStore.pack_pages", lambda *_: 6)
    told = []
    with saved(store_dir, "exact", "exact") as store:
        store.convert("chat", **codecs, on_pages=lambda *counts: told.append(counts))
        assert bodies(store, "chat") == at_once
    assert len(told) > 4


def test_a_converted_session_has_no_counters_of_a_pool(store_dir: Path) -> None:
    with saved(store_dir, "exact", "exact") as store:
        assert store.pages.latest("chat").paging
        store.convert("chat", keys="uni4", to="other")
        assert store.pages.latest("other").paging == {}
