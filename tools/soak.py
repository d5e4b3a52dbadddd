"""Eight processes on one store, four writing and four reading, with gc every second.

0 wrong bytes, 0 lost sessions and 0 leftovers are what it must find; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.faults.crowd import Worker, check_own
from tools.faults.promises import BrokenPromise, Promises
from tools.faults.scenarios import ALL
from tqstore.errors import TqStoreError
from tqstore.store.page_store import PageStore

NUM_WRITERS = 4
NUM_READERS = 4
GC_SECONDS = 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--folder", type=Path, help="where to make the store (a temporary one)")
    return parser.parse_args()


def soak(path: Path, seconds: float) -> dict[str, Any]:
    """Runs the crowd for so long, then checks everything once more."""
    PageStore.open(path).close()
    workers = [Worker("writer", path, i, seconds) for i in range(NUM_WRITERS)]
    workers += [Worker("reader", path, NUM_WRITERS + i, seconds) for i in range(NUM_READERS)]
    counts, wrong = collect(path, seconds)
    lost: list[str] = []
    for worker in workers:
        did, was_wrong, promises = worker.result()
        counts.update(did)
        wrong += was_wrong
        lost += what_is_lost(path, promises)
    leftovers = what_is_left(path)
    return {
        "seconds": seconds,
        "writers": NUM_WRITERS,
        "readers": NUM_READERS,
        "counts": dict(sorted(counts.items())),
        "wrong": wrong,
        "lost": lost,
        "leftovers": leftovers,
    }


def collect(path: Path, seconds: float) -> tuple[Counter[str], list[str]]:
    """gc every second, without any grace: what is not needed this moment goes."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    deadline = time.monotonic() + seconds
    with PageStore.open(path) as store:
        while time.monotonic() < deadline:
            try:
                report = store.gc(ALL)
            except TqStoreError as error:
                wrong.append(f"gc: {error}")
                break
            counts["gc"] += 1
            counts["packs deleted"] += report.packs_deleted
            counts["packs compacted"] += report.packs_compacted
            time.sleep(min(GC_SECONDS, max(0.0, deadline - time.monotonic())))
    return counts, wrong


def what_is_lost(path: Path, promises: Promises) -> list[str]:
    lost = []
    with PageStore.open(path) as store:
        for session, states in promises.allowed.items():
            try:
                check_own(store, session, states[-1])
            except (BrokenPromise, TqStoreError) as error:
                lost.append(str(error))
    return lost


def what_is_left(path: Path) -> list[str]:
    """After a last gc: temporaries, damage, anything gc would still take."""
    with PageStore.open(path) as store:
        store.gc(ALL)
        left = [f"{finding.path}: {finding.what}" for finding in store.verify()]
        plan = store.plan_gc(ALL)
        left += [] if plan.is_empty else [f"gc would still free {plan.freed_nbytes} bytes"]
    return left + [str(file) for file in path.rglob(".tmp-*")]


def main() -> int:
    options = arguments()
    logging.getLogger("tqstore").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = soak(Path(folder) / "store", 60 * options.minutes)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures["wrong"] or figures["lost"] or figures["leftovers"] else 0


if __name__ == "__main__":
    sys.exit(main())
