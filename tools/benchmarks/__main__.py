"""Measures tqstore against its peers in one run.  No figure here is typed by hand."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools.benchmarks import cases
from tools.benchmarks.machine import description
from tools.benchmarks.report import DOCUMENT, table, write_document
from tools.benchmarks.row import Row
from tools.benchmarks.synthetic import FULL, TOY
from tools.benchmarks.workshop import Workshop
from tools.real_model import cache_folder

Benchmark = Callable[[Workshop], list[Row]]
SIZES = {"full": FULL, "toy": TOY}


def names() -> list[str]:
    """Every benchmark, a module of `cases` each."""
    return [info.name.replace("_", "-") for info in pkgutil.iter_modules(cases.__path__)]


def benchmark(name: str) -> Benchmark:
    """Its function.  Imported only now: some need packages that others don't."""
    module = import_module(f"{cases.__name__}.{name.replace('-', '_')}")
    run: Benchmark = module.run
    return run


def summary(name: str) -> str:
    """The first line of its docstring."""
    module = import_module(f"{cases.__name__}.{name.replace('-', '_')}")
    return (module.__doc__ or "").partition("\n")[0]


def measured(chosen: Sequence[str], workshop: Workshop) -> list[Row]:
    """Rows of the benchmarks of those names, in their order."""
    return [row for name in chosen for row in benchmark(name)(workshop)]


@contextmanager
def progress_of(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that says what is being done, drawn where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names(), help="these benchmarks (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--size", choices=SIZES, default="full", help="toy: only to see it work")
    parser.add_argument("--rounds", type=int, metavar="N", help="measured runs of each trial")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the stores lie meanwhile; on a real disk (default: the user's cache folder)",
    )
    parser.add_argument(
        "--docs", action="store_true", help=f"put the table into {DOCUMENT.name}, of a full run"
    )
    options = parser.parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.docs and (options.only or options.size != "full"):
        parser.error("--docs wants every benchmark at full size")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(highlight=False)
    if options.list:
        for name in names():
            console.print(f"[bold]{name}[/bold]  {summary(name)}")
        return 0
    sizes = SIZES[options.size]
    sizes = replace(sizes, rounds=options.rounds or sizes.rounds)
    parent = options.folder or cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder,
        progress_of(Console(stderr=True)) as progress,
    ):
        machine = description(Path(folder))
        workshop = Workshop(Path(folder), sizes, progress, tools_folder=cache_folder())
        rows = measured(options.only or names(), workshop)
    console.print(*machine, sep="\n")
    console.print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    if options.docs:
        write_document(rows, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
