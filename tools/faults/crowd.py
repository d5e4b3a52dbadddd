"""Many processes on one store at once, each knowing what it must find.

Owns the writers and readers; how long they run and who collects garbage meanwhile is `soak`'s.
What a checkpoint holds follows from its metadata, so that a reader can tell a wrong byte without
asking its writer.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from tests.store.synthetic import Chain, chain
from tools.faults.promises import BrokenPromise, Promises, State, Step, check_pages
from tools.faults.scenarios import PLAIN
from tqstore.errors import NotFound
from tqstore.format.checkpoint import Checkpoint
from tqstore.store.page_store import PageStore

NUM_BLOCKS = 6
NUM_SHARED = 6  # chains that all writers use: their pages are everybody's
SESSIONS_A_WRITER = 4


class Worker:
    """A process that works until the deadline, then tells what it did and what was wrong."""

    def __init__(self, kind: str, path: Path, seed: int, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        work = _write if kind == "writer" else _read
        self._process = context.Process(target=_run, args=(work, path, seed, seconds, sender))
        self._process.start()
        sender.close()

    def result(self) -> tuple[Counter[str], list[str], Promises]:
        """Counts, what was wrong, and what it was promised."""
        try:
            found: tuple[Counter[str], list[str], Promises] = self._receiver.recv()
        except EOFError:
            found = (Counter(), ["a worker died"], Promises())
        self._process.join()
        return found


def _run(work: object, path: Path, seed: int, seconds: float, out: Connection) -> None:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    promises = Promises()
    logging.getLogger("tqstore").addHandler(_Complaints(wrong))
    try:
        with PageStore.open(path) as store:
            rng, deadline = random.Random(seed), time.monotonic() + seconds
            while time.monotonic() < deadline and not wrong:
                work(store, rng, seed, counts, promises)  # type: ignore[operator]
    except BaseException:
        wrong.append(traceback.format_exc())
    out.send((counts, wrong, promises))


class _Complaints(logging.Handler):
    """A warning of the store, as of a damaged checkpoint, is a fault here."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self._wrong.append(record.getMessage())


def _write(
    store: PageStore, rng: random.Random, seed: int, counts: Counter[str], promises: Promises
) -> None:
    """One act on one of its own sessions, and a look at another of them."""
    session = f"writer-{seed}-{rng.randrange(SESSIONS_A_WRITER)}"
    act = rng.choices(["save", "remove", "purge"], [8, 1, 1])[0]
    if act == "save":
        of = rng.choice([rng.randrange(NUM_SHARED), rng.getrandbits(31)])
        state = State(line(of), rng.randint(1, NUM_BLOCKS), rng.getrandbits(60))
        _save(store, session, state)
    else:
        state = None
        try:
            store.remove(session) if act == "remove" else store.purge(session)
        except NotFound:
            act = f"{act} of nothing"
    promises.hear(Step("acknowledged", session, state))
    counts[act] += 1
    _look_at_own(store, rng.choice(list(promises.allowed)), promises)
    counts["own sessions read"] += 1


def line(seed: int) -> Chain:
    return chain(NUM_BLOCKS, seed, PLAIN)


def checkpoint_of(state: State) -> Checkpoint:
    said = {"seed": state.chain.seed, "blocks": state.num_blocks, "save": state.save}
    return state.chain.checkpoint(state.num_blocks, metadata=said)


def state_of(found: Checkpoint) -> State:
    said = found.metadata
    return State(line(said["seed"]), said["blocks"], said["save"])


def _save(store: PageStore, session: str, state: State) -> None:
    ns = store.namespace(PLAIN)
    with store.commit() as commit:
        for spec in PLAIN.page_specs:
            keys = state.chain.keys(spec, 0, state.num_blocks)
            records = state.chain.records(spec, keys)
            commit.add_pages(ns, spec, state.chain.blocks, keys, records)
        commit.publish(session, checkpoint_of(state))


def _look_at_own(store: PageStore, session: str, promises: Promises) -> None:
    """Nobody else touches it, so it must be exactly as it was acknowledged."""
    [state] = promises.allowed[session]
    check_own(store, session, state)


def check_own(store: PageStore, session: str, state: State | None) -> None:
    try:
        found = store.latest(session)
    except NotFound:
        if state is not None:
            raise BrokenPromise(f"session {session!r} is lost") from None
        return
    if state is None or found != checkpoint_of(state):
        raise BrokenPromise(f"session {session!r} is not what was saved last")
    check_pages(store, session, state)


def _read(
    store: PageStore, rng: random.Random, _seed: int, counts: Counter[str], _promises: Promises
) -> None:
    """Reads anybody's session.  Pages may go only if its checkpoint was replaced meanwhile."""
    sessions = [info.name for info in store.sessions() if info.problem is None]
    if not sessions:
        time.sleep(0.01)
        return
    session = rng.choice(sessions)
    try:
        found = store.latest(session)
    except NotFound:
        counts["gone meanwhile"] += 1
        return
    state = state_of(found)
    if found != checkpoint_of(state):
        raise BrokenPromise(f"session {session!r} is not what it says")
    try:
        check_pages(store, session, state)
        counts["sessions read"] += 1
    except BrokenPromise as error:
        if "lost a page" not in str(error) or _is_newest(store, session, found):
            raise
        counts["replaced meanwhile"] += 1


def _is_newest(store: PageStore, session: str, found: Checkpoint) -> bool:
    try:
        return store.latest(session) == found
    except NotFound:
        return False
