"""Failing operations during gc, purge and repair; odd clocks, process ids and crowds of threads."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import secrets
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import check_store
from tests.store.synthetic import chain, check_readable, packs, save
from tools.faults.cuts import STORE, memory_folder
from tools.faults.promises import Promises, Step
from tools.faults.recorded_files import Entry, Mark, RecordedFiles, Write
from tools.faults.scenarios import ALL, SCENARIOS, Missed, Scenario
from tqstore.errors import BackendFailed, TqStoreError
from tqstore.store.folder import TMP_PREFIX
from tqstore.store.page_store import PageStore

DEMO = chain(4)
YEAR_NS = 365 * 86_400 * 10**9


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_file_changes_after_it_has_its_name(scenario: Scenario) -> None:
    """Durability promise 3; only LOCK, which is no data, is written in place."""
    with memory_folder() as work:
        scenario.prepare(work / STORE)
        files = RecordedFiles(work)
        locks = {files.node_of(lock) for lock in work.glob(f"{STORE}/LOCK")}
        named = set(files.contents) - locks
        scenario.act(work / STORE, files)
    assert any(isinstance(operation, Write) for operation in files.log)
    for operation in files.log:
        if isinstance(operation, Write):
            assert operation.node not in named
        elif isinstance(operation, Entry) and is_final(operation.name) and operation.node:
            named.add(operation.node)


def is_final(name: str) -> bool:
    return name != "LOCK" and not name.startswith(TMP_PREFIX)


class FailAt:
    """Makes the operation number `at` fail, of those that change something."""

    def __init__(self, at: int, code: int) -> None:
        self.count = 0
        self._at = at
        self._code = code

    def __call__(self, _operation: str, _name: str) -> None:
        self.count += 1
        if self.count - 1 == self._at:
            raise OSError(self._code, os.strerror(self._code))


def act_failing(scenario: Scenario, prepared: list[Step], top: Path, failing: FailAt) -> None:
    """Runs a scenario with one failing operation, and checks what is left."""
    files, promises = RecordedFiles(top), Promises()
    files.before = failing
    # A failure may be passed over where nothing is lost by it, or come out typed.
    with contextlib.suppress(TqStoreError, Missed):
        scenario.act(top / STORE, files)
    for step in [*prepared, *(o.said for o in files.log if isinstance(o, Mark))]:
        promises.hear(step)
    with PageStore.open(top / STORE) as store:
        promises.check(store)
        if scenario.is_damaged:
            store.repair()
        assert [f for f in store.verify() if f.kind != "leftover"] == []
        store.gc(ALL)
        assert list(store.verify()) == []
        promises.check(store)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    "scenario",
    [s for s in SCENARIOS if s.name in ("gc", "purge", "eviction", "repair")],
    ids=lambda scenario: scenario.name,
)
def test_every_operation_of_gc_and_repair_may_fail(scenario: Scenario, code: int) -> None:
    with memory_folder() as work:
        prepared = scenario.prepare(work / "before" / STORE)
        for at in range(1000):
            shutil.copytree(work / "before", work / "after")
            failing = FailAt(at, code)
            act_failing(scenario, prepared, work / "after", failing)
            shutil.rmtree(work / "after")
            if failing.count <= at:
                break  # there was no such operation any more
        assert 15 < at < 999


@pytest.mark.parametrize(
    "clocks",
    [
        ("stands still", [0, 0, 0, 0]),
        ("jumps back", [50 * YEAR_NS, 40 * YEAR_NS, 1, 0]),
        ("jumps ahead", [56 * YEAR_NS, 100 * YEAR_NS, 140 * YEAR_NS, 56 * YEAR_NS]),
    ],
    ids=lambda clocks: clocks[0],
)
def test_clocks_that_jump(
    store_dir: Path, clocks: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is told by numbers, and no pack number is used twice."""
    numbers: set[str] = set()
    for turn, now_ns in enumerate(clocks[1]):
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        with PageStore.open(store_dir) as store:
            save(store, "demo", DEMO, turn, turn + 1)
            check_readable(store, "demo", DEMO, turn + 1)
            store.gc()
            store.gc(ALL)
            check_readable(store, "demo", DEMO, turn + 1)
        found = {pack.name for pack in packs(store_dir)}
        assert len(found - numbers) == 1
        numbers |= found
    monkeypatch.undo()
    with PageStore.open(store_dir) as store:
        check_readable(store, "demo", DEMO, 4)
        store.remove("demo")
        store.gc(ALL)
    assert packs(store_dir) == []


def test_a_clock_after_the_last_pack_number(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The year 2113: an error, and what was saved before stands."""
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 2)
        monkeypatch.setattr(time, "time_ns", lambda: 143 * YEAR_NS + 10**18)
        with pytest.raises(BackendFailed, match="no pack number"):
            save(store, "demo", DEMO, 2, 3)
        check_readable(store, "demo", DEMO, 2)
    monkeypatch.undo()
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 2, 3)
        check_readable(store, "demo", DEMO, 3)


def test_a_process_id_that_was_used_before(store_dir: Path) -> None:
    """Leftovers of a dead writer with our own process id are nobody's."""
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 1)
    folders = [folder for folder in store_dir.rglob("*") if folder.is_dir()]
    for folder in folders:
        (folder / f"{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}").write_bytes(b"old")
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 1, 2)
        check_readable(store, "demo", DEMO, 2)
        store.gc(ALL)
    assert list(store_dir.rglob(f"{TMP_PREFIX}*")) == []


def test_a_temporary_name_that_is_taken_is_an_error_and_harms_nothing(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _n: "0" * 16)
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 1)
        taken = packs(store_dir)[0].parent / f"{TMP_PREFIX}{os.getpid()}-{'0' * 16}"
        taken.write_bytes(b"another's")
        with pytest.raises(BackendFailed, match="File exists"):
            save(store, "demo", DEMO, 1, 2)
        assert taken.read_bytes() == b"another's"
        check_readable(store, "demo", DEMO, 1)
        taken.unlink()
        save(store, "demo", DEMO, 1, 2)


def save_turns(path: Path, name: str, seed: int) -> None:
    own = chain(4, seed)
    with PageStore.open(path) as store:
        for n in range(4):
            save(store, name, own, n, n + 1)
            check_readable(store, name, own, n + 1)


def test_threads_forked_and_spawned_processes_at_once(store_dir: Path) -> None:
    """All of them save the same blocks and their own, while gc takes what it may."""
    PageStore.open(store_dir).close()
    workers: list[threading.Thread | multiprocessing.process.BaseProcess] = []
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        for i in range(2):
            arguments = (store_dir, f"{kind}-{i}", i % 2)
            workers.append(context.Process(target=save_turns, args=arguments))  # type: ignore[attr-defined]
            workers[-1].start()
    workers += [
        threading.Thread(target=save_turns, args=(store_dir, f"thread-{i}", i % 2))
        for i in range(3)
    ]
    for worker in workers[4:]:
        worker.start()
    with PageStore.open(store_dir) as store:
        while any(worker.is_alive() for worker in workers):
            store.gc(ALL)
            time.sleep(0.05)
    for worker in workers:
        worker.join()
        assert getattr(worker, "exitcode", 0) == 0
    with PageStore.open(store_dir) as store:
        assert len(store.sessions()) == 7
        for info in store.sessions():
            check_readable(store, info.name, chain(4, int(info.name[-1]) % 2), 4)
    check_store(store_dir)
