"""PageStore: the way into a store of pages and checkpoints.

Owns the root folder, the handles of namespaces, and commits.  Knows nothing of codecs, MLX or
sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqstore.errors import Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.checkpoint import Checkpoint
from tqstore.format.format_file import FormatFile
from tqstore.format.namespace import MAX_NBYTES as MAX_NAMESPACE_NBYTES
from tqstore.format.namespace import Namespace
from tqstore.store import sessions
from tqstore.store.commit import Commit
from tqstore.store.files import Files
from tqstore.store.folder import Folder
from tqstore.store.fork_lock import ForkLock
from tqstore.store.lock import shared_lock
from tqstore.store.names import is_namespace_folder, pack_number
from tqstore.store.namespace_store import NamespaceStore
from tqstore.store.records import Counters, NamespaceInfo, SessionInfo
from tqstore.store.root import NAMESPACE_FILE, NAMESPACES, PAGES, Mode, default_path, open_root
from tqstore.store.usage import folder_nbytes

if TYPE_CHECKING:
    from tqstore.store.verify import Finding

__all__ = ["Commit", "NamespaceInfo", "NamespaceStore", "PageStore", "SessionInfo"]


class PageStore:
    """A store.  Thread-safe; usable in a forked child; several processes may open it at once.

    >>> with PageStore.open("/tmp/example") as store:  # doctest: +SKIP
    ...     store.sessions()
    []
    """

    def __init__(self, root: Folder, record: FormatFile, mode: Mode, max_bytes: int | None) -> None:
        self.path = Path(root.path)
        self.uuid = record.uuid
        self.mode = mode
        self.max_bytes = max_bytes
        self.counters = Counters()
        self._root = root
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
        files: Files | None = None,
    ) -> PageStore:
        """Opens the store at `path`, made if it isn't there; None is $TQSTORE_HOME or the user's
        data folder.

        mode "r" never writes anything.  `max_bytes` bounds what this process lets the store grow
        to.  `files` does the file operations (for tests).  Raises NotFound (mode "r"),
        InvalidInput for a folder that is something else, Incompatible for a newer format,
        Corrupt, and BackendFailed for a file system that cannot keep the promises.
        """
        if mode not in ("a", "r"):
            raise InvalidInput(f"mode must be 'a' or 'r', not {mode!r}")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidInput(f"max_bytes must be at least 1 or None, not {max_bytes!r}")
        place = Path(path) if path is not None else default_path()
        root, record = open_root(files or Files(), place.expanduser().absolute(), mode)
        return cls(root, record, mode, max_bytes)

    def close(self) -> None:
        """Closes every descriptor.  Idempotent; handles must not be used after it."""
        with self._lock:
            self._is_open = False
            for ns in self._namespaces.values():
                ns.close()
            self._namespaces.clear()
            self._root.close()

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
                found = NamespaceStore(namespace, self._root, self.counters, self)
                self._namespaces[namespace.id] = found
            return found

    def stored_namespace(self, namespace_id: bytes) -> Namespace:
        """What a namespace on disk says must match; NotFound or Corrupt."""
        self._check_open()
        folder_name = namespace_id.hex()
        with self._root.child(NAMESPACES) as ns, ns.child(folder_name) as own:
            raw = own.read(NAMESPACE_FILE, MAX_NAMESPACE_NBYTES)
            namespace = Namespace.decode(raw, own.path_of(NAMESPACE_FILE))
            if namespace.id != namespace_id:
                raise Corrupt(own.path_of(NAMESPACE_FILE), "is another namespace's")
            return namespace

    def namespaces(self) -> list[NamespaceInfo]:
        """Every namespace on disk, readable or not, in the order of their ids."""
        self._check_open()
        with self._root.child(NAMESPACES) as ns:
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
        with shared_lock(self._root) as lock:
            commit = Commit(self._root, lock, self.counters, self._namespace_by_id, self.max_bytes)
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
        return sessions.list_sessions(self._root)

    def latest(self, name: str) -> Checkpoint:
        """The session's newest checkpoint that can be read.

        A damaged one is passed over for the one before it, with a warning.  NotFound if there is
        no such session, Corrupt or Incompatible if none of its checkpoints can be read.
        """
        self._check_open()
        return sessions.latest(self._root, name)

    def verify(self) -> Iterator[Finding]:
        """Everything that is wrong with the store, as it is found; reads every byte."""
        from tqstore.store.verify import verify

        self._check_open()
        return verify(self._root)

    def remove(self, name: str) -> None:
        """Removes a session; NotFound if there is none.  Its pages stay until gc."""
        self._check_open()
        if self.mode == "r":
            raise InvalidInput(f"the store at {self.path} was opened with mode='r'")
        with shared_lock(self._root):
            sessions.remove(self._root, name)


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
