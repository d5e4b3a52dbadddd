"""Printing: tables for people on stdout, JSON for programs, progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tqstore.cli.printable import json_text, printable

# Without a terminal nobody's window is too narrow: nothing is cut off in pipes and files.
_UNBOUNDED_WIDTH = 400
Cell = str | Text


class Output(Console):
    """A console that takes text as it is and hands a broken pipe on to the frame."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        """As ever; into a pipe or a file without the blanks that fill up a table's columns."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        lines = captured.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


def console(*, is_stderr: bool = False) -> Output:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED_WIDTH
    return Output(stderr=is_stderr, markup=False, highlight=False, emoji=False, width=width)


def print_json(value: Any) -> None:
    typer.echo(json_text(value))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; `right` names the columns of numbers."""
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name in columns:
        is_right = name in right
        made.add_column(
            name,
            justify="right" if is_right else "left",
            no_wrap=is_right,
            overflow="ellipsis" if is_right else "fold",
        )
    return made


def fields(pairs: Mapping[str, Cell]) -> Table:
    """Names and values, one a line."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(name, printable(value) if isinstance(value, str) else value)
    return made


def fitted(of: Console, made: Table, droppable: Sequence[str]) -> Table:
    """`made` without as many of the `droppable` columns, in that order, as the width demands."""
    for name in droppable:
        if fits(of, made):
            break
        made = _without(made, name)
    return made


def _without(made: Table, name: str) -> Table:
    kept = [column for column in made.columns if column.header != name]
    names = [str(column.header) for column in kept]
    right = [str(column.header) for column in kept if column.justify == "right"]
    narrower = table(*names, right=right)
    for row in zip(*(column.cells for column in kept), strict=True):
        narrower.add_row(*row)
    return narrower


def fits(of: Console, made: Table) -> bool:
    """Whether the table can be drawn without folding or cutting a cell."""
    unbounded = of.options.update(max_width=_UNBOUNDED_WIDTH)
    return Measurement.get(of, unbounded, made).maximum <= of.width


def is_unicode(of: Console) -> bool:
    """Whether block elements can be printed."""
    return of.encoding.lower().startswith("utf")
