"""PageStore: the way into a store of pages and checkpoints.

Owns the root folder, the handles of namespaces, and commits.  Knows nothing of codecs, MLX or
sequences.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqstore.errors import Conflict, Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.checkpoint import Checkpoint
from tqstore.format.format_file import FormatFile
from tqstore.format.namespace import MAX_NBYTES as MAX_NAMESPACE_NBYTES
from tqstore.format.namespace import Namespace
from tqstore.store import sessions
from tqstore.store.background import Background
from tqstore.store.budget import Budget
from tqstore.store.commit import Commit
from tqstore.store.files import Files
from tqstore.store.folder import Folder
from tqstore.store.fork_lock import ForkLock
from tqstore.store.lock import Writers, shared_lock
from tqstore.store.names import is_namespace_folder, pack_number, session_folder
from tqstore.store.namespace_store import NamespaceStore
from tqstore.store.records import Counters, NamespaceInfo, SessionInfo
from tqstore.store.root import NAMESPACE_FILE, NAMESPACES, PAGES, Mode, default_path, open_root
from tqstore.store.tombstones import Gone, list_records, read_gone
from tqstore.store.usage import folder_nbytes

if TYPE_CHECKING:
    from tqstore.store.gc_plan import GcOptions, GcPlan
    from tqstore.store.gc_sweep import GcReport
    from tqstore.store.purge import PurgeReport
    from tqstore.store.repair import Repair
    from tqstore.store.stats import StoreStats
    from tqstore.store.verify import Finding

__all__ = ["Commit", "NamespaceInfo", "NamespaceStore", "PageStore", "SessionInfo"]

_RETRY_SECONDS = 1.0  # after nothing could be evicted from a store that has not changed since
_log = logging.getLogger("tqstore")


class PageStore:
    """A store.  Thread-safe; usable in a forked child; several processes may open it at once.

    >>> with PageStore.open("/tmp/example") as store:  # doctest: +SKIP
    ...     store.sessions()
    []
    """

    def __init__(self, root: Folder, record: FormatFile, mode: Mode, budget: Budget) -> None:
        self.path = Path(root.path)
        self.uuid = record.uuid
        self.mode = mode
        self.budget = budget
        self.counters = Counters()
        self.root = root
        self.background = Background()
        self._writers = Writers()
        self._gone: tuple[list[int], Gone] = ([], Gone())
        self._full: tuple[int, float] | None = None  # bytes and time when nothing could go
        self._lock = ForkLock()
        self._namespaces: dict[bytes, NamespaceStore] = {}
        self._is_open = True

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        mode: Mode = "a",
        max_bytes: int | None = None,
        namespace_max_bytes: int | None = None,
        key: bytes | None = None,
        files: Files | None = None,
    ) -> PageStore:
        """Opens the store at `path`, made if it isn't there; None is $TQSTORE_HOME or the user's
        data folder.

        mode "r" never writes anything.  `max_bytes` bounds what this process lets the store grow
        to, `namespace_max_bytes` each namespace of it: what may go is evicted, also on opening,
        and what does not fit then is refused (StoreFull).  `key`, 32 bytes, is that of an encrypted
        store; None is the environment's (docs/security.md), and a store made with one is encrypted.
        `files` does the file operations (for tests).  Raises NotFound (mode "r"), InvalidInput for
        a folder that is something else, Incompatible for a newer format or a wrong key, Corrupt,
        and BackendFailed for a file system that cannot keep the promises.
        """
        if mode not in ("a", "r"):
            raise InvalidInput(f"mode must be 'a' or 'r', not {mode!r}")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise InvalidInput(f"path must be a str or a Path, not {path!r}")
        place = Path(path) if path is not None else default_path()
        root, record = open_root(files or Files(), place.expanduser().absolute(), mode, key)
        try:
            store = cls(root, record, mode, Budget(root, max_bytes, namespace_max_bytes))
        except BaseException:
            root.close()
            raise
        if mode == "a":
            store.make_room()
        return store

    def close(self) -> None:
        """Waits for what other threads are writing, then closes every descriptor.

        Idempotent; handles must not be used after it.
        """
        self.background.wait()
        with self._lock:
            self._is_open = False
            for ns in self._namespaces.values():
                ns.close()
            self._namespaces.clear()
            self.root.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidInput(f"the store at {self.path} is closed")

    def namespace(self, namespace: Namespace) -> NamespaceStore:
        """The handle of a namespace.  Writes nothing."""
        self._check_open()
        with self._lock:
            found = self._namespaces.get(namespace.id)
            if found is None:
                found = NamespaceStore(namespace, self.root, self.counters, self)
                self._namespaces[namespace.id] = found
            return found

    def stored_namespace(self, namespace_id: bytes) -> Namespace:
        """What a namespace on disk says must match; NotFound or Corrupt."""
        self._check_open()
        folder_name = namespace_id.hex()
        with self.root.child(NAMESPACES) as ns, ns.child(folder_name) as own:
            raw = own.read(NAMESPACE_FILE, MAX_NAMESPACE_NBYTES)
            namespace = Namespace.decode(raw, own.path_of(NAMESPACE_FILE))
            if namespace.id != namespace_id:
                raise Corrupt(own.path_of(NAMESPACE_FILE), "is another namespace's")
            return namespace

    def namespace_ids(self) -> list[bytes]:
        """Of every namespace on disk, readable or not, in order."""
        self._check_open()
        with self.root.child(NAMESPACES) as ns:
            return [bytes.fromhex(name) for name in sorted(ns.names()) if is_namespace_folder(name)]

    def namespaces(self) -> list[NamespaceInfo]:
        """Every namespace on disk, readable or not, in the order of their ids."""
        self._check_open()
        with self.root.child(NAMESPACES) as ns:
            names = sorted(name for name in ns.names() if is_namespace_folder(name))
            found = (self._namespace_info(ns, name) for name in names)
            return [info for info in found if info is not None]

    def _namespace_info(self, ns: Folder, folder_name: str) -> NamespaceInfo | None:
        namespace: Namespace | None = None
        problem: str | None = None
        try:
            namespace = self.stored_namespace(bytes.fromhex(folder_name))
        except TqStoreError as error:
            problem = str(error)
        try:
            with ns.child(folder_name) as own:
                return NamespaceInfo(
                    id=bytes.fromhex(folder_name),
                    namespace=namespace,
                    num_packs=_count_packs(own),
                    nbytes=folder_nbytes(own),
                    problem=problem,
                )
        except NotFound:
            return None
        except TqStoreError as error:
            return NamespaceInfo(bytes.fromhex(folder_name), namespace, 0, 0, str(error))

    @contextlib.contextmanager
    def commit(self) -> Iterator[Commit]:
        """Holds LOCK shared: gc waits, other commits don't.

        Pages added are durable when `add_pages` returns; the session when `publish` does.
        """
        self._check_open()
        if self.mode == "r":
            raise InvalidInput(
                f"the store at {self.path} was opened with mode='r'",
                doing="committing",
                remedy="Open it with mode='a'",
            )
        with shared_lock(self.root, self._writers) as lock:
            commit = Commit(
                self.root, lock, self.counters, self._namespace_by_id, self.budget, self.make_room
            )
            try:
                yield commit
            finally:
                commit.close()

    def _namespace_by_id(self, namespace_id: bytes) -> NamespaceStore:
        found = self._namespaces.get(namespace_id)
        return found or self.namespace(self.stored_namespace(namespace_id))

    def sessions(self) -> list[SessionInfo]:
        """All sessions, newest first; damaged ones with a `problem`."""
        self._check_open()
        return sessions.list_sessions(self.root)

    def latest(self, name: str) -> Checkpoint:
        """The session's newest checkpoint that can be read.

        A damaged one is passed over for the one before it, with a warning.  NotFound if there is
        no such session, Corrupt or Incompatible if none of its checkpoints can be read.
        """
        self._check_open()
        try:
            return sessions.latest(self.root, name)
        except NotFound as error:
            reason = self.gone().sessions.get(session_folder(name))
            if reason is None:
                raise
            problem = f"session {name!r} has {reason}, and gc has taken it away"
            raise NotFound(problem, doing="reading a session") from error

    def verify(self) -> Iterator[Finding]:
        """Everything that is wrong with the store, as it is found; reads every byte."""
        from tqstore.store.verify import verify

        self._check_open()
        return verify(self.root)

    def note_use(self, name: str) -> None:
        """A session is used now: of those whose time is over the longest unused go first."""
        if self.mode != "r":
            sessions.note_use(self.root, name)

    def purge(self, name: str) -> PurgeReport:
        """Removes a session and every page of it that no other session has a part in, at once.

        Raises NotFound, Conflict if a commit stays open elsewhere; InvalidInput for mode "r".
        """
        from tqstore.store.purge import purge

        return purge(self, name)

    def plan_gc(self, options: GcOptions | None = None) -> GcPlan:
        """What `gc` would do; changes nothing."""
        from tqstore.store.gc_plan import plan_gc

        self._check_open()
        return plan_gc(self, options)

    def gc(self, options: GcOptions | None = None) -> GcReport:
        """Collects garbage beside running readers and writers: `plan_gc` and `sweep` in one.

        Raises InvalidInput for mode "r", Incompatible, Conflict, BackendFailed.
        """
        from tqstore.store.gc_sweep import sweep

        return sweep(self, self.plan_gc(options))

    def gone(self) -> Gone:
        """What gc took away lately, and why; read again when there is something new."""
        listed = list_records(self.root)
        if listed != self._gone[0]:
            self._gone = (listed, read_gone(self.root))
        return self._gone[1]

    def repair(self) -> list[Repair]:
        """Mends what can be mended and sets aside what can't; what it did, in order.

        Raises InvalidInput for mode "r", Conflict if a commit stays open elsewhere, StoreFull.
        """
        from tqstore.store.repair import repair

        self._check_open()
        return repair(self)

    def stats(self) -> StoreStats:
        """What the store holds and what of it is garbage; reads checkpoints and pack headers."""
        from tqstore.store.stats import read_stats

        self._check_open()
        return read_stats(self)

    def make_room(self, nbytes: int = 0, namespace: str = "") -> None:
        """Evicts what may go until `nbytes` more fit the budget, as far as that is possible.

        `namespace`: the folder of the one they are for.  What could not go is logged.
        """
        from tqstore.store.eviction import evict

        wanted = self.budget.to_free(nbytes, namespace)
        if not wanted:
            return
        state = (self.budget.usage.total(), time.monotonic())
        if self._full and self._full[0] == state[0] and state[1] - self._full[1] < _RETRY_SECONDS:
            return
        fits_store = not self.budget.excess(nbytes)
        try:
            reports = evict(self, wanted, namespace=namespace if fits_store else "")
        except Conflict as error:
            _log.warning("could not make room: %s", error)
            return
        freed = sum(report.freed_nbytes for report in reports)
        self.counters.nbytes_evicted += freed
        self._full = None if freed else state
        if self.budget.excess(nbytes, namespace):
            _log.warning("the store at %s is at its budget; %d bytes may go", self.path, freed)

    def remove(self, name: str) -> None:
        """Removes a session; NotFound if there is none.  Its pages stay until gc."""
        self._check_open()
        if self.mode == "r":
            raise InvalidInput(f"the store at {self.path} was opened with mode='r'")
        with shared_lock(self.root, self._writers):
            sessions.remove(self.root, name)


def _count_packs(own: Folder) -> int:
    total = 0
    try:
        with own.child(PAGES) as pages:
            for name in pages.names():
                with contextlib.suppress(TqStoreError), pages.child(name) as folder:
                    total += sum(pack_number(file) is not None for file in folder.names())
    except NotFound:
        pass
    return total
