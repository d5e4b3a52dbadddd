"""What is interrupted: each scenario prepares a store, then acts on it through recorded files.

A scenario marks what it promises as it goes (`promises.Step`); cutting it anywhere is `cuts`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.store.synthetic import DEMO_SPECS, Chain, Crashed, chain, save
from tools.faults.promises import State, Step
from tools.faults.recorded_files import RecordedFiles
from tqstore.format.namespace import Namespace
from tqstore.store.gc_plan import GcOptions
from tqstore.store.names import pack_name
from tqstore.store.page_store import PageStore

PLAIN = Namespace.of("ab" * 8, [DEMO_SPECS[0]] * 2)
MIXED = Namespace.of("cd" * 8, DEMO_SPECS)
DEMO = chain(4, 0, PLAIN)
OTHER = chain(3, 7, MIXED)
WIDE = chain(6, 5, PLAIN)
ALL = GcOptions(grace_seconds=0, drops_quarantine=True)


class Missed(Exception):
    """A scenario did not do what it is there for."""


@dataclass(frozen=True)
class Scenario:
    """`prepare` returns what it acknowledged.  A store that `is_damaged` is repaired before it is
    verified."""

    name: str
    prepare: Callable[[Path], list[Step]]
    act: Callable[[Path, RecordedFiles], None]
    is_damaged: bool = False


def saved(session: str, sequence: Chain, num_blocks: int) -> Step:
    return Step("acknowledged", session, State(sequence, num_blocks))


def save_telling(
    store: PageStore, files: RecordedFiles, session: str, sequence: Chain, first: int, last: int
) -> None:
    state = State(sequence, last)
    files.mark(Step("begun", session, state))
    save(store, session, sequence, first, last)
    files.mark(Step("acknowledged", session, state))


def remove_telling(store: PageStore, files: RecordedFiles, session: str) -> None:
    files.mark(Step("begun", session, None))
    store.remove(session)
    files.mark(Step("acknowledged", session, None))


def opened(path: Path, files: RecordedFiles) -> PageStore:
    return PageStore.open(path, files=files)


def nothing(_path: Path) -> list[Step]:
    return []


def two_turns(path: Path) -> list[Step]:
    """A session of two checkpoints."""
    with PageStore.open(path) as store:
        save(store, "demo", DEMO, 0, 1)
        save(store, "demo", DEMO, 1, 2)
    return [saved("demo", DEMO, 2)]


def first_save(path: Path, files: RecordedFiles) -> None:
    with opened(path, files) as store:
        save_telling(store, files, "demo", DEMO, 0, 2)


def later_saves(path: Path, files: RecordedFiles) -> None:
    """A third turn, which prunes the first; then a session of another namespace."""
    with opened(path, files) as store:
        save_telling(store, files, "demo", DEMO, 2, 4)
        save_telling(store, files, "other", OTHER, 0, 2)
        save_telling(store, files, "other", OTHER, 2, 3)


def dead_neighbour(path: Path, files: RecordedFiles) -> None:
    """A writer dies between a pack's link and its folder's sync; another relies on the pack."""
    is_linked = False

    def die_before_the_sync(operation: str, name: str) -> None:
        nonlocal is_linked
        is_linked |= operation == "link" and name.startswith("c.")
        if is_linked and operation == "fsync":
            raise Crashed

    files.mark(Step("begun", "demo", State(DEMO, 4)))
    with opened(path, files) as store:
        files.before = die_before_the_sync
        with contextlib.suppress(Crashed):
            save(store, "demo", DEMO, 2, 4)
    files.before = lambda _operation, _name: None
    with opened(path, files) as store:
        # Its first blocks lie in the dead writer's pack.
        save_telling(store, files, "heir", DEMO, 0, 4)


def three_sessions(path: Path) -> list[Step]:
    steps = two_turns(path)
    with PageStore.open(path) as store:
        save(store, "other", OTHER, 0, 3)
        save(store, "twin", DEMO, 0, 1)
    return [*steps, saved("other", OTHER, 3), saved("twin", DEMO, 1)]


def removal(path: Path, files: RecordedFiles) -> None:
    with opened(path, files) as store:
        remove_telling(store, files, "other")
        save_telling(store, files, "demo", DEMO, 2, 3)


def garbage(path: Path) -> list[Step]:
    """Whole packs nobody needs, one that is needed in part, an orphaned namespace, a leftover."""
    steps = three_sessions(path)
    with PageStore.open(path) as store:
        save(store, "wide", WIDE, 0, 6)
        store.remove("other")
        for _ in range(2):  # of six blocks in one pack one is needed
            with store.commit() as commit:
                commit.publish("wide", WIDE.checkpoint(1))
    (path / "sessions" / ".tmp-1-dead").write_bytes(b"half")
    for file in path.rglob("*"):
        os.utime(file, ns=(0, 0))  # long unused
    removed = Step("acknowledged", "other", None)
    return [*steps, removed, saved("wide", WIDE, 1)]


def collection(path: Path, files: RecordedFiles) -> None:
    """Everything gc does: leftovers, whole packs, compaction, a namespace; then a save."""
    with opened(path, files) as store:
        report = store.gc(ALL)
        if not (report.packs_compacted and report.namespaces_deleted and report.leftovers_deleted):
            raise Missed(f"the scenario is to collect everything: {report}")
        save_telling(store, files, "demo", DEMO, 2, 4)


def two_collections(path: Path, files: RecordedFiles) -> None:
    """The first dies in the middle of its deletions; the second resumes."""
    num_unlinked = 0

    def die_at_the_third(operation: str, _name: str) -> None:
        nonlocal num_unlinked
        num_unlinked += operation == "unlink"
        if num_unlinked == 3:
            raise Crashed

    with opened(path, files) as store:
        files.before = die_at_the_third
        with contextlib.suppress(Crashed):
            store.gc(ALL)
    files.before = lambda _operation, _name: None
    with opened(path, files) as store:
        store.gc(ALL)
        save_telling(store, files, "demo", DEMO, 2, 3)


def purge(path: Path, files: RecordedFiles) -> None:
    """A session whose first block another one shares."""
    with opened(path, files) as store:
        files.mark(Step("begun", "demo", None))
        store.purge("demo")
        files.mark(Step("acknowledged", "demo", None, purged=(DEMO, 1, 2)))
        save_telling(store, files, "wide", WIDE, 1, 2)


def eviction(path: Path, files: RecordedFiles) -> None:
    """A save into a store that is full of garbage."""
    used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with PageStore.open(path, max_bytes=used + 4096, files=files) as store:
        save_telling(store, files, "more", chain(2, 11, PLAIN), 0, 2)
        if not store.counters.nbytes_evicted:
            raise Missed("the scenario is to evict something")


def damaged(path: Path) -> list[Step]:
    """A pack with a bad page no checkpoint needs, a bad zarr.json, a bad older checkpoint."""
    steps = garbage(path)
    with PageStore.open(path) as store:
        ns = store.namespace(PLAIN)
        location = ns.locate(PLAIN.layers[0], 1, WIDE.hashes[4])
        if location is None:
            raise Missed("the scenario's bad page is not there")
        entry = ns.index(PLAIN.layers[0]).entry(location.pack)
        offset = entry.first_slot + location.slot * ns.index(PLAIN.layers[0]).layout.stride
    spoil(next(path.rglob(pack_name(location.pack))), offset + 100)
    spoil(next(path.rglob("zarr.json")), 50)
    spoil(min(path.glob("sessions/demo-*/*.ckpt")), 60)
    return steps


def spoil(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def repairing(path: Path, files: RecordedFiles) -> None:
    with opened(path, files) as store:
        if len(store.repair()) < 3:
            raise Missed("the scenario is to repair something")
        save_telling(store, files, "demo", DEMO, 2, 4)


SCENARIOS = (
    Scenario("first save", nothing, first_save),
    Scenario("later saves", two_turns, later_saves),
    Scenario("dead neighbour", two_turns, dead_neighbour),
    Scenario("removal", three_sessions, removal),
    Scenario("gc", garbage, collection),
    Scenario("gc resumed", garbage, two_collections),
    Scenario("purge", garbage, purge),
    Scenario("eviction", garbage, eviction),
    Scenario("repair", damaged, repairing, is_damaged=True),
)
