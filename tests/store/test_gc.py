"""Collecting garbage: what goes, what stays, and that nobody is hurt meanwhile.

The numbered promises are those of docs/concurrency.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import check_store
from tests.store.synthetic import (
    NAMESPACE,
    PAGE_TOKENS,
    SPEC,
    Chain,
    chain,
    check_readable,
    locations,
    packs,
    page_spec,
    read,
    save,
)
from tqstore.errors import Conflict, Incompatible, InvalidInput, NotFound
from tqstore.format.block_hash import chain_blocks
from tqstore.format.namespace import Namespace
from tqstore.store.eviction_order import Evictable, eviction_order
from tqstore.store.gc_plan import GcOptions, plan_gc
from tqstore.store.gc_sweep import GcReport, sweep
from tqstore.store.lock import exclusive_lock
from tqstore.store.page_store import PageStore

NOW = GcOptions(grace_seconds=0)
HOUR_NS = 3600 * 10**9


def collect(store: PageStore, options: GcOptions = NOW) -> GcReport:
    return sweep(store, plan_gc(store, options))


def grown(parent: Chain, num_blocks: int, seed: int) -> Chain:
    """`parent` and more blocks, of its namespace."""
    tokens = [t for block in parent.blocks for t in block.tokens.tolist()]
    tokens += [seed * 1000 + i for i in range(num_blocks * PAGE_TOKENS)]
    return replace(parent, blocks=chain_blocks(parent.namespace.id, tokens, PAGE_TOKENS))


def nbytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def age(files: Sequence[Path], seconds: float) -> None:
    when = time.time_ns() - int(seconds * 1e9)
    for file in files:
        os.utime(file, ns=(when, when))


def test_promise_5_what_no_checkpoint_needs_goes_and_nothing_else(store_dir: Path) -> None:
    kept, removed = chain(4, 1), chain(5, 2)
    with PageStore.open(store_dir) as store:
        save(store, "kept", kept)
        save(store, "removed", removed)
        assert plan_gc(store, NOW).is_empty
        store.remove("removed")
        plan = plan_gc(store, NOW)
        before = nbytes_of(store_dir)
        assert [pack.freed_nbytes for pack in plan.packs] == [packs(store_dir)[1].stat().st_size]
        assert nbytes_of(store_dir) == before, "a plan changes nothing"
        report = sweep(store, plan)
        assert (report.packs_deleted, report.skipped) == (1, [])
        gone = sum(file.stat().st_size for file in store_dir.glob("gone/*"))
        assert before - nbytes_of(store_dir) + gone + 8 == report.freed_nbytes
        check_readable(store, "kept", kept, 4)
        assert plan_gc(store, NOW).is_empty
        ns = store.namespace(NAMESPACE)
        assert ns.locate(SPEC, 0, removed.hashes[0]) is None


def test_promise_6_pages_used_within_the_grace_stay(store_dir: Path) -> None:
    demo = chain(3)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo)
        store.remove("demo")
        options = GcOptions(grace_seconds=60)
        assert plan_gc(store, options).is_empty
        age(packs(store_dir), 61)
        plan = plan_gc(store, options)
        assert len(plan.packs) == 1
        # Meanwhile a cache relies on them: its spill finds them stored.
        ns, keys = store.namespace(NAMESPACE), demo.keys(SPEC)
        with PageStore.open(store_dir) as other, other.commit() as commit:
            mine = other.namespace(NAMESPACE)
            commit.add_pages(mine, SPEC, demo.blocks, keys, demo.records(SPEC, keys))
        report = sweep(store, plan)
        assert report.packs_deleted == 0
        assert "used just now" in report.skipped[0]
        assert (read(ns, SPEC, keys) == demo.records(SPEC, keys)).all()
        uses = (
            lambda: ns.note_use(demo.hashes),  # a resume or a match
            lambda: read(ns, SPEC, keys[:1]),
        )
        for use in uses:
            age(packs(store_dir), 61)
            ns.index(SPEC)._touched.clear()
            assert not plan_gc(store, options).is_empty
            use()
            assert plan_gc(store, options).is_empty


def test_a_checkpoint_published_after_the_plan_keeps_its_pages(store_dir: Path) -> None:
    demo = chain(3)
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as other:
        save(store, "demo", demo)
        store.remove("demo")
        plan = plan_gc(store, NOW)
        save(other, "again", demo)
        report = sweep(store, plan)
        assert report.packs_deleted == 0
        assert report.skipped
        check_readable(other, "again", demo, 3)


def test_a_partly_needed_pack_is_compacted(store_dir: Path) -> None:
    long = chain(8)
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as reader:
        save(store, "long", long)
        save(store, "short", long, 0, 2)
        ns = reader.namespace(NAMESPACE)
        keys = long.keys(SPEC, 0, 2)
        before = locations(ns, SPEC, keys)
        store.remove("long")
        [doomed] = plan_gc(store, NOW).packs
        assert doomed.is_compacted
        assert plan_gc(store, replace(NOW, compact_at=0.8)).is_empty
        report = collect(store)
        assert (report.packs_compacted, report.pages_copied) == (1, 6)
        check_readable(store, "short", long, 2)
        # A reader that knew where they were finds them where they are.
        out = read(ns, SPEC, keys)
        assert (out == long.records(SPEC, keys)).all()
        assert before != locations(ns, SPEC, keys)
        save(reader, "long", long)  # what went is written again
        check_readable(store, "long", long, 8)


def test_a_reader_with_stale_places_is_served(store_dir: Path) -> None:
    long = chain(8)
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as reader:
        save(store, "long", long)
        save(store, "short", long, 0, 2)
        ns, keys = reader.namespace(NAMESPACE), long.keys(SPEC, 0, 2)
        stale = locations(ns, SPEC, keys)
        lost = locations(ns, SPEC, long.keys(SPEC, 3, 4))
        store.remove("long")
        collect(store)
        import numpy as np

        out = np.empty((len(keys), SPEC.page_nbytes), np.uint8)
        ns.read_pages(SPEC, stale, out)
        assert (out == long.records(SPEC, keys)).all()
        with pytest.raises(NotFound):
            ns.read_pages(SPEC, lost, out[: len(lost)])


def twice_stored(path: Path, sequence: Chain) -> None:
    """Two packs with the same pages, as after a race of two writers."""
    with PageStore.open(path) as one, PageStore.open(path) as other:
        ns = one.namespace(NAMESPACE)
        ns.refresh()
        save(one, "demo", sequence)
        keys = sequence.keys(SPEC)
        with other.commit() as commit:
            mine = other.namespace(NAMESPACE)
            index = commit._current_index(mine, SPEC)
            new = {key: i for i, key in enumerate(keys)}
            commit._write_packs(mine, index, sequence.blocks, new, sequence.records(SPEC, keys))


def test_pages_stored_twice_are_stored_once_after_gc(store_dir: Path) -> None:
    demo = chain(3)
    twice_stored(store_dir, demo)
    assert len(packs(store_dir)) == 2
    with PageStore.open(store_dir) as store:
        [doomed] = plan_gc(store, NOW).packs
        assert "twice" in doomed.why
        collect(store)
        assert len(packs(store_dir)) == 1
        check_readable(store, "demo", demo, 3)


def test_the_only_sound_copy_stays(store_dir: Path, expected_findings: set[str]) -> None:
    """Of two copies gc would drop one; the other is damaged, and that is found in time."""
    demo = chain(3)
    twice_stored(store_dir, demo)
    with PageStore.open(store_dir) as store:
        [doomed] = plan_gc(store, NOW).packs
        [stays] = [p for p in packs(store_dir) if p.name != f"c.{doomed.number}.0"]
        raw = bytearray(stays.read_bytes())
        raw[len(raw) // 2] ^= 1
        stays.write_bytes(raw)
        assert collect(store).pages_copied == 1
        check_readable(store, "demo", demo, 3)
    expected_findings |= {"page"}


def test_leftovers_of_dead_writers_go(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(2))
        spec_folder = packs(store_dir)[0].parent
        spots = [spec_folder, next(store_dir.glob("sessions/*")), spec_folder.parents[1]]
        for spot in spots:
            (spot / ".tmp-1-ab").write_bytes(b"half a pack")
        (store_dir / "sessions" / f"dead-{'0' * 16}").mkdir()
        (store_dir / ".tmp-2-cd").write_bytes(b"half a FORMAT")
        (store_dir / "ns" / ("ab" * 32)).mkdir()
        (store_dir / "ns" / ("cd" * 32) / "pages").mkdir(parents=True)
        fresh = plan_gc(store, GcOptions(grace_seconds=60))
        assert (".tmp-2-cd",) not in [leftover.path for leftover in fresh.leftovers]
        report = collect(store)
        assert report.leftovers_deleted == 8
    check_store(store_dir)


def test_orphaned_namespaces_go_whole(store_dir: Path) -> None:
    other = Namespace.of("cd" * 8, [page_spec("uni4"), SPEC])
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as writer:
        save(writer, "other", chain(3, 1, other))
        save(store, "demo", chain(3))
        store.remove("other")
        plan = plan_gc(store, NOW)
        assert plan.packs[0].namespace_id == other.id, "orphans go first"
        [use] = plan.doomed_namespaces
        assert (use.id, use.num_sessions) == (other.id, 0)
        assert use.nbytes == nbytes_of(store_dir / "ns" / other.id.hex())
        report = sweep(store, plan)
        assert report.namespaces_deleted == 1
        assert [info.id for info in store.namespaces()] == [NAMESPACE.id]
        save(writer, "other", chain(3, 1, other))  # by a process that knew it
        check_readable(store, "other", chain(3, 1, other), 3)


def test_a_namespace_saved_meanwhile_stays(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as writer:
        save(store, "demo", chain(0))
        store.remove("demo")
        plan = plan_gc(store, NOW)
        assert plan.doomed_namespaces
        save(writer, "again", chain(0))
        assert sweep(store, plan).namespaces_deleted == 0
        check_readable(store, "again", chain(0), 0)


def test_sessions_end_with_their_time(store_dir: Path) -> None:
    """And a newer checkpoint without end keeps the session."""
    past, future = time.time_ns() - HOUR_NS, time.time_ns() + HOUR_NS
    with PageStore.open(store_dir) as store:
        ends = {"over": past, "still": future, "kept": 0, "renewed": past}
        for seed, (name, expires) in enumerate(ends.items()):
            sequence = chain(2, seed)
            save(store, name, sequence)
            with store.commit() as commit:
                commit.publish(name, sequence.checkpoint(2, expires_ns=expires))
        save(store, "renewed", chain(2, 3))
        plan = plan_gc(store, NOW)
        assert [session.name for session in plan.sessions] == ["over"]
        report = sweep(store, plan)
        assert (report.sessions_expired, report.packs_deleted) == (1, 1)
        assert {info.name for info in store.sessions()} == {"still", "kept", "renewed"}
        with pytest.raises(NotFound, match="expired"):
            store.latest("over")


def test_a_session_saved_again_after_the_plan_does_not_end(store_dir: Path) -> None:
    demo = chain(2)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo)
        with store.commit() as commit:
            commit.publish("demo", demo.checkpoint(2, expires_ns=1))
        plan = plan_gc(store, NOW)
        assert plan.sessions
        save(store, "demo", demo)
        report = sweep(store, plan)
        assert (report.sessions_expired, report.packs_deleted) == (0, 0)
        check_readable(store, "demo", demo, 2)


def test_windowed_layers_may_go_back_unless_told_otherwise(store_dir: Path) -> None:
    full, windowed = SPEC, page_spec("uni4")
    namespace = Namespace.of("cd" * 8, [full, windowed])
    long = chain(20, 3, namespace)
    base = long.checkpoint(20)
    layers = (base.layers[0], replace(base.layers[1], window=16))
    with PageStore.open(store_dir) as store:
        save(store, "demo", long)
        store.remove("demo")
        with store.commit() as commit:
            commit.publish("demo", replace(base, layers=layers))
        assert plan_gc(store, NOW).is_empty
        report = collect(store, replace(NOW, keeps_history=False))
        assert (report.packs_compacted, report.pages_copied) == (1, 3)
        ns = store.namespace(namespace)
        assert [ns.locate(windowed, 1, h) is not None for h in long.hashes] == [False] * 17 + [
            True
        ] * 3
        assert ns.match(namespace.layers, [None, 16], [0, 0], long.hashes) == 20


def test_a_checkpoint_of_a_newer_release_stops_gc(
    store_dir: Path, expected_findings: set[str]
) -> None:
    expected_findings |= {"checkpoint"}
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(2))
        save(store, "gone", chain(2, 1))
        store.remove("gone")
        file = next(store_dir.glob("sessions/*/*.ckpt"))
        raw = bytearray(file.read_bytes())
        raw[4] = 2  # the version, with the head's checksum made to fit
        from tqstore.format.framing import crc32c

        raw[20:24] = crc32c(bytes(raw[:20])).to_bytes(4, "little")
        file.write_bytes(raw)
        with pytest.raises(Incompatible):
            plan_gc(store, NOW)
        assert len(packs(store_dir)) == 2


def test_a_store_opened_for_reading_is_only_planned(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(2))
        store.remove("demo")
    with PageStore.open(store_dir, mode="r") as store:
        plan = plan_gc(store, NOW)
        assert plan.packs
        with pytest.raises(InvalidInput, match="mode='r'"):
            sweep(store, plan)


def test_gc_gives_up_on_a_commit_that_stays_open(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, store.commit():
        started = time.monotonic()
        with pytest.raises(Conflict, match="open too long"), exclusive_lock(store.root, 0.1):
            pass
        assert time.monotonic() - started >= 0.1
    with PageStore.open(store_dir) as store, exclusive_lock(store.root, 0):
        pass


def test_commits_of_one_process_do_not_wait_for_gc_behind_each_other(store_dir: Path) -> None:
    """A save that waits for its background writer, while gc waits for the save."""
    import threading

    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as collector:
        save(store, "demo", chain(1))
        has_gate = threading.Event()

        def collect_meanwhile() -> None:
            has_gate.set()
            with exclusive_lock(collector.root):
                pass

        with store.commit():
            gc = threading.Thread(target=collect_meanwhile)
            gc.start()
            has_gate.wait()
            time.sleep(0.05)
            writer = threading.Thread(target=save, args=(store, "other", chain(1, 1)))
            writer.start()
            writer.join(20)
            assert not writer.is_alive()
        gc.join(20)
        assert not gc.is_alive()
        check_readable(store, "other", chain(1, 1), 1)


def order(*packs: tuple[int, int, str, str]) -> list[int]:
    """Of (number, used, blocks, parents), blocks as letters."""
    return eviction_order(
        [
            Evictable(n, used, [b.encode() for b in blocks], [p.encode() for p in parents])
            for n, used, blocks, parents in packs
        ]
    )


def test_leaves_go_before_what_they_continue_and_the_least_used_first() -> None:
    assert order((1, 5, "ab", ""), (2, 9, "c", "b"), (3, 7, "d", "b"), (4, 1, "x", "")) == [
        4,
        3,
        2,
        1,
    ]
    assert order((1, 1, "a", ""), (2, 2, "b", "a"), (3, 3, "c", "b")) == [3, 2, 1]
    assert order((1, 2, "ac", "b"), (2, 1, "bd", "a")) == [2, 1], "a circle"
    assert order() == []
