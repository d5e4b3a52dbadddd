"""Carrying out a gc plan, in slices that keep writers waiting only briefly.

Owns every deletion of packs, namespaces and leftovers.  A slice first copies what is needed out of
packs (a commit like any other), then takes the exclusive lock, looks again whether anything has
come to need what goes, raises the number in LOCK and only then unlinks.  Whenever it stops, the
store is whole; the next plan finds what was left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from tqstore.errors import Corrupt, InvalidInput, NotFound, StoreFull, TqStoreError
from tqstore.format.page import PageKey
from tqstore.spec import PageSpec
from tqstore.store import tombstones
from tqstore.store.folder import Folder
from tqstore.store.gc_census import masks_of
from tqstore.store.gc_plan import DoomedPack, GcPlan, NamespaceUse
from tqstore.store.leftovers import Leftover
from tqstore.store.lock import exclusive_lock
from tqstore.store.names import pack_name
from tqstore.store.namespace_tree import has_fresh_packs, remove_tree
from tqstore.store.references import Masks, References, SessionUse
from tqstore.store.root import NAMESPACES, SESSIONS
from tqstore.store.sessions import delete_checkpoints, sequences

if TYPE_CHECKING:
    from tqstore.store.namespace_store import NamespaceStore
    from tqstore.store.pack_index import PackIndex
    from tqstore.store.page_store import PageStore

_SLICE_PACKS = 16  # deleted under one exclusive lock: 256 MiB at most, some milliseconds
OnProgress = Callable[[int, int], object]


@dataclass
class GcReport:
    """What a sweep did; `skipped` says what it left that the plan had, and why."""

    packs_deleted: int = 0
    packs_compacted: int = 0
    pages_copied: int = 0
    sessions_expired: int = 0
    namespaces_deleted: int = 0
    leftovers_deleted: int = 0
    freed_nbytes: int = 0
    skipped: list[str] = field(default_factory=list)


def sweep(
    store: PageStore,
    plan: GcPlan,
    *,
    until_nbytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> GcReport:
    """Does what `plan` proposes as far as it still holds; stops once `until_nbytes` are freed.

    `on_progress` is called with packs done and planned.  Raises InvalidInput on a store opened for
    reading, Conflict if some process keeps a commit open, BackendFailed.
    """
    if store.mode == "r":
        raise InvalidInput(
            f"the store at {store.path} was opened with mode='r'",
            doing="collecting garbage",
            remedy="Open it with mode='a', or only plan",
        )
    return _Sweep(store, plan, until_nbytes, on_progress or (lambda _done, _all: None)).run()


class _Sweep:
    def __init__(
        self, store: PageStore, plan: GcPlan, until: int | None, on_progress: OnProgress
    ) -> None:
        self._store = store
        self._root = store.root
        self._plan = plan
        self._until = until
        self._on_progress = on_progress
        self._report = GcReport()
        keeps = plan.options.keeps_history
        self._expired_blocks = self._blocks_of(plan.sessions)
        self._references = References(store.root, keeps_history=keeps, without=plan.sessions)
        self._gone: dict[bytes, tombstones.Reason] = {}
        self._gone_sessions: dict[str, tombstones.Reason] = {}

    @property
    def _is_enough(self) -> bool:
        return self._until is not None and self._report.freed_nbytes >= self._until

    def run(self) -> GcReport:
        try:
            self._remove_leftovers(self._plan.leftovers)
            self._remove_sessions(self._plan.sessions)
            done = 0
            for (namespace_id, spec), packs in groupby(
                self._plan.packs, lambda pack: (pack.namespace_id, pack.spec)
            ):
                rest = list(packs)
                while rest and not self._is_enough:
                    count = self._slice_size(rest)
                    self._slice(namespace_id, spec, rest[:count])
                    del rest[:count]
                    done += count
                    self._on_progress(done, len(self._plan.packs))
            for use in self._plan.doomed_namespaces:
                if not self._is_enough:
                    self._remove_namespace(use)
        finally:
            self._bury()
        return self._report

    def _slice_size(self, packs: Sequence[DoomedPack]) -> int:
        """How many of the next packs to take at once: no more than are wanted."""
        if self._until is None:
            return min(len(packs), _SLICE_PACKS)
        freed = self._report.freed_nbytes
        for count, pack in enumerate(packs[:_SLICE_PACKS], 1):
            freed += pack.freed_nbytes
            if freed >= self._until:
                return count
        return min(len(packs), _SLICE_PACKS)

    # Sessions and leftovers

    def _blocks_of(self, sessions: Sequence[SessionUse]) -> set[bytes]:
        """Blocks of sessions that go, so that their misses say `expired`."""
        if not sessions:
            return set()
        everything = References(self._root)
        return {b for s in sessions for b in everything.needs(s.namespace_id)}

    def _remove_sessions(self, sessions: Sequence[SessionUse]) -> None:
        for session in sessions:
            with exclusive_lock(self._root), self._root.child(SESSIONS) as parent:
                try:
                    with parent.child(session.folder_name) as folder:
                        listed = sequences(folder)
                        if listed and listed[0] > session.sequence:
                            self._skip(f"session {session.name!r}: it was saved again")
                            continue
                        delete_checkpoints(folder)
                except NotFound:
                    continue
                parent.rmdir(session.folder_name)
                parent.sync()
            self._gone_sessions[session.folder_name] = "expired"
            self._report.sessions_expired += 1
            self._report.freed_nbytes += session.nbytes
        self._references.update()

    def _remove_leftovers(self, leftovers: Sequence[Leftover]) -> None:
        if not leftovers:
            return
        with exclusive_lock(self._root) as lock:
            if any(leftover.is_folder for leftover in leftovers):
                lock.raise_generation()  # a writer may rely on the folder
            for leftover in leftovers:
                with contextlib.suppress(NotFound), self._parent_of(leftover.path) as parent:
                    if leftover.is_folder:
                        is_gone = parent.rmdir(leftover.path[-1])
                    else:
                        is_gone = parent.status_of(leftover.path[-1]) is not None
                        parent.unlink(leftover.path[-1])
                    self._report.leftovers_deleted += is_gone
                    self._report.freed_nbytes += leftover.nbytes if is_gone else 0

    def _parent_of(self, path: tuple[str, ...]) -> Folder:
        if len(path) == 1:
            return self._root.duplicate()
        return self._root.descend(*path[:-1])

    # Packs

    def _slice(self, namespace_id: bytes, spec: PageSpec, doomed: Sequence[DoomedPack]) -> None:
        try:
            ns = self._store.namespace(self._store.stored_namespace(namespace_id))
            self._delete(ns, ns.index(spec), doomed)
        except NotFound as error:  # another gc was faster
            self._skip(str(error))

    def _delete(self, ns: NamespaceStore, index: PackIndex, doomed: Sequence[DoomedPack]) -> None:
        copied = self._copy_needed(ns, index, doomed)
        with exclusive_lock(self._root) as lock:
            self._references.update()
            going = [pack for pack in doomed if self._may_go(ns, index, pack, copied)]
            if not going:
                return
            lock.raise_generation()
            blocks = {pack.number: _blocks(index, pack.number) for pack in going}
            folder = index.folder()
            for pack in going:
                folder.unlink(pack_name(pack.number))
        folder.sync()
        gone = {block for masks in blocks.values() for block in masks}
        index.forget(list(blocks), gone if all(blocks.values()) else None)
        for pack in going:
            self._count(ns, pack, blocks[pack.number])

    def _copy_needed(
        self, ns: NamespaceStore, index: PackIndex, doomed: Sequence[DoomedPack]
    ) -> dict[int, dict[PageKey, int]]:
        """Makes sure that each needed page of `doomed` has a sound copy elsewhere.

        For each pack that may go: its needed pages and the pack that each stays in.
        """
        kept: dict[int, dict[PageKey, int]] = {}
        victims = {pack.number for pack in doomed}
        self._references.update()
        with self._store.commit() as commit:
            for pack in doomed:
                try:
                    needed = self._needed(ns, index, pack.number)
                    if needed is None:
                        continue
                    if len(needed) > pack.needed_pages:
                        self._skip(f"pack {pack.number}: its pages have come to be needed")
                        continue
                    places = {k: sound_copy(ns, index, k, victims) for k in needed}
                    missing = [key for key, number in places.items() if number is None]
                    if missing:
                        for key, number in commit.copy_pages(
                            ns, index.spec, pack.number, missing
                        ).items():
                            places[key] = number
                        self._report.pages_copied += len(missing)
                    kept[pack.number] = {k: n for k, n in places.items() if n is not None}
                except (Corrupt, StoreFull, NotFound) as error:
                    self._skip(str(error))
        return kept

    def _needed(self, ns: NamespaceStore, index: PackIndex, number: int) -> list[PageKey] | None:
        """Pages of a pack that checkpoints need, in slot order; None if the pack is gone."""
        header = index.header(number)
        if header is None:
            return None
        needs = self._references.needs(ns.id)
        return [(layer, b) for layer, b in header.page_keys if needs.get(b, 0) >> layer & 1]

    def _may_go(
        self,
        ns: NamespaceStore,
        index: PackIndex,
        pack: DoomedPack,
        copied: dict[int, dict[PageKey, int]],
    ) -> bool:
        """Looked at under the exclusive lock: nobody has come to need or use the pack since."""
        places = copied.get(pack.number)
        if places is None:
            return False
        status = index.folder().status_of(pack_name(pack.number))
        if status is None:
            return False
        options = self._plan.options
        if not pack.is_forced and options.is_fresh(status.st_mtime_ns, time.time_ns()):
            self._skip(f"pack {pack.number}: it was used just now")
            return False
        needed = self._needed(ns, index, pack.number)
        if needed is None or any(key not in places for key in needed):
            self._skip(f"pack {pack.number}: its pages have come to be needed")
            return False
        stays = {places[key] for key in needed}
        folder = index.folder()
        return all(folder.status_of(pack_name(number)) is not None for number in stays)

    def _count(self, ns: NamespaceStore, pack: DoomedPack, blocks: Masks) -> None:
        self._report.packs_deleted += 1
        self._report.packs_compacted += pack.is_compacted
        self._report.freed_nbytes += pack.freed_nbytes
        self._store.counters.packs_deleted += 1
        needs = self._references.needs(ns.id)
        for block in blocks:
            if block not in needs and block not in (self._plan.options.purged or ()):
                is_expired = block in self._expired_blocks
                self._gone[block] = "expired" if is_expired else "evicted"

    # Namespaces

    def _remove_namespace(self, use: NamespaceUse) -> None:
        """A namespace no session is of, its packs first and its description last."""
        with exclusive_lock(self._root) as lock:
            self._references.update()
            if self._references.has_namespace(use.id):
                self._skip(f"namespace {use.id.hex()}: a session of it was saved")
                return
            lock.raise_generation()
            name = use.id.hex()
            try:
                with self._root.child(NAMESPACES) as parent, parent.child(name) as own:
                    if has_fresh_packs(own, self._plan.options):
                        self._skip(f"namespace {name}: pages of it were used just now")
                        return
                    freed = remove_tree(own)
                    parent.rmdir(name)
                    parent.sync()
            except NotFound:
                return
            except Corrupt as error:
                self._skip(str(error))
                return
        self._report.namespaces_deleted += 1
        self._report.freed_nbytes += freed

    def _bury(self) -> None:
        """Notes what went.  A disk too full for it must not keep gc from making room."""
        if self._plan.options.purged is not None or not (self._gone or self._gone_sessions):
            return
        with contextlib.suppress(TqStoreError):
            tombstones.write_gone(self._root, self._gone, self._gone_sessions)

    def _skip(self, what: str) -> None:
        self._report.skipped.append(what)


def _blocks(index: PackIndex, number: int) -> Masks:
    with contextlib.suppress(TqStoreError):
        header = index.header(number)
        if header is not None:
            return masks_of(header)
    return {}


def sound_copy(ns: NamespaceStore, index: PackIndex, key: PageKey, victims: set[int]) -> int | None:
    """Number of a pack outside `victims` that has the page, read and checked; None if none has."""
    row = np.empty((1, index.spec.page_nbytes), np.uint8)
    for location in index.copies(*key):
        if location.pack not in victims:
            with contextlib.suppress(Corrupt, NotFound):
                ns.read_exactly(index.spec, [location], row)
                return location.pack
    return None
