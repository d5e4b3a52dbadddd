"""`tqstore ls`: the sessions of a store, what they take, and what they need."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption


def ls(
    ctx: typer.Context,
    store: StoreOption = None,
    packs: Annotated[
        bool, typer.Option("--packs", help="List packs instead: the files that pages are in.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the sessions of a store: tokens, bytes, codecs, model, age.

    OWN is what would become free without the session, SHARED what other sessions need too.
    """
    from tqstore.cli.catalog_view import show_packs, show_sessions
    from tqstore.cli.opening import opened_store

    with opened_store(ctx, store) as opened:
        show = show_packs if packs else show_sessions
        show(opened, as_json=as_json)
