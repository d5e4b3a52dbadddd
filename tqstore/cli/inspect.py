"""`tqstore inspect`: a session, a pack, or one page of either, with what its bytes look like."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption


def inspect(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SESSION|PACK",
            help="A session's name, or a pack's path (with a /): a file, or ns/... of the store.",
        ),
    ],
    page: Annotated[
        int | None,
        typer.Option(
            "--page",
            "-p",
            min=0,
            metavar="N",
            help="A page: block N of a session, slot N of a pack.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer", "-l", min=0, metavar="L", help="The layer of a session's page [0]."
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream", metavar="NAME", help="Draw the histogram of one stream of the page."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a session or a pack is made of, or one page with statistics of its streams."""
    if page is None and (layer is not None or stream is not None):
        raise typer.BadParameter("--layer and --stream need --page")
    from tqstore.cli.opening import opened_store
    from tqstore.cli.pack_view import find_pack, show_pack, show_pack_page
    from tqstore.cli.session_view import show_session, show_session_page

    if os.sep not in target:
        with opened_store(ctx, store) as opened:
            if page is None:
                show_session(opened, target, as_json=as_json)
            else:
                show_session_page(opened, target, page, layer or 0, stream, as_json=as_json)
        return
    if layer is not None:
        raise typer.BadParameter("--layer is for sessions: a slot of a pack has one layer")
    path = find_pack(target, ctx.obj if store is None else store)
    if page is None:
        show_pack(path, as_json=as_json)
    else:
        show_pack_page(path, page, stream, as_json=as_json)
