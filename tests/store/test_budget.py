"""One budget for the whole store, on every way in, and what makes room when it is reached."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from tests.store.synthetic import NAMESPACE, SPEC, chain, check_readable, packs, page_spec, save
from tests.store.test_gc import HOUR_NS, age, nbytes_of
from tqstore.errors import InvalidInput, StoreFull
from tqstore.format.namespace import Namespace
from tqstore.store.budget import LOW_WATERMARK
from tqstore.store.page_store import PageStore
from tqstore.store.usage import Usage

SPAWN = multiprocessing.get_context("spawn")


def fill(path: Path, names: list[str], **options: int) -> int:
    """Sessions of four blocks each; bytes of the store afterwards."""
    with PageStore.open(path, **options) as store:  # type: ignore[arg-type]
        for number, name in enumerate(names):
            save(store, name, chain(4, number))
    return nbytes_of(path)


def cost_of_one(tmp_path: Path) -> int:
    return fill(tmp_path / "one", ["a", "b"]) - nbytes_of_first(tmp_path)


def nbytes_of_first(tmp_path: Path) -> int:
    return fill(tmp_path / "first", ["a"])


def test_promise_7_nothing_is_written_beyond_the_budget(store_dir: Path, tmp_path: Path) -> None:
    one, first = cost_of_one(tmp_path), nbytes_of_first(tmp_path)
    with PageStore.open(store_dir, max_bytes=first + one) as store:
        save(store, "a", chain(4, 0))
        save(store, "b", chain(4, 1))
        with pytest.raises(StoreFull, match="max_bytes"):
            save(store, "c", chain(4, 2))
        assert nbytes_of(store_dir) <= first + one
        check_readable(store, "a", chain(4, 0), 4)
        check_readable(store, "b", chain(4, 1), 4)
        assert {info.name for info in store.sessions()} == {"a", "b"}


def test_garbage_makes_room_and_sessions_without_end_stay(store_dir: Path, tmp_path: Path) -> None:
    first, one = nbytes_of_first(tmp_path), cost_of_one(tmp_path)
    budget = first + 3 * one + 2000
    with PageStore.open(store_dir, max_bytes=budget) as store:
        save(store, "kept", chain(4, 0))
        for number in range(1, 9):
            save(store, "turn", chain(4, number))
            store.remove("turn")
            age(packs(store_dir)[1:], 3600)
            assert nbytes_of(store_dir) <= budget
        check_readable(store, "kept", chain(4, 0), 4)
        assert store.counters.nbytes_evicted > 0
        left = nbytes_of(store_dir)
        assert left <= budget
        save(store, "last", chain(4, 9))
        check_readable(store, "last", chain(4, 9), 4)


def test_eviction_goes_down_to_the_low_watermark(store_dir: Path, tmp_path: Path) -> None:
    first, one = nbytes_of_first(tmp_path), cost_of_one(tmp_path)
    fill(store_dir, [str(n) for n in range(20)])
    with PageStore.open(store_dir) as store:
        for n in range(1, 20):
            store.remove(str(n))
    age(packs(store_dir), 3600)
    used = nbytes_of(store_dir)
    budget = used - 1
    with PageStore.open(store_dir, max_bytes=budget) as store:
        left = nbytes_of(store_dir)
        assert left <= LOW_WATERMARK * budget + 1000, "it holds at open"
        assert left > LOW_WATERMARK * budget - 2 * one, "and no more goes than must"
        assert first < left
        check_readable(store, "0", chain(4, 0), 4)


def test_the_longest_unused_goes_first(store_dir: Path, tmp_path: Path) -> None:
    first = nbytes_of_first(tmp_path)
    assert first
    fill(store_dir, ["a", "b", "c"])
    files = packs(store_dir)
    with PageStore.open(store_dir) as store:
        for name in "abc":
            store.remove(name)
    for file, hours in zip(files, (2, 3, 1), strict=True):
        age([file], hours * 3600)
    with PageStore.open(store_dir, max_bytes=nbytes_of(store_dir) - 1):
        pass
    assert packs(store_dir) == [files[0], files[2]]


def test_of_sessions_at_their_end_the_longest_unused_goes_first(store_dir: Path) -> None:
    past = time.time_ns() - HOUR_NS
    with PageStore.open(store_dir) as store:
        for number, name in enumerate("abc"):
            save(store, name, chain(4, number))
            with store.commit() as commit:
                commit.publish(name, chain(4, number).checkpoint(4, expires_ns=past))
        save(store, "kept", chain(4, 3))
    age(packs(store_dir), 3600)
    for hours, name in enumerate("cab"):
        age(sorted(store_dir.glob(f"sessions/{name}-*/*")), 7200 - hours * 60)
    with PageStore.open(store_dir, max_bytes=nbytes_of(store_dir) - 1) as store:
        assert {info.name for info in store.sessions()} == {"a", "b", "kept"}
        check_readable(store, "kept", chain(4, 3), 4)
    with PageStore.open(store_dir, max_bytes=nbytes_of(store_dir) // 3) as store:
        assert {info.name for info in store.sessions()} == {"kept"}, "more than one, if need be"
        check_readable(store, "kept", chain(4, 3), 4)


def test_a_namespace_has_a_quota_of_its_own(store_dir: Path) -> None:
    other = Namespace.of("cd" * 8, [page_spec("uni4")])
    with PageStore.open(store_dir) as store:
        save(store, "a", chain(4, 0))
        own = nbytes_of(store_dir / "ns")
    with PageStore.open(store_dir, namespace_max_bytes=own + 100) as store:
        with pytest.raises(StoreFull, match="namespace's budget"):
            save(store, "b", chain(4, 1))
        save(store, "other", chain(1, 1, other))
        store.remove("a")
        age(packs(store_dir), 3600)
        save(store, "b", chain(4, 1))
        check_readable(store, "b", chain(4, 1), 4)
        check_readable(store, "other", chain(1, 1, other), 1)


def write_until_full(path: Path, number: int, budget: int) -> None:
    with PageStore.open(path, max_bytes=budget) as store:
        for turn in range(30):
            try:
                save(store, f"{number}-{turn}", chain(1, 100 * number + turn))
            except StoreFull:
                return
    raise AssertionError("the budget was never reached")


def test_writers_together_keep_to_the_budget(store_dir: Path, tmp_path: Path) -> None:
    first = nbytes_of_first(tmp_path)
    budget = 3 * first
    workers = [
        SPAWN.Process(target=write_until_full, args=(store_dir, i, budget)) for i in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert budget * 0.8 < nbytes_of(store_dir) <= budget


def test_usage_follows_other_writers_and_temporaries(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as other:
        usage = Usage(store.root)
        for number in range(4):
            save(other, str(number), chain(2, number))
            assert usage.total() == nbytes_of(store_dir)
        growing = packs(store_dir)[0].parent / ".tmp-1-ab"
        for nbytes in (10, 1000):
            growing.write_bytes(b"x" * nbytes)
            assert usage.total() == nbytes_of(store_dir)
        growing.unlink()
        other.remove("1")
        assert usage.total() == nbytes_of(store_dir)
        assert usage.below("ns", NAMESPACE.id.hex()) == nbytes_of(store_dir / "ns")
        assert usage.below("no", "where") == 0


def test_a_budget_below_one_is_refused(store_dir: Path) -> None:
    for options in ({"max_bytes": 0}, {"namespace_max_bytes": -1}):
        with pytest.raises(InvalidInput, match="at least 1"):
            PageStore.open(store_dir, **options)  # type: ignore[arg-type]
    assert SPEC.page_tokens
