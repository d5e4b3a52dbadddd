"""A gc plan and what a sweep did, drawn as tables or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tqstore.cli.catalog_view import SHORT_ID
from tqstore.cli.output import Output, console, fitted, print_json, table
from tqstore.cli.printable import counted, printable, size
from tqstore.store.eviction import evict
from tqstore.store.gc_plan import GcOptions, GcPlan
from tqstore.store.gc_sweep import GcReport, sweep
from tqstore.store.names import pack_name
from tqstore.store.page_store import PageStore

_TOO_LARGE_EXIT = 1


def show_plan(store: PageStore, plan: GcPlan, *, as_json: bool) -> None:
    if as_json:
        print_json({"store": str(store.path), **plan_fields(plan)})
        return
    out = console()
    made = table("WHAT", "WHERE", "FREES", "WHY", right=("FREES",))
    for leftover in plan.leftovers:
        kind = "folder" if leftover.is_folder else "leftover"
        made.add_row(kind, printable("/".join(leftover.path)), size(leftover.nbytes), leftover.why)
    for session in plan.sessions:
        made.add_row("session", printable(session.name), size(session.nbytes), "its time is over")
    for pack in plan.packs:
        where = f"{pack.namespace_id.hex()[:SHORT_ID]}/{pack_name(pack.number)}"
        kind = "rewrite" if pack.is_compacted else "pack"
        made.add_row(kind, where, size(pack.freed_nbytes), pack.why)
    for use in plan.doomed_namespaces:
        made.add_row("namespace", use.id.hex()[:SHORT_ID], "", use.why)
    if not plan.is_empty:
        out.print(fitted(out, made, ("WHY",)))
        out.print()
    _show_problems(out, plan)
    out.print(f"{size(plan.freed_nbytes)} would be freed in {printable(str(store.path))}")


def show_report(store: PageStore, plan: GcPlan, *, as_json: bool) -> None:
    """Sweeps, with a bar on a terminal, and says what was done."""
    err = console(is_stderr=True)
    columns = (TextColumn("collecting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(plan.packs))
        report = sweep(store, plan, on_progress=lambda done, _all: bar.update(task, completed=done))
    if as_json:
        print_json({"store": str(store.path), **asdict(report), "problems": list(plan.problems)})
        return
    out = console()
    _show_problems(out, plan)
    _print_report(out, store, report)


def show_room(store: PageStore, max_bytes: int, grace_seconds: float, *, as_json: bool) -> None:
    """Evicts down to `max_bytes`; exit code 1, and why, if what may go is not enough."""
    before = store.budget.usage.total()
    reports = []
    if before > max_bytes:
        reports = evict(store, before - max_bytes, grace_seconds=grace_seconds)
    used = store.budget.usage.total()
    why = _why_no_less(store, grace_seconds) if used > max_bytes else []
    if as_json:
        done = [asdict(report) for report in reports]
        print_json({"store": str(store.path), "nbytes": used, "reports": done, "why": why})
    else:
        out = console()
        for report in reports:
            _print_report(out, store, report)
        out.print(f"{size(used)} are used, {size(max_bytes)} asked for")
        for line in why:
            out.print(line, style="red")
    if used > max_bytes:
        raise typer.Exit(_TOO_LARGE_EXIT)


def _why_no_less(store: PageStore, grace_seconds: float) -> list[str]:
    """What stays in a store out of which all has gone that may go."""
    everything = GcOptions(grace_seconds=0, keeps_history=False, drops_quarantine=True)
    fresh = store.plan_gc(everything).freed_nbytes
    num_sessions = len(store.sessions())
    why = []
    if fresh:
        why.append(f"{size(fresh)} stay because of --grace: used in the last {grace_seconds:g} s")
    if num_sessions:
        why.append(
            f"{counted(num_sessions, 'session')} without an end, or not at it: what they need "
            "stays until `tqstore rm` or `purge` removes them"
        )
    return why


def plan_fields(plan: GcPlan) -> dict[str, Any]:
    return {
        "freed_nbytes": plan.freed_nbytes,
        "leftovers": [{**asdict(item), "path": "/".join(item.path)} for item in plan.leftovers],
        "sessions": [asdict(session) for session in plan.sessions],
        "packs": [{**vars(pack), "spec": pack.spec.name} for pack in plan.packs],
        "namespaces": [asdict(use) for use in plan.namespaces],
        "problems": list(plan.problems),
    }


def _print_report(out: Output, store: PageStore, report: GcReport) -> None:
    for skipped in report.skipped:
        out.print(f"left: {printable(skipped)}")
    done = [
        (report.packs_deleted, counted(report.packs_deleted, "pack")),
        (report.packs_compacted, f"{report.packs_compacted:,} rewritten before"),
        (report.sessions_expired, counted(report.sessions_expired, "expired session")),
        (report.namespaces_deleted, counted(report.namespaces_deleted, "namespace")),
        (report.leftovers_deleted, counted(report.leftovers_deleted, "leftover")),
    ]
    told = ", ".join(what for count, what in done if count)
    told = f"deleted {told}" if told else "nothing to delete"
    out.print(f"{told}; {size(report.freed_nbytes)} freed in {printable(str(store.path))}")


def _show_problems(out: Output, plan: GcPlan) -> None:
    for problem in plan.problems:
        out.print(f"left alone: {printable(problem)}", style="red")
