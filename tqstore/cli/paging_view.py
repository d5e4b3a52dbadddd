"""What pools of hot pages did, drawn for `stats` and `inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from tqstore.cli.output import table
from tqstore.cli.printable import age, counted, size
from tqstore.store.paging_figures import SessionPaging


def memory_line(paging: Mapping[str, int]) -> str:
    """Occupancy and counters in a line.  What a checkpoint does not have counts as 0."""
    if not paging:
        return "not known"
    get = paging.get
    return (
        f"{occupancy(paging)}; {counted(get('hits', 0), 'hit')}, "
        f"{get('restored_pages', 0):,} restored, "
        f"{get('streamed_pages', 0):,} streamed ({size(get('streamed_nbytes', 0))}), "
        f"{get('spilled_pages', 0):,} spilled ({size(get('spilled_nbytes', 0))}), "
        f"{get('evicted_pages', 0):,} evicted; "
        f"{counted(get('spill_waits', 0), 'wait')} for spills, {get('failed_spills', 0):,} failed"
    )


def occupancy(paging: Mapping[str, int]) -> str:
    used, budget = paging.get("used_nbytes", 0), paging.get("budget_nbytes", 0)
    share = f" ({used / budget:.0%})" if budget else ""
    return f"{size(used)} of {size(budget)}{share}"


def paging_table(sessions: Iterable[SessionPaging]) -> Table:
    numbers = ("HOT", "HITS", "RESTORED", "STREAMED", "SPILLED", "WAITS", "SAVED")
    made = table("SESSION", *numbers, right=numbers)
    for session in sessions:
        counts = [
            f"{session.paging.get(name, 0):,}"
            for name in ("hits", "restored_pages", "streamed_pages", "spilled_pages", "spill_waits")
        ]
        made.add_row(
            session.name, occupancy(session.paging), *counts, f"{age(session.created_ns)} ago"
        )
    return made
