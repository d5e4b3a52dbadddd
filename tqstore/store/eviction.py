"""Making room in a store that is at its budget: how much goes, and in which order.

Owns the stages.  Each is a gc plan like any other, swept until there is room: what nobody needs,
least recently used first; then sessions whose time is over, the longest unused first; then pages
of windowed layers that no resume needs.  Sessions without an end, or not at it, are never touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tqstore.store.gc_plan import GRACE_SECONDS, GcOptions, GcPlan, is_expired, plan_gc
from tqstore.store.gc_sweep import GcReport, sweep
from tqstore.store.references import References

if TYPE_CHECKING:
    from tqstore.store.page_store import PageStore


def evict(
    store: PageStore, nbytes: int, *, namespace: str = "", grace_seconds: float = GRACE_SECONDS
) -> list[GcReport]:
    """Deletes until `nbytes` are free again or nothing is left that may go.

    `namespace` (its folder's name) keeps to the packs of one.  Raises Conflict, BackendFailed.
    """
    reports: list[GcReport] = []
    freed = 0
    for plan in _stages(store, grace_seconds):
        if namespace:
            plan = _within(plan, namespace)
        if not plan.is_empty:
            reports.append(sweep(store, plan, until_nbytes=nbytes - freed))
            freed += reports[-1].freed_nbytes
        if freed >= nbytes:
            break
    return reports


def _stages(store: PageStore, grace_seconds: float) -> Iterator[GcPlan]:
    """Plans of rising severity, each made when the one before was not enough."""
    options = GcOptions(grace_seconds, drops_expired=False, drops_quarantine=True)
    yield plan_gc(store, options)
    now_ns = time.time_ns()
    sessions = References(store.root).sessions  # least recently used first
    over = [
        session
        for session in sessions
        if is_expired(session, now_ns) and not options.is_fresh(session.used_ns, now_ns)
    ]
    count = 1
    while over:  # twice as many each time: a plan looks at the whole store
        yield plan_gc(store, options, without=over[:count])
        del over[:count]
        count *= 2
    yield plan_gc(store, replace(options, keeps_history=False))


def _within(plan: GcPlan, namespace: str) -> GcPlan:
    chosen = bytes.fromhex(namespace)
    return replace(
        plan,
        leftovers=(),
        sessions=tuple(s for s in plan.sessions if s.namespace_id == chosen),
        packs=tuple(pack for pack in plan.packs if pack.namespace_id == chosen),
        namespaces=(),
    )
