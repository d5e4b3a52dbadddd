"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer


def _non_empty(path: str | None) -> str | None:
    if path == "":
        raise typer.BadParameter("the path is empty")
    return path


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PATH",
        help="The store's folder; also before the command.  "
        "Default: $TQSTORE_HOME, or tqstore in your data folder.",
        callback=_non_empty,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
