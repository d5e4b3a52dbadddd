"""Cutting a scenario after every operation, and checking every disk a power cut may leave then.

Owns the walk over cuts and fates; a disk that was checked with the same promises is not checked
again.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.store.synthetic import chain, check_readable, save
from tools.faults.disk_model import Disk, Fate, Tree, fingerprint, write_tree
from tools.faults.promises import BrokenPromise, Promises
from tools.faults.recorded_files import Mark, RecordedFiles
from tools.faults.scenarios import ALL, PLAIN, Scenario
from tqstore.errors import TqStoreError
from tqstore.store.page_store import PageStore

STORE = "store"
AFTERWARDS = chain(1, 99, PLAIN)


@dataclass
class CutReport:
    """`cuts` counts operations, `states` the distinct disks that cutting after them may leave and
    that were checked; `broken` says what was lost where."""

    scenario: str
    cuts: int = 0
    states: int = 0
    broken: tuple[str, ...] = ()


class Crash(NamedTuple):
    """What is on the disk if the power goes after operation `number`, and what was promised."""

    number: int
    fates: tuple[Fate, ...]
    tree: Tree
    promises: Promises


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary folder, in memory where the system has such: nothing in it is to survive."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def cut_everywhere(
    scenario: Scenario, *, num_random: int = 8, max_states: int | None = None, seed: int = 0
) -> CutReport:
    """Cuts `scenario` after each of its operations, and checks what each crash may leave.

    `num_random` fates are drawn where not all are tried; more than `max_states` disks are thinned
    out evenly.
    """
    with memory_folder() as work:
        found = list(crashes(scenario, work / "real", num_random, random.Random(seed)))
        report = CutReport(scenario.name, cuts=max(crash.number for crash in found))
        if max_states is not None:
            found = found[:: -(-len(found) // max_states)]
        for crash in found:
            report.states += 1
            problem = what_is_lost(crash, work / "crashed", is_damaged=scenario.is_damaged)
            if problem is not None:
                report.broken += (f"after operation {crash.number}, {crash.fates}: {problem}",)
    return report


def crashes(scenario: Scenario, top: Path, num_random: int, rng: random.Random) -> Iterator[Crash]:
    """Every distinct disk that cutting the scenario may leave, with what was promised by then."""
    top.mkdir()
    promises = Promises()
    for step in scenario.prepare(top / STORE):
        promises.hear(step)
    files = RecordedFiles(top)
    scenario.act(top / STORE, files)
    disk = Disk(files.top, files.folders, files.contents)
    seen: set[bytes] = set()
    number = 0
    for operation in files.log:
        if isinstance(operation, Mark):
            promises.hear(operation.said)
            seen.clear()  # the same disk may break a new promise
        else:
            number += 1
            disk.do(operation)
        for fates in disk.fates(rng, num_random):
            tree = disk.after_crash(fates)
            if (key := fingerprint(tree)) not in seen:
                seen.add(key)
                yield Crash(number, fates, tree, deepcopy(promises))


def what_is_lost(crash: Crash, top: Path, *, is_damaged: bool = False) -> str | None:
    """Recovers the disk and checks it; what is wrong, or None."""
    write_tree(crash.tree, top)
    try:
        with PageStore.open(top / STORE) as store:
            crash.promises.check(store)
            if is_damaged:
                store.repair()
                crash.promises.check(store)
            damage = [f for f in store.verify() if f.kind != "leftover"]
            if damage:
                return f"verify finds {damage[0]}"
            store.gc(ALL)
            garbage = [*store.verify()]
            if garbage or not store.plan_gc(ALL).is_empty:
                return f"gc leaves garbage: {garbage[:1]}"
            crash.promises.check(store)
            save(store, "afterwards", AFTERWARDS)
            check_readable(store, "afterwards", AFTERWARDS, 1)
    except (TqStoreError, BrokenPromise, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(top)
    return None
