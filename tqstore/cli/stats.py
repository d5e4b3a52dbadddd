"""`tqstore stats`: what a store holds and what of it is garbage."""

from __future__ import annotations

import typer

from tqstore.cli.options import JsonOption, StoreOption


def stats(ctx: typer.Context, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show a store's bytes by what they are for, and what its sessions' pages did in memory."""
    from dataclasses import asdict

    from tqstore.cli.opening import opened_store
    from tqstore.cli.output import console, fields, fitted, print_json, table
    from tqstore.cli.paging_view import memory_line, paging_table
    from tqstore.cli.printable import counted, printable, size

    with opened_store(ctx, store) as opened:
        found = opened.stats()
        path = str(opened.path)
    if as_json:
        print_json({"store": path, **asdict(found)})
        return
    out = console()
    out.print(
        fields(
            {
                "store": path,
                "all": size(found.nbytes),
                "packs": f"{size(found.pack_nbytes)}: {counted(found.num_packs, 'pack')}, "
                f"{counted(found.num_pages, 'page')}",
                "checkpoints": f"{size(found.checkpoint_nbytes)}: "
                f"{counted(found.num_sessions, 'session')}",
                "window history": f"{size(found.history_nbytes)}: pages that left their layer's "
                "window, kept to go back to any block (gc --drop-history frees them)",
                "set aside": size(found.quarantine_nbytes),
                "garbage": f"{size(found.garbage_nbytes)}, of which gc takes "
                f"{size(found.collectable_nbytes)} now",
            }
        )
    )
    if found.namespaces:
        made = table("NAMESPACE", "BYTES", "SESSIONS", "STATE", right=("BYTES", "SESSIONS"))
        for use in found.namespaces:
            made.add_row(use.id.hex()[:12], size(use.nbytes), str(use.num_sessions), use.why)
        out.print()
        out.print(made)
    if found.sessions:
        out.print(f"\nMemory, as of each session's last save: {memory_line(found.paging)}\n")
        made = paging_table(found.sessions)
        out.print(fitted(out, made, ("SAVED", "WAITS", "RESTORED", "SPILLED")))
    for problem in found.problems:
        out.print(f"damaged: {printable(problem)}", style="red")
