"""Caches larger than their memory: budgets, spills, streaming, pins, failures."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.dense_attention import dense_attention, to_float64
from tests.test_kv_cache import fill, key_values, spec_of
from tests.test_session import MODEL, same_contents
from tqstore.errors import (
    BackendFailed,
    Corrupt,
    InvalidInput,
    NotFound,
    PoolExhausted,
    StoreFull,
)
from tqstore.kv_cache import KVCache
from tqstore.session import Store
from tqstore.store.gc_plan import GcOptions

TOKENS = np.arange(5000)
PAGE = spec_of().page_specs[0].page_nbytes
EXACT = spec_of(keys="exact", values="exact")
EXACT_PAGE = EXACT.page_specs[0].page_nbytes


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    with Store.open(store_dir) as opened:
        yield opened


def within(cache: KVCache, budget: int) -> None:
    assert cache.pager.pool.used_nbytes <= budget
    assert cache.pager.pool.allocated_nbytes <= budget
    cache.check()


@pytest.mark.parametrize("pages", [2, 3, 7, 16])
@pytest.mark.parametrize("step", [1, 40, 400])
def test_a_sequence_many_times_its_budget_attends_as_if_all_were_hot(
    store: Store, pages: int, step: int
) -> None:
    budget = pages * PAGE
    whole = fill(KVCache(spec_of()), *key_values(400))
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=budget)
    cache.tell(TOKENS[:400])
    for first in range(0, 400, step):
        fill(cache, *[array[:, first : first + step] for array in key_values(400)])
        within(cache, budget)
    queries = mx.random.normal((4, 3, 64))
    for layer in range(2):
        assert mx.array_equal(cache.attend(layer, queries), whole.attend(layer, queries))
    assert same_contents(cache, whole)
    within(cache, budget)
    stats = cache.stats.paging
    assert stats["spilled_pages"] > 0
    assert stats["evicted_pages"] > 0
    assert stats["streamed_pages"] > 0
    assert stats["streamed_nbytes"] == stats["streamed_pages"] * PAGE
    store.save("chat", cache, TOKENS[:400])
    assert same_contents(store.resume("chat", memory_budget=budget).cache, whole)


def test_without_a_store_or_without_tokens_a_full_pool_says_what_to_do(store: Store) -> None:
    cache = KVCache(spec_of(), memory_budget=4 * PAGE)
    with pytest.raises(PoolExhausted, match="memory_budget"):
        fill(cache, *key_values(400), step=8)
    assert all(len(layer.table) <= 4 for layer in cache.layers)
    cache.check()
    stored = store.new_cache(spec_of(), model=MODEL, memory_budget=4 * PAGE)
    with pytest.raises(PoolExhausted, match="tell it its tokens"):
        fill(stored, *key_values(400), step=8)
    # Nothing was lost: told its tokens, the very same cache goes on.
    held = stored.layers[1].num_tokens
    stored.tell(TOKENS[:400])
    if stored.layers[0].num_tokens > held:
        stored.trim_layer(0, stored.layers[0].num_tokens - held)
    rest = [array[:, held:] for array in key_values(400)]
    stored.tell(TOKENS[:400])
    fill(stored, *rest, step=8)
    assert same_contents(stored, fill(KVCache(spec_of()), *key_values(400)))


@pytest.mark.parametrize("budget", [1, PAGE - 1])
def test_a_budget_below_one_page_is_refused_at_once(store: Store, budget: int) -> None:
    with pytest.raises(InvalidInput, match="less than one page"):
        KVCache(spec_of(), memory_budget=budget)
    with pytest.raises(InvalidInput, match="less than one page"):
        store.new_cache(spec_of(), model=MODEL, memory_budget=budget)


def test_pinned_pages_stay_and_too_many_pins_say_so(store: Store) -> None:
    budget = 8 * PAGE
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=budget)
    cache.tell(TOKENS)
    fill(cache, *key_values(56), step=8)  # three blocks of two layers
    cache.pin()
    pinned = [layer.table.refs() for layer in cache.layers]
    fill(cache, *key_values(200, seed=1), step=8)
    for layer, refs in zip(cache.layers, pinned, strict=True):
        assert (cache.pager.pool.arenas[layer.layer].resolve(refs) >= 0).all()
    other = store.new_cache(spec_of(), model=MODEL, memory_budget=budget)
    assert other.pager is cache.pager
    other.tell(TOKENS + 1)
    fill(other, *key_values(40, seed=2), step=8)
    other.pin()
    with pytest.raises(PoolExhausted, match="pinned"):
        fill(other, *key_values(100, seed=3), step=8)
    other.unpin()
    cache.unpin()
    held = min(layer.num_tokens for layer in other.layers)
    for index, layer in enumerate(other.layers):
        other.trim_layer(index, layer.num_tokens - held)
    other.tell(TOKENS + 1)
    fill(other, *key_values(100, seed=4), step=8)
    within(other, budget)


def test_pins_go_with_the_cache_that_made_them(store: Store) -> None:
    parent = store.new_cache(spec_of(), model=MODEL, memory_budget=8 * PAGE)
    parent.tell(TOKENS)
    fill(parent, *key_values(56), step=8)
    parent.pin()
    fork = parent.fork()
    fork.pin()
    parent.pin()
    del parent
    gc.collect()
    fork.pager.reap()
    fork.check()
    pins = [arena.num_pins[:3].tolist() for arena in fork.pager.pool.arenas]
    assert pins == [[1, 1, 1], [1, 1, 1]], "the fork's own"
    fork.unpin()
    assert not any(arena.num_pins.any() for arena in fork.pager.pool.arenas)
    fill(fork, *key_values(300, seed=1), step=8)
    within(fork, 8 * PAGE)


@pytest.mark.parametrize("sinks", [5, 32])
def test_pages_of_sinks_stay_in_memory_while_the_window_moves_on(store: Store, sinks: int) -> None:
    spec = spec_of(window=64, sink_tokens=sinks)
    cache = store.new_cache(spec, model=MODEL, memory_budget=10 * PAGE)
    cache.tell(TOKENS)
    keys, values = key_values(300)
    num_sinks = -(-sinks // 16)
    for first in range(0, 300, 4):
        fill(cache, keys[:, first : first + 4], values[:, first : first + 4])
        for layer in cache.layers:
            cache.attend(layer.layer, mx.zeros((2, 1, 64)))
            hot = cache.pager.pool.arenas[layer.layer].resolve(layer.table.refs()) >= 0
            assert hot[:num_sinks].all()
    assert cache.stats.paging["evicted_pages"] > 0
    store.save("chat", cache, TOKENS[:300])
    del cache, layer
    gc.collect()
    cache = store.resume("chat", memory_budget=10 * PAGE).cache
    cache.tell(np.concatenate([TOKENS[:300], TOKENS]))
    cache.restore()
    for first in range(0, 300, 4):
        fill(cache, keys[:, first : first + 4], values[:, first : first + 4])
        for layer in cache.layers:
            hot = cache.pager.pool.arenas[layer.layer].resolve(layer.table.refs()) >= 0
            assert hot[:num_sinks].all(), "restored ones stay too, though nobody reads them"


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_a_step_that_was_taken_back_half_way_can_be_saved(store: Store, codec: str) -> None:
    spec = spec_of(keys=codec, values=codec)
    cache = store.new_cache(spec, model=MODEL)
    fill(cache, *key_values(32))
    keys, values = key_values(16, seed=1)
    cache.append(0, keys, values)
    cache.trim_layer(0, 16)
    assert [len(layer.table) for layer in cache.layers] == [2, 1]
    store.save("chat", cache, TOKENS[:32])
    resumed = store.resume("chat").cache
    assert same_contents(resumed, cache)
    for each in (cache, resumed):
        fill(each, keys, values)
    assert codec == "int8" or same_contents(resumed, cache)
    store.save("chat", resumed, TOKENS[:48])


def test_a_failed_spill_is_reported_and_the_pages_stay_hot(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        store.save("empty", store.new_cache(spec_of(), model=MODEL), [])
    with Store.open(store_dir, max_bytes=120_000) as full:
        cache = full.new_cache(EXACT, model=MODEL, memory_budget=12 * EXACT_PAGE)
        cache.tell(TOKENS)
        with pytest.raises(PoolExhausted, match=r"could not be written out.*max_bytes"):
            fill(cache, *key_values(4000), step=8)
        assert cache.stats.paging["failed_spills"] >= 1
        held = min(layer.num_tokens for layer in cache.layers)
        for index, layer in enumerate(cache.layers):
            cache.trim_layer(index, layer.num_tokens - held)
        whole = fill(KVCache(EXACT), *[array[:, :held] for array in key_values(4000)])
        assert same_contents(cache, whole)
        cache.check()


def test_a_pack_that_vanishes_or_rots_is_a_clear_error(
    store: Store, expected_findings: set[str]
) -> None:
    expected_findings |= {"page", "reference", "checkpoint", "pack", "index", "block"}
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=4 * PAGE)
    cache.tell(TOKENS)
    fill(cache, *key_values(400), step=8)
    store.save("chat", cache, TOKENS[:400])
    packs = sorted(store.path.glob("ns/*/pages/*/c.*"))
    packs[0].unlink()
    data = bytearray(packs[1].read_bytes())
    data[len(data) // 2] ^= 1
    packs[1].write_bytes(data)
    with Store.open(store.path) as other:
        resumed = other.resume("chat", memory_budget=4 * PAGE)
        assert resumed.num_tokens < 400
    with pytest.raises((NotFound, Corrupt)):
        _ = [cache.get_keys(layer) for layer in range(2)]
    assert cache.num_tokens == 400
    cache.check()


def test_forks_outlive_their_parent_under_a_budget(store: Store) -> None:
    budget = 6 * PAGE
    parent = store.new_cache(spec_of(), model=MODEL, memory_budget=budget)
    parent.tell(TOKENS)
    fill(parent, *key_values(200), step=8)
    forks = [parent.fork() for _ in range(5)]
    del parent
    gc.collect()
    for number, fork in enumerate(forks):
        fork.tell(np.concatenate([TOKENS[:200], TOKENS[:100] + number]))
        fill(fork, *key_values(100, seed=number), step=20)
        within(fork, budget)
    for number, fork in enumerate(forks):
        whole = fill(KVCache(spec_of()), *key_values(200))
        fill(whole, *key_values(100, seed=number))
        assert same_contents(fork, whole)


def test_window_history_is_kept_or_not_as_asked(store: Store) -> None:
    spec = spec_of(window=40)
    kept = store.new_cache(spec, model=MODEL)
    dropped = store.new_cache(replace(spec, window_history=False), model="cd" * 32)
    for cache in (kept, dropped):
        cache.tell(TOKENS)
        fill(cache, *key_values(400), step=10)
    assert dropped.pager.pool.used_nbytes < kept.pager.pool.used_nbytes / 3
    store.save("kept", kept, TOKENS[:400])
    report = store.save("dropped", dropped, TOKENS[:400])
    assert report.new_pages <= 2 * (40 // 16 + 4)
    queries = mx.random.normal((4, 1, 64))
    resumed = store.resume("dropped")
    assert resumed.num_tokens == 400
    assert mx.array_equal(resumed.cache.attend(0, queries), kept.attend(0, queries))
    assert kept.can_trim(200)
    assert not resumed.cache.can_trim(200)
    assert not resumed.cache.spec.window_history  # as it was saved, without being told again
    assert store.resume("kept").cache.spec.window_history


@pytest.mark.parametrize("sink_tokens", [0, 20])
def test_without_history_a_save_writes_what_a_resume_needs(store: Store, sink_tokens: int) -> None:
    spec = replace(spec_of(window=40, sink_tokens=sink_tokens), window_history=False)
    cache = fill(store.new_cache(spec, model=MODEL), *key_values(400))  # one chunk
    sinks = -(-sink_tokens // 16)
    assert store.save("chat", cache, TOKENS[:400]).new_pages == 2 * (-(-40 // 16) + 1 + sinks)
    resumed = store.resume("chat")
    assert (resumed.num_tokens, resumed.lost_tokens) == (400, 0)
    queries = mx.random.normal((4, 1, 64))
    assert mx.array_equal(resumed.cache.attend(0, queries), cache.attend(0, queries))


def test_without_history_a_cache_goes_back_a_little_and_to_its_saves(store: Store) -> None:
    spec = replace(spec_of(window=40), window_history=False)
    cache = fill(store.new_cache(spec, model=MODEL), *key_values(300))
    store.save("chat", cache, TOKENS[:300])
    fill(cache, *key_values(200, seed=1), step=50)
    store.save("chat", cache, TOKENS[:500])
    end = (300 - spec.recent_tokens) // 16 * 16  # of the pages of the first save
    for length in (end, *range(492, 501)):
        assert cache.can_trim(500 - length), length
    for length in (end - 1, end + 1, 300, 400):
        assert not cache.can_trim(500 - length), length
    with pytest.raises(NotFound, match="window_history=True"):
        cache.trim(100)
    found = store.match(TOKENS[:400], spec=spec, model=MODEL)
    assert found.num_tokens == end
    cache.trim(500 - end)
    assert cache.attend(0, mx.random.normal((4, 1, 64))).shape == (4, 1, 64)


def test_what_to_do_where_the_window_was_left_for_good(store: Store) -> None:
    alone = fill(KVCache(spec_of(window=40)), *key_values(400), step=10)
    with pytest.raises(NotFound, match=r"store\.new_cache and save it"):
        alone.trim(200)
    cache = fill(store.new_cache(spec_of(window=40), model=MODEL), *key_values(400), step=10)
    store.save("chat", cache, TOKENS[:400])
    store.gc(GcOptions(grace_seconds=0, compact_at=0.1, keeps_history=False))
    with Store.open(store.path) as other, pytest.raises(NotFound, match="feed these tokens anew"):
        other.resume("chat").cache.trim(200)


@pytest.mark.parametrize("window", [1, 20, 40])
@pytest.mark.parametrize("tokens", [100, 112, 121])
def test_whatever_trim_is_allowed_without_history_can_be_saved(
    store: Store, window: int, tokens: int
) -> None:
    spec = replace(spec_of(window=window), window_history=False)
    allowed = []
    for count in range(60):
        cache = store.new_cache(spec, model=MODEL)
        cache.tell(TOKENS)
        fill(cache, *key_values(tokens), step=5)
        if not cache.can_trim(count):
            with pytest.raises(NotFound, match="left the window"):
                cache.trim(count)
            assert cache.num_tokens == tokens
            continue
        allowed.append(count)
        cache.trim(count)
        name = f"{count}"
        store.save(name, cache, TOKENS[: tokens - count])
        assert store.resume(name).num_tokens == tokens - count
    assert set(range(spec.recent_tokens + 1)) <= set(allowed)
    assert len(allowed) < 60


def test_stats_show_what_window_history_costs(store: Store) -> None:
    cache = store.new_cache(spec_of(window=40), model=MODEL)
    cache.tell(TOKENS)
    fill(cache, *key_values(400), step=10)
    left = (401 - 40) // 16  # blocks that end before the window of the next token, 361..400
    expected = left * len(cache.layers) * PAGE
    assert (cache.stats.history_nbytes, cache.stats.hot_history_nbytes) == (expected, expected)
    store.save("chat", cache, TOKENS[:400])
    assert cache.stats.history_nbytes == expected
    assert cache.stats.hot_history_nbytes < 8 * PAGE  # what a trim may still reach
    on_disk = store.stats().history_nbytes
    assert expected - 4 * PAGE <= on_disk <= 1.05 * expected  # with padding
    report = store.gc(GcOptions(grace_seconds=0, compact_at=0.1, keeps_history=False))
    assert on_disk <= report.freed_nbytes <= 1.1 * on_disk  # headers and indexes too
    assert store.stats().history_nbytes == 0
    assert store.resume("chat").num_tokens == 400


def test_spilling_happens_on_its_own_thread_and_arrays_stay_on_ours(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqstore.store.page_store import Commit

    threads = []
    add_pages = Commit.add_pages

    def noting(self: Commit, *args: object) -> object:
        threads.append(threading.current_thread().name)
        return add_pages(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Commit, "add_pages", noting)
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=4 * PAGE)
    cache.tell(TOKENS)
    fill(cache, *key_values(300), step=8)
    cache.flush()
    assert threads
    assert set(threads) == {"tqstore-spill"}


def test_a_thousand_forks_cost_tables_and_tails_only() -> None:
    cache = fill(KVCache(spec_of()), *key_values(2000))
    used = cache.pager.pool.allocated_nbytes
    forks = [cache.fork() for _ in range(1000)]
    assert cache.pager.pool.allocated_nbytes == used
    assert all(fork.layers[0].tail.keys is cache.layers[0].tail.keys for fork in forks)
    assert forks[0].stats.table_nbytes == 2 * 8 * cache.num_sealed_blocks
    assert forks[999].attend(0, mx.zeros((2, 1, 64))).shape == (2, 1, 64)


def test_attention_over_a_streamed_sequence_is_right_against_float64(store: Store) -> None:
    spec = spec_of(keys="exact", values="exact", dtype="float32")
    keys, values = key_values(500, dtype=mx.float32)
    budget = 3 * spec.page_specs[0].page_nbytes
    cache = store.new_cache(spec, model=MODEL, memory_budget=budget)
    cache.tell(TOKENS[:500])
    fill(cache, keys, values, step=50)
    queries = mx.random.normal((4, 20, 64))
    expected = dense_attention(to_float64(queries), to_float64(keys), to_float64(values))
    assert np.abs(to_float64(cache.attend(1, queries)) - expected).max() < 1e-5


def test_closing_waits_for_what_is_being_written(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        cache = store.new_cache(spec_of(), model=MODEL, memory_budget=4 * PAGE)
        cache.tell(TOKENS[:200])
        fill(cache, *key_values(200), step=8)
    stats = cache.stats.paging
    assert stats["spilled_pages"] >= stats["sealed_pages"] - 4
    names = cache.chain.hashes_of(np.arange(len(cache.chain)))
    with Store.open(store_dir) as store:
        pages = store.pages.namespace(store.namespace(spec_of(), MODEL))
        spec = spec_of().page_specs[0]
        stored = [
            (layer, name)
            for layer in range(2)
            for name in names
            if pages.locate(spec, layer, name) is not None
        ]
    assert len(stored) == stats["spilled_pages"]


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """While this list is not empty, background writes fail with its error."""
    from tqstore.store.page_store import Commit

    errors: list[Exception] = []
    add_pages = Commit.add_pages

    def failing(self: Commit, *args: object) -> object:
        if errors and threading.current_thread().name == "tqstore-spill":
            raise errors[0]
        return add_pages(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Commit, "add_pages", failing)
    return errors


def overfull(store: Store) -> KVCache:
    """A cache with a saved session of 100 tokens and 100 more, some of them on their way out."""
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=24 * PAGE)
    cache.tell(TOKENS[:200])
    keys, values = key_values(200)
    fill(cache, keys[:, :100], values[:, :100])
    store.save("chat", cache, TOKENS[:100])
    cache.tell(TOKENS[:200])
    return fill(cache, keys[:, 100:], values[:, 100:], step=8)


@pytest.mark.parametrize("error", [BackendFailed("the disk is away"), StoreFull("no room")])
def test_closing_says_what_could_not_be_written(
    store_dir: Path, breaking: list[Exception], error: Exception
) -> None:
    breaking.append(error)
    store = Store.open(store_dir)
    cache = overfull(store)
    lost = sum(len(layer.table) for layer in cache.layers) - 2 * ((100 - 8) // 16)
    with pytest.raises(type(error), match=rf"{error}.*{lost} sealed pages.*saved is whole") as told:
        store.close()
    assert told.value.__cause__ is error
    assert cache.stats.paging["failed_spills"] > 0
    store.close()  # said once; and it is closed
    breaking.clear()
    with Store.open(store_dir) as again:
        resumed = again.resume("chat")
        assert (resumed.num_tokens, resumed.lost_tokens) == (100, 0)


def test_closing_does_not_hide_what_ended_the_block(
    store_dir: Path, breaking: list[Exception]
) -> None:
    breaking.append(BackendFailed("the disk is away"))

    def ended_by_an_error() -> None:
        with Store.open(store_dir) as store:
            cache = overfull(store)
            raise KeyError(f"mine, at {cache.num_tokens}")

    with pytest.raises(KeyError, match="mine, at 200") as told:
        ended_by_an_error()
    assert "the disk is away" in told.value.__notes__[0]


def test_closing_says_nothing_where_nothing_is_lost(
    store_dir: Path, breaking: list[Exception]
) -> None:
    breaking.append(BackendFailed("the disk is away"))
    with Store.open(store_dir) as store:
        cache = overfull(store)
        cache.pager.spilling.drain()
        failed = cache.stats.paging["failed_spills"]
        assert failed > 0
        store.save("chat", cache, TOKENS[:200])  # writes them itself
        other = store.new_cache(spec_of(), model=MODEL, memory_budget=24 * PAGE)
        assert other.pager is cache.pager
        cache.trim(60)
        cache.tell(TOKENS[1000:1100], cache.num_tokens)
        fill(cache, *key_values(100, seed=1), step=8)
        cache.pager.spilling.drain()
        assert cache.stats.paging["failed_spills"] > failed
        assert cache.pager.spilling.num_unsaved > 0
        del cache  # no one has the pages any more
        gc.collect()


def test_closing_writes_nothing_that_was_not_on_its_way(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        cache = store.new_cache(spec_of(), model=MODEL)
        cache.tell(TOKENS[:200])
        fill(cache, *key_values(200))
    with Store.open(store_dir) as store:
        assert store.match(TOKENS[:200], spec=spec_of(), model=MODEL).num_tokens == 0


def test_saving_in_the_middle_keeps_tokens_that_were_told_ahead(store: Store) -> None:
    cache = store.new_cache(spec_of(), model=MODEL, memory_budget=8 * PAGE)
    cache.tell(TOKENS[:600])
    keys, values = key_values(600)
    fill(cache, keys[:, :300], values[:, :300], step=20)
    store.save("chat", cache, TOKENS[:300])
    fill(cache, keys[:, 300:], values[:, 300:], step=20)  # PoolExhausted if they were forgotten
    assert cache.num_told == 600
    assert store.save("chat", cache, TOKENS[:600]).num_tokens == 600
