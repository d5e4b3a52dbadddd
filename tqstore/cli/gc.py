"""`tqstore gc`: what no session needs is deleted, or shown."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption, nbytes_of


def gc(
    ctx: typer.Context,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="Spare pages used within this time: running caches may not have been saved yet.",
        ),
    ] = 600.0,
    compact_at: Annotated[
        float,
        typer.Option(
            "--compact-at",
            min=0,
            max=1,
            metavar="SHARE",
            help="Rewrite packs of which at least this share is garbage.",
        ),
    ] = 0.5,
    drops_history: Annotated[
        bool,
        typer.Option(
            "--drop-history",
            help="Also pages of windowed layers that only going back to an earlier block needs.",
        ),
    ] = False,
    drops_quarantine: Annotated[
        bool, typer.Option("--drop-quarantine", help="Also what repair has set aside.")
    ] = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Instead, make room until the store takes no more than this (500MB, 1.5GiB).",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete what no session needs: pages, namespaces, leftovers, sessions at their end.

    Works beside running readers and writers, which wait for some milliseconds at most.
    """
    from tqstore.cli.gc_view import show_plan, show_report, show_room
    from tqstore.cli.opening import changed_store, opened_store
    from tqstore.store.gc_plan import GcOptions

    if max_bytes is not None and is_dry_run:
        raise typer.BadParameter("--dry-run and --max-bytes do not go together")
    if max_bytes is not None:
        _refuse_beside_max_bytes(ctx)
    options = GcOptions(
        grace_seconds=grace,
        compact_at=compact_at,
        keeps_history=not drops_history,
        drops_quarantine=drops_quarantine,
    )
    if is_dry_run:
        with opened_store(ctx, store) as opened:
            show_plan(opened, opened.plan_gc(options), as_json=as_json)
        return
    with changed_store(ctx, store) as opened:
        if max_bytes is None:
            show_report(opened, opened.plan_gc(options), as_json=as_json)
        else:
            show_room(opened, nbytes_of(max_bytes), grace, as_json=as_json)


def _refuse_beside_max_bytes(ctx: typer.Context) -> None:
    """What goes to make room, and in which order, is not for options to say."""
    for name in ("compact_at", "drops_history", "drops_quarantine"):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = next(p.opts[0] for p in ctx.command.params if p.name == name)
            raise typer.BadParameter(
                f"{option} and --max-bytes do not go together: making room takes window history "
                "and what was set aside as far as it is needed"
            )
