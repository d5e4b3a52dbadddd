"""`tqstore rm`: sessions are forgotten; what only they needed is gc's."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption

_MIN_DIGITS = 8  # as `stats` shows them or fewer, but not so few that a typing error fits


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
            help="Instead, every session of the namespace that begins so (8 digits or more), as "
            "of a model no longer used.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove sessions.  Their pages stay until gc, and longer if other sessions need them."""
    if bool(sessions) == (namespace is not None):
        raise typer.BadParameter("give sessions or --namespace, one of the two")
    if namespace is not None and len(namespace) < _MIN_DIGITS:
        raise typer.BadParameter(
            f"--namespace: give at least {_MIN_DIGITS} digits of the namespace to remove"
        )
    from tqstore.cli.opening import changed_store
    from tqstore.cli.output import console, print_json
    from tqstore.cli.printable import printable
    from tqstore.cli.which import find_namespace
    from tqstore.store.sessions import check_there

    with changed_store(ctx, store) as opened:
        names = list(dict.fromkeys(sessions or ()))
        if namespace is not None:
            chosen = find_namespace(opened, namespace)
            names = [s.name for s in opened.sessions() if s.namespace_id == chosen]
        check_there(opened.root, names)
        out = console()
        for name in names:
            opened.remove(name)
            if not as_json:  # at once: should the next one fail, this one is gone all the same
                out.print(f"removed {printable(name)}")
        if as_json:
            print_json({"store": str(opened.path), "removed": names})
        else:
            out.print("`tqstore gc` frees what nothing needs any more")
