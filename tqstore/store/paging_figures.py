"""What sessions' pools did in memory, as their checkpoints tell: counters other processes can read.

A checkpoint has the counters of the pool that held its pages when it was saved; several sessions
may have been of one pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tqstore.store.records import SessionInfo

_IDENTITY = "pool"


@dataclass(frozen=True)
class SessionPaging:
    """A session's pool as of its last save."""

    name: str
    created_ns: int
    paging: dict[str, int]


def of_sessions(sessions: Iterable[SessionInfo]) -> tuple[SessionPaging, ...]:
    """Those whose checkpoint has counters, newest first."""
    told = [
        SessionPaging(info.name, info.created_ns, info.paging) for info in sessions if info.paging
    ]
    return tuple(sorted(told, key=lambda session: -session.created_ns))


def summed(sessions: Iterable[SessionPaging]) -> dict[str, int]:
    """Sums over pools, each once, as of the last save of any of its sessions."""
    newest: dict[int, SessionPaging] = {}
    for session in sorted(sessions, key=lambda session: session.created_ns):
        newest[session.paging.get(_IDENTITY, 0)] = session
    total: Counter[str] = Counter()
    for session in newest.values():
        total.update(session.paging)
    del total[_IDENTITY]
    return dict(total)
