"""Pages written in the background: before they must be, in whole batches, within a bound."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.test_kv_cache import fill, key_values, spec_of
from tests.test_session import MODEL, same_contents
from tqstore.errors import BackendFailed, PoolExhausted
from tqstore.kv_cache import KVCache
from tqstore.paging.spiller import MAX_PENDING_SPILLS, Payload, Spill, Spiller
from tqstore.session import Store
from tqstore.store.background import Background
from tqstore.store.page_store import Commit

TOKENS = np.arange(5000)
SPEC = spec_of(keys="exact", values="exact")
PAGE = SPEC.page_specs[0].page_nbytes
PAGE_TOKENS, RECENT = SPEC.page_tokens, SPEC.recent_tokens


@dataclass
class Disk:
    """What the writer thread does, step by step: each write needs a permit.

    `wait_for_ever` is how long a test that hangs takes to fail.
    """

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits: int = 0  # times the owner had to wait, each of which gave one permit
    batches: list[int] = field(default_factory=list)  # pages of each write, as begun
    layers: list[set[int]] = field(default_factory=list)
    alive: list[weakref.ref[np.ndarray]] = field(default_factory=list)
    most_nbytes: int = 0  # of payloads alive at one time
    most_pending: int = 0
    broken: Exception | None = None

    wait_for_ever = 120.0

    def allow_all(self) -> None:
        self.permits.release(1 << 20)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    add_pages, submit, outcomes = Commit.add_pages, Spiller.submit, Spiller.outcomes

    def adding(self: Commit, *args: object) -> object:
        if threading.current_thread().name == "tqstore-spill":
            assert made.permits.acquire(timeout=made.wait_for_ever), "the owner hangs"
            if made.broken is not None:
                raise made.broken
        return add_pages(self, *args)  # type: ignore[arg-type]

    def submitting(self: Spiller, spill: Spill, payload: Payload) -> None:
        submit(self, spill, payload)
        made.batches.append(len(spill.keys))
        made.layers.append(set(spill.refs))
        made.alive.append(weakref.ref(payload.records))
        gc.collect()  # the first write meets a missing folder, and what it raised is a cycle
        living = [records for ref in made.alive if (records := ref()) is not None]
        made.most_nbytes = max(made.most_nbytes, sum(records.nbytes for records in living))
        made.most_pending = max(made.most_pending, len(self.pending))

    def taking(self: Spiller, *, wait: bool) -> object:
        if wait and self.pending:  # nothing can have ended: only this gives permits
            made.waits += 1
            made.permits.release()
        return outcomes(self, wait=wait)

    monkeypatch.setattr(Commit, "add_pages", adding)
    monkeypatch.setattr(Spiller, "submit", submitting)
    monkeypatch.setattr(Spiller, "outcomes", taking)
    return made


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    with Store.open(store_dir) as opened:
        yield opened


def cache_of(store: Store, pages: int, spec: object = SPEC) -> KVCache:
    cache = store.new_cache(spec, model=MODEL, memory_budget=pages * PAGE)  # type: ignore[arg-type]
    cache.tell(TOKENS)
    return cache


def tokens_for(blocks: int) -> int:
    return blocks * PAGE_TOKENS + RECENT


@pytest.mark.parametrize("step", [1, 7, PAGE_TOKENS])
def test_appends_that_have_room_do_not_wait_while_pages_are_written(
    store: Store, disk: Disk, step: int
) -> None:
    cache = cache_of(store, 64)
    fill(cache, *key_values(tokens_for(32)), step=step)  # no write can end
    stats = cache.stats
    assert stats.used_nbytes == stats.budget_nbytes
    assert (stats.paging["spilled_pages"], stats.paging["spill_waits"], disk.waits) == (0, 0, 0)
    assert len(disk.batches) == MAX_PENDING_SPILLS
    disk.allow_all()
    cache.flush()
    before = cache.stats.paging["spill_waits"]
    fill(cache, *key_values(2 * PAGE_TOKENS, seed=1), step=PAGE_TOKENS)  # what is durable gives way
    assert cache.stats.paging["spill_waits"] == before
    assert cache.stats.paging["evicted_pages"] == 4


def test_nothing_is_written_below_the_mark_or_without_tokens(store: Store, disk: Disk) -> None:
    cache = cache_of(store, 64)
    fill(cache, *key_values(tokens_for(23)), step=PAGE_TOKENS)
    assert disk.batches == []
    untold = store.new_cache(SPEC, model="cd" * 32, memory_budget=64 * PAGE)
    fill(untold, *key_values(tokens_for(32)), step=PAGE_TOKENS)
    assert disk.batches == []


@pytest.mark.parametrize("pages", [2, 6, 32, 64])
@pytest.mark.parametrize("step", [8, 100, 1000])
def test_every_wait_is_counted_and_what_is_in_flight_is_bounded(
    store: Store, disk: Disk, pages: int, step: int
) -> None:
    cache = cache_of(store, pages)
    fill(cache, *key_values(1000), step=step)
    assert cache.stats.paging["spill_waits"] == disk.waits > 0
    bound = cache.pager.spilling.max_in_flight_nbytes
    assert disk.most_nbytes <= bound <= MAX_PENDING_SPILLS * max(PAGE, pages * PAGE // 8)
    assert disk.most_pending <= MAX_PENDING_SPILLS
    disk.allow_all()
    assert same_contents(cache, fill(KVCache(SPEC), *key_values(1000)))
    cache.check()


def test_packs_hold_whole_batches_of_all_layers(store: Store, disk: Disk) -> None:
    disk.allow_all()
    cache = cache_of(store, 64)
    fill(cache, *key_values(2000), step=8)
    cache.flush()
    assert set(disk.batches) == {8}
    assert disk.layers.count({0, 1}) > len(disk.layers) - 4
    stats = cache.stats.paging
    assert stats["spilled_pages"] == sum(disk.batches)
    assert stats["sealed_pages"] - stats["spilled_pages"] < 8  # a batch that is not whole yet
    packs = list(store.path.glob("ns/*/pages/*/c.*"))
    assert len(packs) == len(disk.batches)


def test_a_layer_that_is_filled_alone_is_written_ahead_too(store: Store, disk: Disk) -> None:
    spec = replace(SPEC, layers=SPEC.layers * 8)
    cache = cache_of(store, 16 * 16, spec)  # 16 pages a layer; a batch is 32
    keys, values = key_values(tokens_for(16))
    for first in range(0, tokens_for(16), PAGE_TOKENS):
        cache.append(
            0, keys[:, first : first + PAGE_TOKENS], values[:, first : first + PAGE_TOKENS]
        )
    assert disk.batches
    assert disk.waits == 0
    disk.allow_all()


@pytest.mark.parametrize("history", [True, False])
def test_pages_that_will_be_dropped_unwritten_are_not_written_ahead(
    store: Store, disk: Disk, history: bool
) -> None:
    disk.allow_all()
    windowed = spec_of(keys="exact", values="exact", window=100)
    cache = cache_of(store, 20, replace(windowed, window_history=history))  # just enough
    fill(cache, *key_values(1500), step=8)
    cache.flush()
    assert bool(disk.batches) == history
    assert cache.can_trim(1000) == history
    assert cache.stats.paging["expired_pages"] > 100  # history leaves memory once it is written


def test_a_write_that_fails_leaves_pages_hot_and_is_tried_again_when_room_is_needed(
    store: Store, disk: Disk
) -> None:
    disk.broken = BackendFailed("the disk is away")
    disk.allow_all()
    cache = cache_of(store, 64)
    keys, values = key_values(1000)
    room = tokens_for(32)
    fill(cache, keys[:, :room], values[:, :room], step=PAGE_TOKENS)
    with contextlib.suppress(BackendFailed):
        cache.flush()  # takes the error
    assert cache.stats.paging["failed_spills"] == len(disk.batches) > 0
    assert cache.stats.paging["spilled_pages"] == 0
    before = len(disk.batches)
    with pytest.raises(PoolExhausted, match="the disk is away"):
        fill(cache, keys[:, room : room + PAGE_TOKENS], values[:, room : room + PAGE_TOKENS])
    assert len(disk.batches) > before
    assert [layer.num_tokens for layer in cache.layers] == [room, room]
    cache.check()
    disk.broken = None
    fill(cache, keys[:, room:], values[:, room:], step=PAGE_TOKENS)
    assert same_contents(cache, fill(KVCache(SPEC), keys, values))


def test_a_failure_in_the_background_is_forgotten_if_the_next_write_succeeds(
    store: Store, disk: Disk
) -> None:
    disk.broken = BackendFailed("the disk is away")
    cache = cache_of(store, 64)
    keys, values = key_values(1000)
    room = tokens_for(32)
    fill(cache, keys[:, :room], values[:, :room], step=PAGE_TOKENS)
    disk.allow_all()
    cache.pager.spilling.drain()
    assert cache.stats.paging["failed_spills"] == MAX_PENDING_SPILLS
    fill(cache.fork(), *key_values(1, seed=2))  # an append that needs no room is none the wiser
    assert len(disk.batches) == MAX_PENDING_SPILLS
    disk.broken = None
    fill(cache, keys[:, room:], values[:, room:], step=PAGE_TOKENS)
    assert same_contents(cache, fill(KVCache(SPEC), keys, values))


@pytest.mark.parametrize("error", [None, BackendFailed("the disk is away")])
def test_a_payload_is_let_go_of_before_its_outcome_is_taken(error: Exception | None) -> None:
    def add_pages(*_: object) -> None:
        if error is not None:
            raise error

    commit = contextlib.nullcontext(SimpleNamespace(add_pages=add_pages))
    store = SimpleNamespace(commit=lambda: commit, background=Background())
    spiller = Spiller(SimpleNamespace(store=store))  # type: ignore[arg-type]
    payload = Payload([], np.zeros((4, 64), np.uint8))
    freed = threading.Event()
    weakref.finalize(payload.records, freed.set)
    spiller.submit(Spill(SPEC.page_specs[0], [], {}), payload)
    del payload
    assert freed.wait(Disk.wait_for_ever)
    assert [outcome.error for outcome in spiller.outcomes(wait=True)] == [error]


def test_closing_waits_for_pages_of_caches_that_are_gone(store_dir: Path, disk: Disk) -> None:
    store = Store.open(store_dir)
    cache = cache_of(store, 64)
    fill(cache, *key_values(tokens_for(32)), step=PAGE_TOKENS)
    assert len(disk.batches) == MAX_PENDING_SPILLS
    names = cache.chain.hashes_of(np.arange(len(cache.chain)))
    del cache
    gc.collect()
    closing = threading.Thread(target=store.close)
    closing.start()
    disk.allow_all()
    closing.join()
    with Store.open(store_dir, mode="r") as again:
        pages = again.pages.namespace(again.namespace(SPEC, MODEL))
        found = [
            pages.locate(SPEC.page_specs[0], layer, name) for layer in range(2) for name in names
        ]
    assert sum(location is not None for location in found) == sum(disk.batches)
