"""What a command needs beyond the command line's own libraries, said before it starts."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from tqstore.cli import USAGE_EXIT


def require(library: str, extra: str = "") -> None:
    """Leaves with one line on how to come by `library`, of an extra or not, if it is not there."""
    try:
        is_there = find_spec(library) is not None
    except ValueError:  # a module that was replaced by None
        is_there = False
    if not is_there:
        what = f".[{extra}]" if extra else "."
        typer.echo(
            f"tqstore: this command needs {library}: in a clone of tqstore, pip install '{what}'",
            err=True,
        )
        raise typer.Exit(USAGE_EXIT)
