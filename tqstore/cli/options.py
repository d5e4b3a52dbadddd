"""Options that several commands take."""

from __future__ import annotations

import re
from typing import Annotated

import typer


def _non_empty(path: str | None) -> str | None:
    if path == "":
        raise typer.BadParameter("the path is empty")
    return path


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """Bytes of `500`, `1.5GiB` (powers of 1024) or `2GB` (powers of 1000)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: give bytes, or 500MB, or 1.5GiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


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
