"""Several processes on one store at once, with gc among them: docs/concurrency.md's promises."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from tests.conftest import check_store
from tests.store.synthetic import (
    NAMESPACE,
    SPEC,
    Crashed,
    ScriptedFiles,
    chain,
    check_readable,
    packs,
    page_spec,
    read,
    save,
)
from tests.store.test_gc import NOW, age, collect, grown
from tqstore.errors import NotFound, TqStoreError
from tqstore.format.namespace import Namespace
from tqstore.store.files import Files
from tqstore.store.gc_plan import GcOptions, plan_gc
from tqstore.store.gc_sweep import sweep
from tqstore.store.page_store import PageStore

SPAWN = multiprocessing.get_context("spawn")
COMMON = chain(3, 77)
TURNS = 12


def write_and_remove(path: Path, number: int) -> None:
    """Sessions that share a beginning come and go; each is read back whole while it lives."""
    rng = random.Random(number)
    with PageStore.open(path) as store:
        for turn in range(TURNS):
            own = grown(COMMON, rng.randint(1, 4), 100 * number + turn)
            name = f"{number}-{turn % 3}"
            save(store, name, own)
            check_readable(store, name, own, len(own.blocks))
            if rng.random() < 0.4:
                store.remove(name)
            else:
                check_readable(store, name, own, len(own.blocks))
        save(store, f"last-{number}", grown(COMMON, 2, 100 * number + TURNS))


def collect_for_ever(path: Path) -> None:
    with PageStore.open(path) as store:
        while True:
            collect(store)
            time.sleep(0.002)


def test_promise_4_gc_beside_writers_and_readers_loses_nothing(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "base", COMMON)
    collector = SPAWN.Process(target=collect_for_ever, args=(store_dir,))
    writers = [SPAWN.Process(target=write_and_remove, args=(store_dir, n)) for n in range(2)]
    collector.start()
    for writer in writers:
        writer.start()
    try:
        with PageStore.open(store_dir, mode="r") as reader:
            ns = reader.namespace(NAMESPACE)
            while any(writer.is_alive() for writer in writers):
                keys = COMMON.keys(SPEC)
                assert (read(ns, SPEC, keys) == COMMON.records(SPEC, keys)).all()
                assert {finding.kind for finding in reader.verify()} <= {"leftover"}
    finally:
        for writer in writers:
            writer.join(60)
        assert collector.is_alive(), "gc failed"
        assert collector.pid is not None
        os.kill(collector.pid, signal.SIGKILL)
        collector.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    with PageStore.open(store_dir) as store:
        for number in range(2):
            own = grown(COMMON, 2, 100 * number + TURNS)
            check_readable(store, f"last-{number}", own, 5)
        check_readable(store, "base", COMMON, 3)
        collect(store)
        assert plan_gc(store, GcOptions(grace_seconds=0, compact_at=0.5)).is_empty


def test_promise_2_blocks_sealed_at_once_are_stored_once_after_gc(store_dir: Path) -> None:
    """Two threads of two stores that look before either writes."""
    demo = chain(4)
    with PageStore.open(store_dir) as first:
        save(first, "x", chain(1, 1))
    barrier = threading.Barrier(2)

    def seal(name: str) -> None:
        with PageStore.open(store_dir) as store, store.commit() as commit:
            ns, keys = store.namespace(NAMESPACE), demo.keys(SPEC)
            ns.refresh()
            barrier.wait()
            commit.add_pages(ns, SPEC, demo.blocks, keys, demo.records(SPEC, keys))
            barrier.wait()
            commit.publish(name, demo.checkpoint(4))

    threads = [threading.Thread(target=seal, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with PageStore.open(store_dir) as store:
        collect(store)
        index = store.namespace(NAMESPACE).index(SPEC)
        index.refresh(is_forced=True)
        assert [len(index.copies(*key)) for key in demo.keys(SPEC)] == [1] * 12
        for name in "ab":
            check_readable(store, name, demo, 4)


def test_a_reader_holds_on_to_what_it_has_open(store_dir: Path) -> None:
    """An unlinked pack stays readable through its descriptor; what is not open is a miss."""
    demo = chain(2)
    with PageStore.open(store_dir) as store, PageStore.open(store_dir, mode="r") as reader:
        save(store, "demo", demo)
        save(store, "other", chain(1, 8))
        check_readable(reader, "demo", demo, 2)
        stale = PageStore.open(store_dir, mode="r")
        with stale:
            ns = stale.namespace(NAMESPACE)
            places = [ns.locate(SPEC, layer, h) for layer, h in demo.keys(SPEC)]
            store.remove("demo")
            collect(store)
            held = reader.namespace(NAMESPACE)
            keys = demo.keys(SPEC)
            assert (read(held, SPEC, keys) == demo.records(SPEC, keys)).all()
            import numpy as np

            out = np.empty((1, SPEC.page_nbytes), np.uint8)
            with pytest.raises(NotFound):
                ns.read_pages(SPEC, places[:1], out)  # type: ignore[arg-type]
            assert ns.match([SPEC] * 3, [None] * 3, [0] * 3, demo.hashes) == 0


def prepared(path: Path) -> None:
    """Garbage of every kind: a whole pack, a partly needed one, an orphan, a leftover."""
    with PageStore.open(path) as store:
        long = chain(6, 3)
        save(store, "long", long)
        save(store, "short", long, 0, 2)
        save(store, "gone", chain(2, 4))
        store.remove("long")
        store.remove("gone")
        (packs(path)[0].parent / ".tmp-1-ab").write_bytes(b"x")


def collect_with(path: Path, files: ScriptedFiles) -> None:
    with PageStore.open(path, files=cast(Files, files)) as store:
        collect(store)


def test_promise_5_gc_may_stop_before_any_operation(tmp_path: Path) -> None:
    """The store is whole then, and the next gc finishes."""
    dry = tmp_path / "dry"
    prepared(dry)
    files = ScriptedFiles()
    collect_with(dry, files)
    for number in range(0, len(files.log), 3):
        path = tmp_path / f"store-{number}"
        prepared(path)
        with pytest.raises(Crashed):
            collect_with(path, ScriptedFiles(number, Crashed))
        check_store(path, expected=frozenset({"leftover", "gone"}))
        with PageStore.open(path) as store:
            check_readable(store, "short", chain(6, 3), 2)
            collect(store)
            assert plan_gc(store, NOW).is_empty
            check_readable(store, "short", chain(6, 3), 2)
        check_store(path)
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()


def test_gc_may_fail_at_any_operation(tmp_path: Path) -> None:
    """A typed error or none, nothing needed lost, and a retry finishes."""
    dry = tmp_path / "dry"
    prepared(dry)
    files = ScriptedFiles()
    collect_with(dry, files)
    for number in range(1, len(files.log), 4):
        path = tmp_path / f"store-{number}"
        prepared(path)
        with contextlib.suppress(TqStoreError):
            collect_with(path, ScriptedFiles(number))
        with PageStore.open(path) as store:
            check_readable(store, "short", chain(6, 3), 2)
            collect(store)
            assert plan_gc(store, NOW).is_empty
        check_store(path)


def test_promise_3_the_budget_evicts_under_a_running_writer(store_dir: Path) -> None:
    """A commit lets gc in when it needs room, and looks everything up again."""
    demo = chain(4, 1)
    with PageStore.open(store_dir) as store:
        save(store, "kept", chain(4, 0))
        save(store, "used", demo)
        save(store, "unused", chain(4, 2))
        used = store.budget.usage.total()
        store.remove("used")
        store.remove("unused")
    age(packs(store_dir)[1:], 3600)
    with PageStore.open(store_dir, max_bytes=used + 1000) as store:
        with store.commit() as commit:
            ns = store.namespace(NAMESPACE)
            keys = demo.keys(SPEC, 0, 4)
            # Two of its pages are there: relied on from now on, in a pack that would have to go.
            found = commit.add_pages(ns, SPEC, demo.blocks, keys[:2], demo.records(SPEC, keys[:2]))
            assert len(found) == 2
            more = grown(demo, 4, 9)
            keys = more.keys(SPEC)
            commit.add_pages(ns, SPEC, more.blocks, keys, more.records(SPEC, keys))
            commit.publish("more", more.checkpoint(8))
        check_readable(store, "more", more, 8)
        check_readable(store, "kept", chain(4, 0), 4)
        assert store.budget.usage.total() <= used + 1000


def test_two_gcs_at_once(store_dir: Path) -> None:
    """With whole namespaces to delete; each does what the other has left."""
    other = Namespace.of("cd" * 8, [page_spec("uni4"), SPEC])
    failures: list[BaseException] = []

    def collect_once(barrier: threading.Barrier) -> None:
        try:
            with PageStore.open(store_dir) as store:
                plan = plan_gc(store, NOW)
                barrier.wait()
                sweep(store, plan)
        except BaseException as error:
            failures.append(error)

    with PageStore.open(store_dir) as store:
        for turn in range(8):
            save(store, "kept", chain(3, 1))
            save(store, "long", chain(5, 1))
            save(store, "other", chain(3, 2, other))
            for name in ("long", "other"):
                store.remove(name)
            barrier = threading.Barrier(2)
            threads = [threading.Thread(target=collect_once, args=(barrier,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert failures == [], turn
            check_readable(store, "kept", chain(3, 1), 3)
            collect(store)
            assert plan_gc(store, NOW).is_empty
            assert [info.id for info in store.namespaces()] == [NAMESPACE.id]
