"""Tries to make a store lose or invent something, and says whether it did.

Always: every scenario cut after every operation, with every loss the model knows.  By options:
SIGKILLs, power cuts, every single-bit flip.  Exit code 1 if anything was lost or went undetected.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.faults.cuts import cut_everywhere, memory_folder
from tools.faults.flips import flip_all, make_small_store
from tools.faults.kills import kill_often
from tools.faults.power_cuts import PowerCutsUnavailable, cut_power_often
from tools.faults.scenarios import SCENARIOS

Section = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="SIGKILLs; N/10 seconds")
    parser.add_argument("--cuts", type=int, default=0, metavar="N", help="power cuts; root only")
    parser.add_argument("--flips", action="store_true", help="every single bit: about 10 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def model(seed: int) -> Section:
    reports = [cut_everywhere(scenario, num_random=32, seed=seed) for scenario in SCENARIOS]
    return {
        "scenarios": {r.scenario: {"cuts": r.cuts, "states": r.states} for r in reports},
        "broken": [problem for report in reports for problem in report.broken],
    }


def kills(count: int, seed: int) -> Section:
    with memory_folder() as folder:
        return _plain(asdict(kill_often(folder, count, seed)))


def power_cuts(count: int, seed: int) -> Section:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = asdict(cut_power_often(Path(folder), count, seed))
        except PowerCutsUnavailable as error:
            return {"unavailable": str(error), "broken": []}
    return {"cuts": found["kills"], **_plain(found, "kills")}


def flips() -> Section:
    with memory_folder() as folder:
        make_small_store(folder / "store")
        report = flip_all(folder / "store")
    regions = dict(sorted(report.regions.items()))
    return {"flips": report.flips, "regions": regions, "broken": list(report.undetected)}


def _plain(report: Section, *without: str) -> Section:
    return {name: value for name, value in report.items() if name not in without}


def main() -> int:
    options = arguments()
    logging.getLogger("tqstore").setLevel(logging.ERROR)  # warnings of damage are meant
    todo = {"model": lambda: model(options.seed)}
    if options.kills:
        todo["kills"] = lambda: kills(options.kills, options.seed)
    if options.cuts:
        todo["power_cuts"] = lambda: power_cuts(options.cuts, options.seed)
    if options.flips:
        todo["flips"] = flips
    figures: dict[str, Section] = {}
    for name, run in todo.items():
        figures[name] = run()
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    broken = sum(len(section["broken"]) for section in figures.values())
    print(f"{broken} broken" if broken else "nothing lost, nothing undetected")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
