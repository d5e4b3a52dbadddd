"""`tqstore purge`: a session's pages gone for good, at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption

_KEPT_BACK_EXIT = 1


def purge(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a session and every page no other session holds; say what others still hold.

    Exit code 1 if something had to be kept back.
    """
    from tqstore.cli.opening import changed_store
    from tqstore.cli.output import console, print_json
    from tqstore.cli.printable import counted, printable, size

    with changed_store(ctx, store) as opened:
        report = opened.purge(session)
    if as_json:
        print_json(asdict(report))
    else:
        out = console()
        out.print(
            f"purged {printable(session)}: {counted(report.packs_deleted, 'pack')} deleted, "
            f"{size(report.freed_nbytes)} freed"
        )
        for name, count in report.shared.items():
            of_all = counted(report.blocks, "block")
            out.print(f"kept: {printable(name)} holds {count:,} of its {of_all} too")
        for what in report.kept_back:
            out.print(f"kept back: {printable(what)}", style="red")
    if report.kept_back:
        raise typer.Exit(_KEPT_BACK_EXIT)
