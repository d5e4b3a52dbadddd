"""`tqstore convert`: a session in other codecs, and what that lost."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption


def convert(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="CODEC", help="Codec of the keys [as they are]."),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option("--values", metavar="CODEC", help="Codec of the values [as they are]."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Both codecs at once: card, small, balanced, near-lossless or exact.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="NAME", help="Make a new session [a new checkpoint of this one]."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Re-code a session's pages with other codecs, and say what that lost.

    A side that keeps its codec is copied bit for bit; the newest tokens, which are not in pages
    yet, stay exact.
    """
    if keys is None and values is None and preset is None:
        raise typer.BadParameter("give --keys, --values or --preset")
    from tqstore.presets import PRESETS

    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"--preset is one of {', '.join(PRESETS)}, not {preset!r}")
    from tqstore.cli.requirements import require

    require("mlx")
    from tqstore.cli.conversion_view import convert_with_progress, show_conversion
    from tqstore.cli.opening import changed_store

    with changed_store(ctx, store) as opened:
        report = convert_with_progress(opened, session, keys or preset, values or preset, to)
        show_conversion(session, report, as_json=as_json)
