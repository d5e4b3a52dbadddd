"""Compares tqstore.seeds with VeloxQuant-MLX on the same inputs, in an environment of its own.

Attention's error is taken against exact attention in float64, as the mean over several draws of the
vectors and the rotations.  No figure is typed by hand: --docs puts the table into docs/seeds.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.benchmarks import veloxquant
from tools.real_model import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "seeds.md"
BEGIN = "<!-- figures: tools/compare_seeds --docs -->\n"
END = "<!-- end of figures -->\n"
COLUMNS = (
    "inputs",
    "method",
    "bits",
    "our error",
    "its error",
    "ratio",
    "",
    "our bytes a token",
    "its bytes a token",
)
# Differences of fewer standard errors are chance: both run the same algorithm at `mse`.
SIGNIFICANT = 3.0


def comparisons(python: Path, num_seeds: int) -> Iterator[dict[str, Any]]:
    """Each case as measure.py finds it, as soon as it does."""
    command = [str(python), "-m", "tools.seed_comparison.measure"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"num_seeds": num_seeds}))
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"the comparison ended with status {process.returncode}")


def verdict(found: dict[str, Any]) -> str:
    """`less`, `equal` within SIGNIFICANT standard errors, or `MORE`."""
    if abs(found["margin"]) < SIGNIFICANT:
        return "equal"
    return "less" if found["margin"] > 0 else "MORE"


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    return (
        found["inputs"],
        found["method"].removeprefix("turboquant_"),
        str(found["bits"]),
        f"{found['ours']:.4f}",
        f"{found['theirs']:.4f}",
        f"{found['ours'] / found['theirs']:.2f}",
        verdict(found),
        f"{found['our_bytes']:.0f}",
        f"{found['their_bytes']:.0f}",
    )


def markdown(found: Sequence[dict[str, Any]], num_seeds: int) -> str:
    lines = [f"VeloxQuant-MLX {veloxquant.VERSION}, means over {num_seeds} seeds.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(each))} |" for each in found]
    return "\n".join(lines) + "\n"


def with_figures(text: str, figures: str) -> str:
    """`text` with what stands between the markers replaced; ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + figures + END + after


def main(argv: Sequence[str] | None = None) -> int:
    """0 if no error of ours is larger, else 1."""
    parser = argparse.ArgumentParser(prog="tools/compare_seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="draws of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cases to FILE")
    parser.add_argument("--docs", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2")
    console = Console(highlight=False)
    try:
        peer = veloxquant.prepared(cache_folder(), lambda what, *_: console.print(what))
    except veloxquant.VeloxUnavailable as error:
        raise SystemExit(str(error)) from error
    found = []
    console.print(*COLUMNS, sep=" | ")
    for each in comparisons(peer.python, options.seeds):
        found.append(each)
        console.print(*cells(each), sep=" | ")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.docs:
        DOCUMENT.write_text(with_figures(DOCUMENT.read_text(), markdown(found, options.seeds)))
    return int(any(verdict(each) == "MORE" for each in found))


if __name__ == "__main__":
    sys.exit(main())
