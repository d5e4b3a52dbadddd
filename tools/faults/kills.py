"""SIGKILL at random moments, and the check after each; the first loss ends the run."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tools.faults.promises import BrokenPromise, Promises
from tools.faults.scenarios import ALL
from tools.faults.writer import Writer
from tqstore.errors import TqStoreError
from tqstore.store.page_store import PageStore

KILLS_A_STORE = 8  # then a new one, so that checking stays quick
_MAX_SECONDS = 0.06


@dataclass
class KillReport:
    """Also of power cuts.  `acknowledged` counts saves and removals."""

    kills: int = 0
    acknowledged: int = 0
    broken: tuple[str, ...] = ()


def kill_often(folder: Path, kills: int, seed: int = 0) -> KillReport:
    """Starts and kills `kills` writers one after the other; stores are made in `folder`."""
    report, promises, rng = KillReport(), Promises(), random.Random(seed)
    while report.kills < kills and not report.broken:
        path = folder / f"store-{report.kills // KILLS_A_STORE}"
        if report.kills % KILLS_A_STORE == 0:
            promises = Promises()
        writer = Writer(path, rng.getrandbits(32))
        time.sleep(rng.uniform(0, _MAX_SECONDS))
        if (code := writer.stop()) != -signal.SIGKILL:
            raise RuntimeError(f"the writer ended with {code} before it was killed")
        report.kills += 1
        report.acknowledged += hear(writer, promises)
        is_last = report.kills % KILLS_A_STORE == 0 or report.kills == kills
        problem = what_is_lost(path, promises, is_thorough=is_last)
        if problem is not None:
            report.broken += (f"kill {report.kills}: {problem}",)
    return report


def hear(writer: Writer, promises: Promises) -> int:
    """Takes in what a writer said that is over; how much of it was acknowledged."""
    steps = writer.heard()
    for step in steps:
        promises.hear(step)
    return sum(step.kind == "acknowledged" for step in steps)


def what_is_lost(path: Path, promises: Promises, *, is_thorough: bool) -> str | None:
    """What is wrong with the store, or None; thorough is with verify and gc."""
    try:
        with PageStore.open(path) as store:
            promises.check(store)
            if is_thorough:
                damage = [finding for finding in store.verify() if finding.kind != "leftover"]
                if damage:
                    return f"verify finds {damage[0]}"
                store.gc(ALL)
                if garbage := [*store.verify()]:
                    return f"gc leaves {garbage[0]}"
                promises.check(store)
    except (TqStoreError, BrokenPromise) as error:
        return f"{type(error).__name__}: {error}"
    return None
