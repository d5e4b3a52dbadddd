"""Purge: a session and its pages gone for good, and what others still hold of it.

The session goes first: a crash in between leaves its pages as garbage, never a session without.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tqstore.errors import NotFound, TqStoreError
from tqstore.store import sessions, tombstones
from tqstore.store.folder import Folder
from tqstore.store.gc_plan import GcOptions, plan_gc
from tqstore.store.gc_sweep import sweep
from tqstore.store.names import session_folder
from tqstore.store.references import References
from tqstore.store.root import SESSIONS

if TYPE_CHECKING:
    from tqstore.store.page_store import PageStore


@dataclass(frozen=True)
class PurgeReport:
    """What a purge did.  `shared` maps sessions to the number of the purged session's blocks that
    they hold too: those stay.  `kept_back` says what could not be deleted, and why."""

    session: str
    blocks: int
    packs_deleted: int
    freed_nbytes: int
    shared: dict[str, int] = field(default_factory=dict)
    kept_back: tuple[str, ...] = ()


def purge(store: PageStore, name: str) -> PurgeReport:
    """Removes a session and, at once, every page that no other session has a part in.

    Also empties what repair has set aside and the record of what is gone, which may tell of it.
    Raises NotFound if there is no such session, Conflict if a commit stays open elsewhere.
    """
    blocks = _blocks_of(store.root, name)
    unread = _unreadable(store.root, name)
    store.remove(name)
    shared = _shared(store.root, blocks)
    options = GcOptions(
        grace_seconds=0,
        drops_expired=False,
        drops_quarantine=True,
        purged=frozenset().union(*blocks.values()),
    )
    plan = plan_gc(store, options)
    plan = replace(plan, namespaces=tuple(u for u in plan.namespaces if u.id in blocks))
    report = sweep(store, plan)
    tombstones.forget_gone(store.root)
    return PurgeReport(
        session=name,
        blocks=sum(map(len, blocks.values())),
        packs_deleted=report.packs_deleted,
        freed_nbytes=report.freed_nbytes,
        shared=shared,
        kept_back=(*unread, *plan.problems, *report.skipped),
    )


def _blocks_of(root: Folder, name: str) -> dict[bytes, set[bytes]]:
    """Blocks of all the session's checkpoints that can be read, by namespace."""
    found: dict[bytes, set[bytes]] = {}
    for summary in sessions.summaries(root, session_folder(name)):
        found.setdefault(summary.namespace_id, set()).update(summary.block_hashes)
    return found


def _unreadable(root: Folder, name: str) -> list[str]:
    """What is to say of each checkpoint whose blocks cannot be known."""
    found: list[str] = []
    with (
        contextlib.suppress(NotFound),
        root.child(SESSIONS) as parent,
        parent.child(sessions.folder_of(parent, name)) as folder,
    ):
        for sequence in sessions.sequences(folder):
            try:
                sessions.read_summary(folder, sequence)
            except NotFound:
                continue  # pruned meanwhile
            except TqStoreError as error:
                found.append(f"pages that only this checkpoint named, for gc: {error}")
    return found


def _shared(root: Folder, blocks: dict[bytes, set[bytes]]) -> dict[str, int]:
    shared: dict[str, int] = {}
    for session in References(root).sessions:
        for summary in sessions.summaries(root, session.folder_name):
            common = blocks.get(summary.namespace_id, set()) & set(summary.block_hashes)
            if common:
                shared[session.name] = max(len(common), shared.get(session.name, 0))
    return shared
