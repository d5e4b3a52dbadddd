"""`tqstore rm`: sessions are forgotten; what only they needed is gc's."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption


def rm(
    ctx: typer.Context,
    sessions: Annotated[
        list[str] | None,
        typer.Argument(metavar="SESSION...", help="Names of sessions.", show_default=False),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="HEX",
            help="Every session of the namespace that begins so, as of a model no longer used.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove sessions.  Their pages stay until gc, and longer if other sessions need them."""
    if not sessions and namespace is None:
        raise typer.BadParameter("give sessions or --namespace")
    from tqstore.cli.opening import changed_store
    from tqstore.cli.output import console, print_json
    from tqstore.cli.printable import printable
    from tqstore.cli.which import find_namespace

    with changed_store(ctx, store) as opened:
        names = list(sessions or [])
        if namespace is not None:
            chosen = find_namespace(opened, namespace)
            names += [s.name for s in opened.sessions() if s.namespace_id == chosen]
        for name in names:
            opened.remove(name)
        if as_json:
            print_json({"store": str(opened.path), "removed": names})
        else:
            out = console()
            for name in names:
                out.print(f"removed {printable(name)}")
            out.print("`tqstore gc` frees what nothing needs any more")
