"""Several processes on one store: at once, killed, forked."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.conftest import check_store
from tests.store.synthetic import NAMESPACE, SPEC, chain, check_readable, save
from tqstore.errors import Conflict
from tqstore.store.page_store import PageStore

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")
KILLS = 15


def write_turns(path: Path, number: int, turns: int) -> None:
    """Saves a session of its own whose first three blocks are everybody's."""
    own = chain(turns, 0)
    with PageStore.open(path) as store:
        for n in range(turns):
            save(store, f"session-{number}", own, n, n + 1)
            check_readable(store, f"session-{number}", own, n + 1)


def test_two_processes_write_the_same_blocks_at_once(store_dir: Path) -> None:
    workers = [SPAWN.Process(target=write_turns, args=(store_dir, i, 8)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    with PageStore.open(store_dir) as store:
        for i in range(2):
            check_readable(store, f"session-{i}", chain(8, 0), 8)


def save_and_acknowledge(path: Path, seed: int, acknowledged: Connection) -> None:
    with PageStore.open(path) as store:
        for n in range(1000):
            sequence = chain(3, seed * 1000 + n)
            save(store, "demo", sequence)
            acknowledged.send(seed * 1000 + n)


def test_sigkill_loses_nothing_that_was_acknowledged(store_dir: Path) -> None:
    rng = random.Random(1)
    last = -1
    for kill in range(KILLS):
        receiver, sender = FORK.Pipe(duplex=False)
        worker = FORK.Process(target=save_and_acknowledge, args=(store_dir, kill, sender))
        worker.start()
        sender.close()
        if receiver.poll(20):
            last = receiver.recv()
        time.sleep(rng.uniform(0, 0.03))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        try:
            while receiver.poll():
                last = receiver.recv()
        except EOFError:
            pass
        receiver.close()
        with PageStore.open(store_dir) as store:
            saved = store.latest("demo")
            # The one acknowledged last, or the one after it whose answer did not get out.
            seeds = (last, last + 1)
            found = [s for s in seeds if chain(3, s).checkpoint(3) == saved]
            assert found, (kill, last)
            check_readable(store, "demo", chain(3, found[0]), 3)
    for leftover in store_dir.rglob(".tmp-*"):
        leftover.unlink()


def in_child(work: object) -> int:
    """Runs `work` in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_store_opened_before_a_fork_works_in_both(store_dir: Path) -> None:
    demo = chain(4)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo, 0, 2)

        def child() -> None:
            check_readable(store, "demo", demo, 2)
            save(store, "demo", demo, 2, 4)

        assert in_child(child) == 0
        check_readable(store, "demo", demo, 4)
        save(store, "other", demo, 0, 3)


def test_a_lock_held_while_forking_is_free_in_the_child(store_dir: Path) -> None:
    """As if another thread had been inside the index and the handles at the moment of the fork."""
    demo = chain(2)
    with PageStore.open(store_dir) as store:
        index = store.namespace(NAMESPACE).index(SPEC)
        save(store, "demo", demo, 0, 1)
        with store._lock, index._lock:
            assert in_child(lambda: save(store, "demo", demo, 1, 2)) == 0
        check_readable(store, "demo", demo, 2)


def test_a_commit_does_not_cross_a_fork(store_dir: Path) -> None:
    demo = chain(2)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo)

        def child() -> None:
            with pytest.raises(Conflict, match="belongs to the process"):
                commit.publish("demo", demo.checkpoint(1))
            commit_context.__exit__(None, None, None)

        commit_context = store.commit()
        commit = commit_context.__enter__()
        assert in_child(child) == 0
        # The child left its commit; the parent's lock must still be held.
        assert in_child(lambda: take_exclusive(store_dir)) == 1
        assert commit.publish("demo", demo.checkpoint(1)) == 2
        commit_context.__exit__(None, None, None)
        assert in_child(lambda: take_exclusive(store_dir)) == 0


def take_exclusive(path: Path) -> None:
    """What gc does; fails while a commit is open."""
    from tqstore.store.files import Files

    files = Files()
    root = files.open_root(str(path))
    files.lock_exclusive(files.open_lock(root, "LOCK"), wait=False)


def test_stores_made_at_the_same_time_are_one(tmp_path: Path) -> None:
    path = tmp_path / "store"
    workers = [SPAWN.Process(target=write_turns, args=(path, i, 1)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    check_store(path)
    with PageStore.open(path, mode="r") as store:
        assert len(store.sessions()) == 3
