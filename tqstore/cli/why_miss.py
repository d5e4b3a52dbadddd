"""`tqstore why-miss`: why a session or a prompt is not, or not wholly, in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption

_MISS_EXIT = 1


def why_miss(
    ctx: typer.Context,
    session: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="A session's name.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", metavar="FILE", help="A file of token ids: JSON, or separated by spaces."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", metavar="HEX", help="Only the namespace that begins so, for --tokens."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a session cannot be resumed whole, or tokens find no longer prefix.

    Exit code 0 if all is there, 1 for a miss.
    """
    if (session is None) == (tokens is None):
        raise typer.BadParameter("give a session, or --tokens FILE")
    from tqstore.cli.miss_view import explain_session, explain_tokens, show_misses
    from tqstore.cli.opening import opened_store

    with opened_store(ctx, store) as opened:
        if session is not None:
            misses = explain_session(opened, session)
        else:
            assert tokens is not None, "checked above"
            misses = explain_tokens(opened, tokens, namespace)
        show_misses(opened, misses, of_session=session is not None, as_json=as_json)
    if not any(miss.kind == "hit" for miss in misses.values()):
        raise typer.Exit(_MISS_EXIT)
