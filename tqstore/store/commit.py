"""A commit: pages and a checkpoint made durable, in the order that no crash can break.

Owns the writing side of the protocol in docs/durability.md.  Pages first, then the checkpoint that
names them; only when `publish` returns is anything promised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from tqstore.errors import BackendFailed, Conflict, InvalidInput, NotFound, TqStoreError
from tqstore.format.block_hash import BlockRecord
from tqstore.format.checkpoint import Checkpoint, encode_checkpoint, summarize
from tqstore.format.namespace import MAX_NBYTES as MAX_NAMESPACE_NBYTES
from tqstore.format.page import PageKey, Records, check_records
from tqstore.format.zarr_metadata import zarr_metadata
from tqstore.spec import PageSpec
from tqstore.store import sessions
from tqstore.store.budget import Budget
from tqstore.store.commit_checks import check_fits, check_keys
from tqstore.store.folder import Folder
from tqstore.store.lock import SharedLock
from tqstore.store.names import (
    MAX_SEQUENCE,
    checkpoint_name,
    session_folder,
)
from tqstore.store.namespace_store import NamespaceStore
from tqstore.store.pack_index import PackIndex
from tqstore.store.pack_writing import ensure_file, not_stored, packs_nbytes, write_packs
from tqstore.store.records import Counters, Location
from tqstore.store.root import NAMESPACE_FILE, NAMESPACES, PAGES, SESSIONS, ZARR_FILE

_MAX_ZARR_NBYTES = 1 << 20
_MAX_PUBLISH_ATTEMPTS = 8


class Commit:
    """Made by `PageStore.commit`, valid inside its `with`, used by one thread of one process."""

    def __init__(
        self,
        root: Folder,
        lock: SharedLock,
        counters: Counters,
        namespace_of: Callable[[bytes], NamespaceStore],
        budget: Budget,
        evict: Callable[[int, str], None],
    ) -> None:
        """`evict(nbytes, namespace)` makes room as far as it can, with the lock let go."""
        self._root = root
        self._lock = lock
        self._counters = counters
        self._namespace_of = namespace_of
        self._budget = budget
        self._evict = evict
        self.new_pages = 0
        self.nbytes_written = 0
        self._is_open = True
        self._refreshed: set[bytes] = set()

    def close(self) -> None:
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidInput("this commit is over", remedy="Write inside `with store.commit()`")
        self._lock.check_process()

    def add_pages(
        self,
        ns: NamespaceStore,
        spec: PageSpec,
        blocks: Sequence[BlockRecord],
        keys: Sequence[PageKey],
        records: Records,
    ) -> list[Location]:
        """Makes pages durable; where each one is.  One that is there already is not written.

        `keys[i]` = (layer, block hash) of `records[i]`, uint8 [n, page_nbytes], already stamped
        (`format.page.stamp_headers`).  `blocks` must hold every block that `keys` name.
        Raises InvalidInput for records, keys and blocks that don't fit together, StoreFull.
        """
        self._check_open()
        check_keys(ns.namespace, spec, blocks, keys)
        check_records(records, spec, keys)
        index = self._current_index(ns, spec)
        new = not_stored(index, keys)
        if new and self._make_room(self._needed_nbytes(ns, spec, blocks, new), ns):
            index = self._current_index(ns, spec)  # what was there may be gone
            new = not_stored(index, keys)
        self._counters.pages_deduplicated += len(keys) - len(new)
        if new:
            self._write_packs(ns, index, blocks, new, records)
        found = [index.find(layer, name) for layer, name in keys]
        locations = [location for location in found if location is not None]
        if len(locations) != len(keys):
            raise BackendFailed("a page vanished while it was being written", doing="adding pages")
        if len(new) < len(keys):  # what is relied on must not look forgotten to gc
            index.touch({location.pack for location in locations})
        return locations

    def copy_pages(
        self, ns: NamespaceStore, spec: PageSpec, pack: int, keys: Sequence[PageKey]
    ) -> dict[PageKey, int]:
        """Writes pages of a pack once more, durably; the number of the new pack of each.

        For gc, which then deletes the old one.  Raises Corrupt, NotFound, StoreFull.
        """
        self._check_open()
        index = self._current_index(ns, spec)
        locations = [at for key in keys for at in index.copies(*key) if at.pack == pack]
        header = index.header(pack)
        if header is None or len(locations) != len(keys):
            raise NotFound(f"pack {pack} no longer has the pages", doing="copying pages")
        records = np.empty((len(keys), spec.page_nbytes), np.uint8)
        ns.read_exactly(spec, locations, records)
        blocks = [header.block(i, ns.id) for i in range(header.num_blocks)]
        return self.rewrite_pages(ns, spec, blocks, keys, records)

    def rewrite_pages(
        self,
        ns: NamespaceStore,
        spec: PageSpec,
        blocks: Sequence[BlockRecord],
        keys: Sequence[PageKey],
        records: Records,
    ) -> dict[PageKey, int]:
        """As `add_pages`, also of pages that are stored: the number of the new pack of each."""
        self._check_open()
        check_keys(ns.namespace, spec, blocks, keys)
        check_records(records, spec, keys)
        index = self._current_index(ns, spec)
        before = index.numbers
        self._write_packs(ns, index, blocks, {key: i for i, key in enumerate(keys)}, records)
        new = index.numbers - before
        return {key: at.pack for key in keys for at in index.copies(*key) if at.pack in new}

    def _make_room(self, nbytes: int, ns: NamespaceStore) -> bool:
        """Evicts if `nbytes` more would exceed the budget; True if everything has to be looked up
        again, because the lock was let go."""
        if not self._budget.excess(nbytes, ns.folder_name):
            return False
        self._lock.let_go()
        try:
            self._evict(nbytes, ns.folder_name)
        finally:
            self._lock.acquire()
            self._refreshed.clear()
        return True

    def _needed_nbytes(
        self,
        ns: NamespaceStore,
        spec: PageSpec,
        blocks: Sequence[BlockRecord],
        new: dict[PageKey, int],
    ) -> int:
        """What writing these pages takes, a new namespace's files included; 0 without a budget."""
        if not self._budget.is_limited:
            return 0
        total = packs_nbytes(spec, blocks, new)
        try:
            ns.index(spec).folder()
        except NotFound:
            total += len(ns.namespace.encode()) + len(zarr_metadata(spec))
        return total

    def _current_index(self, ns: NamespaceStore, spec: PageSpec) -> PackIndex:
        """The index, checked against the disk once a commit: gc can't run before we are done."""
        if ns.id not in self._refreshed:
            generation = self._lock.generation()
            has_deletions = generation != ns.generation
            if has_deletions:
                ns.ready.clear()
            for index in ns.indexes:
                index.refresh(is_forced=has_deletions)
            ns.generation = generation
            self._refreshed.add(ns.id)
        return ns.index(spec)

    def _write_packs(
        self,
        ns: NamespaceStore,
        index: PackIndex,
        blocks: Sequence[BlockRecord],
        new: dict[PageKey, int],
        records: Records,
    ) -> None:
        nbytes = self._needed_nbytes(ns, index.spec, blocks, new)
        with self._budget.reserving(nbytes, "adding pages", ns.folder_name):
            self._make_ready(ns, index.spec)
            folder = index.folder()
            written = write_packs(folder, index, blocks, new, records)
        folder.sync()
        for pack in written:
            index.add(pack.number, pack.header, pack.encoded)
            self._count_bytes(pack.nbytes)
        self._counters.packs_written += len(written)
        self._counters.pages_written += len(new)
        self.new_pages += len(new)

    def _count_bytes(self, nbytes: int) -> None:
        self.nbytes_written += nbytes
        self._counters.nbytes_written += nbytes

    def _make_ready(self, ns: NamespaceStore, spec: PageSpec | None) -> None:
        """Folders, namespace.msgpack and zarr.json, durable before the first pack.

        Synced by this process even if they were there: who made them may not have come to it.
        """
        digest = spec.digest if spec else b""
        if digest in ns.ready and (spec is None or ns.index(spec).has_folder):
            return
        with self._root.child(NAMESPACES) as parent, parent.make_child(ns.folder_name) as own:
            ensure_file(own, NAMESPACE_FILE, ns.namespace.encode(), MAX_NAMESPACE_NBYTES)
            if spec is not None:
                with own.make_child(PAGES) as pages, pages.make_child(spec.name) as folder:
                    ensure_file(folder, ZARR_FILE, zarr_metadata(spec), _MAX_ZARR_NBYTES)
        ns.ready |= {b"", digest}

    def newest(self, session: str) -> int:
        """Sequence number of the session's newest checkpoint, readable or not; 0 if it has none."""
        self._check_open()
        try:
            with self._root.descend(SESSIONS, session_folder(session)) as folder:
                return max(sessions.sequences(folder), default=0)
        except NotFound:
            return 0

    def publish(self, session: str, checkpoint: Checkpoint, *, after: int | None = None) -> int:
        """Publishes the checkpoint as the session's newest, durably; its sequence number.

        Raises NotFound if a page it needs is not in the store, InvalidInput if it doesn't fit its
        namespace.  Then all but the last two checkpoints of the session are deleted.
        `after`: only if that sequence number is still the session's newest, 0 for a session that
        is not there yet; Conflict if it is not.
        """
        self._check_open()
        folder_name = session_folder(session)
        ns = self._namespace_of(checkpoint.namespace_id)
        check_fits(ns.namespace, checkpoint)
        # Refuses bad metadata before anything is written.
        nbytes = len(encode_checkpoint(checkpoint, session, MAX_SEQUENCE))
        self._make_room(nbytes, ns)
        self._current_index(ns, ns.namespace.layers[0])
        missing = ns.missing_page(summarize(checkpoint, session, 1))
        if missing is not None:
            layer, name = missing
            raise NotFound(
                f"the page of layer {layer}, block {name.hex()} is not in the store",
                doing=f"publishing session {session!r}",
                remedy="Add every sealed page before publishing",
            )
        self._make_ready(ns, None)
        try:
            sequence = self._publish_into(folder_name, session, checkpoint, after)
        except TqStoreError:
            self._remove_if_empty(folder_name)
            raise
        self._counters.checkpoints_written += 1
        return sequence

    def _publish_into(
        self, folder_name: str, session: str, checkpoint: Checkpoint, after: int | None
    ) -> int:
        with self._root.child(SESSIONS) as all_sessions:
            for _ in range(_MAX_PUBLISH_ATTEMPTS):
                with all_sessions.make_child(folder_name) as folder:
                    try:
                        sequence = self._write_checkpoint(folder, session, checkpoint, after)
                    except NotFound:
                        continue  # the session was removed just now, its folder with it
                    if sequence is None:
                        continue  # another process took the number
                    folder.flush_device(checkpoint_name(sequence))
                    sessions.prune(folder)
                    return sequence
        raise BackendFailed(f"session {session!r} keeps changing", doing="publishing")

    def _remove_if_empty(self, folder_name: str) -> None:
        """A session's folder made for a checkpoint that then could not be written."""
        with contextlib.suppress(TqStoreError), self._root.child(SESSIONS) as all_sessions:
            all_sessions.rmdir(folder_name)

    def _write_checkpoint(
        self, folder: Folder, session: str, checkpoint: Checkpoint, after: int | None
    ) -> int | None:
        """One attempt, with the number after the newest; None if it was taken meanwhile."""
        newest = max(sessions.sequences(folder), default=0)
        if after is not None and newest != after:
            raise Conflict(
                f"session {session!r} was saved by another process meanwhile",
                doing="publishing",
                remedy="Nothing was changed; try again",
            )
        sequence = newest + 1
        encoded = encode_checkpoint(checkpoint, session, sequence)
        with self._budget.reserving(len(encoded), "publishing a checkpoint"):
            if folder.create([checkpoint_name(sequence)], [encoded]) is None:
                return None
        folder.sync()
        self._count_bytes(len(encoded))
        return sequence
