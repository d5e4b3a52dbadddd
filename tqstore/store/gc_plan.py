"""What gc would do, found without changing or locking anything.

Owns the decision what is garbage.  A plan is only a proposal: `gc_sweep` looks again, under the
exclusive lock, before it deletes anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqstore.errors import Corrupt, TqStoreError
from tqstore.spec import PageSpec
from tqstore.store.eviction_order import Evictable, eviction_order
from tqstore.store.gc_census import PackCensus, count_kept, take_census
from tqstore.store.leftovers import Leftover, find_leftovers
from tqstore.store.references import References, SessionUse

if TYPE_CHECKING:
    from tqstore.store.namespace_store import NamespaceStore
    from tqstore.store.page_store import PageStore
    from tqstore.store.records import NamespaceInfo

GRACE_SECONDS = 600.0
COMPACT_AT = 0.5
_FUTURE_NS = 86_400 * 10**9  # a time stamp further ahead is a clock's mistake


@dataclass(frozen=True)
class GcOptions:
    """What counts as garbage.

    `grace_seconds`: pages used within it stay, for the caches that have not been saved yet.
    `compact_at`: share of a pack that must be garbage for the rest to be copied out of it.
    `keeps_history`: keep pages of windowed layers that lie before what a resume needs.
    `drops_expired`: sessions whose time is over go.  `drops_quarantine`: so does what repair set
    aside.  `purged`: blocks that go at once, wherever no session needs them, and then nothing
    else does, be there none of them.
    """

    grace_seconds: float = GRACE_SECONDS
    compact_at: float = COMPACT_AT
    keeps_history: bool = True
    drops_expired: bool = True
    drops_quarantine: bool = False
    purged: frozenset[bytes] | None = None

    def is_fresh(self, used_ns: int, now_ns: int) -> bool:
        age = now_ns - used_ns
        return -_FUTURE_NS < age < self.grace_seconds * 1e9


@dataclass(frozen=True)
class DoomedPack:
    """A pack to delete, after the pages of it that are needed were copied.

    `freed_nbytes` is what that frees: the whole pack, or the garbage in it.  `needed_pages` of it
    are needed; if they have become more, the pack stays.
    """

    namespace_id: bytes
    spec: PageSpec
    number: int
    nbytes: int
    freed_nbytes: int
    needed_pages: int
    why: str
    is_compacted: bool = False
    is_forced: bool = False  # though it was used just now: a purge


@dataclass(frozen=True)
class NamespaceUse:
    """One namespace: its bytes, how many sessions are of it, and why it goes or is left alone."""

    id: bytes
    nbytes: int
    num_sessions: int
    why: str
    is_doomed: bool = False


@dataclass(frozen=True)
class GcPlan:
    """In the order of the sweep.  `problems` says what is damaged and left alone.

    Of an unreadable checkpoint the file alone is: its pages are not known to be needed.
    """

    options: GcOptions
    leftovers: tuple[Leftover, ...] = ()
    sessions: tuple[SessionUse, ...] = ()
    packs: tuple[DoomedPack, ...] = ()
    namespaces: tuple[NamespaceUse, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def freed_nbytes(self) -> int:
        return (
            sum(leftover.nbytes for leftover in self.leftovers)
            + sum(session.nbytes for session in self.sessions)
            + sum(pack.freed_nbytes for pack in self.packs)
        )

    @property
    def doomed_namespaces(self) -> tuple[NamespaceUse, ...]:
        return tuple(use for use in self.namespaces if use.is_doomed)

    @property
    def is_empty(self) -> bool:
        return not (self.leftovers or self.sessions or self.packs or self.doomed_namespaces)


def plan_gc(
    store: PageStore,
    options: GcOptions | None = None,
    *,
    now_ns: int | None = None,
    without: Sequence[SessionUse] = (),
) -> GcPlan:
    """Everything that could be collected now.  Reads checkpoints and pack headers, writes nothing.

    `without`: sessions that go as well, with what only they need.
    Raises Incompatible if a checkpoint is of a newer format: what it needs cannot be known.
    """
    options = options or GcOptions()
    planner = _Planner(store, options, time.time_ns() if now_ns is None else now_ns)
    return planner.plan(without)


class _Planner:
    def __init__(self, store: PageStore, options: GcOptions, now_ns: int) -> None:
        self.store = store
        self.options = options
        self.now_ns = now_ns
        self.problems: list[str] = []

    def plan(self, without: Sequence[SessionUse]) -> GcPlan:
        expired = [*without, *self._expired()]
        keeps = self.options.keeps_history
        references = References(self.store.root, keeps_history=keeps, without=expired)
        self.problems += map(self._of_unreadable, references.damaged.values())
        uses: list[NamespaceUse] = []
        orphans: list[DoomedPack] = []
        others: list[DoomedPack] = []
        for info in self.store.namespaces():
            if info.namespace is None:
                uses.append(self._unreadable(info, references))
                continue
            ns = self.store.namespace(info.namespace)
            has_sessions = references.has_namespace(info.id)
            packs = [self._doomed(ns, spec, references) for spec in info.namespace.page_specs]
            (others if has_sessions else orphans).extend([pack for part in packs for pack in part])
            num_fresh = sum(len(ns.index(s).numbers) for s in info.namespace.page_specs)
            num_fresh -= sum(map(len, packs))
            is_doomed = not has_sessions and not num_fresh and not self._has_faults(ns)
            why = "no session is of it" if not has_sessions else "in use"
            if not has_sessions and not is_doomed:
                why = "no session is of it yet: pages were used just now"
            num_sessions = references.num_sessions(info.id)
            uses.append(NamespaceUse(info.id, info.nbytes, num_sessions, why, is_doomed))
        leftovers = find_leftovers(
            self.store.root,
            lambda time_ns: self.options.is_fresh(time_ns, self.now_ns),
            with_quarantine=self.options.drops_quarantine,
        )
        return GcPlan(
            self.options,
            tuple(leftovers),
            tuple(expired),
            (*orphans, *others),
            tuple(uses),
            tuple(self.problems),
        )

    def _of_unreadable(self, error: Corrupt) -> str:
        """What a checkpoint needs that cannot be read is not known, so nothing of it is kept."""
        grace = self.options.grace_seconds
        when = f", once unused for {grace:g} s" if grace else ""
        return (
            f"{error}. Pages that only this checkpoint names count as garbage{when}: put a copy "
            "of it back before gc runs"
        )

    def _expired(self) -> list[SessionUse]:
        if not self.options.drops_expired:
            return []
        sessions = References(self.store.root).sessions
        return [session for session in sessions if is_expired(session, self.now_ns)]

    def _unreadable(self, info: NamespaceInfo, references: References) -> NamespaceUse:
        """A damaged one that no session is of is garbage; one of a newer release is not ours."""
        self.problems.append(info.problem or "a namespace cannot be read")
        try:
            self.store.stored_namespace(info.id)
        except Corrupt:
            if not references.has_namespace(info.id):
                return NamespaceUse(
                    info.id, info.nbytes, 0, "is damaged, no session is of it", True
                )
        except TqStoreError:
            pass
        num_sessions = references.num_sessions(info.id)
        return NamespaceUse(info.id, info.nbytes, num_sessions, "cannot be read: left alone")

    def _has_faults(self, ns: NamespaceStore) -> bool:
        faults = [str(error) for index in ns.indexes for error in index.faults.values()]
        self.problems += faults
        return bool(faults)

    def _doomed(
        self, ns: NamespaceStore, spec: PageSpec, references: References
    ) -> list[DoomedPack]:
        needs = references.needs(ns.id)
        packs = list(take_census(ns.index(spec), self.problems))
        count_kept(packs, needs)
        order = eviction_order(
            [Evictable(p.number, p.used_ns, p.blocks, p.parents) for p in packs if not p.kept]
        )
        by_number = {pack.number: pack for pack in packs}
        candidates = [by_number[n] for n in order]
        candidates += sorted((p for p in packs if p.kept), key=lambda pack: pack.used_ns)
        found = (self._doom(ns, spec, pack) for pack in candidates)
        return [doomed for doomed in found if doomed is not None]

    def _doom(self, ns: NamespaceStore, spec: PageSpec, pack: PackCensus) -> DoomedPack | None:
        purged = self.options.purged
        is_forced = purged is not None and not purged.isdisjoint(pack.blocks)
        if purged is not None and not is_forced:
            return None
        if not is_forced and self.options.is_fresh(pack.used_ns, self.now_ns):
            return None
        garbage = pack.num_pages - pack.kept
        if not pack.kept:
            why = "its pages are stored twice" if pack.needed else "no session needs its pages"
            freed = pack.nbytes
        elif garbage and (garbage >= self.options.compact_at * pack.num_pages or is_forced):
            why = f"{garbage} of its {pack.num_pages} pages are not needed"
            freed = garbage * pack.stride
        else:
            return None
        return DoomedPack(
            ns.id,
            spec,
            pack.number,
            pack.nbytes,
            freed,
            pack.needed,
            why,
            is_compacted=pack.kept > 0,
            is_forced=is_forced,
        )


def is_expired(session: SessionUse, now_ns: int) -> bool:
    return 0 < session.expires_ns <= now_ns
