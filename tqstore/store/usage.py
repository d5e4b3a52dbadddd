"""How many bytes a store takes: counted once, then kept up to date folder by folder.

Files never change once they have their names, so a folder is listed again only when its time stamp
moved, and only new names are looked at.  Temporary files count with what they have grown to.
"""

from __future__ import annotations

import stat
import time

from tqstore.errors import NotFound
from tqstore.store.files import is_regular
from tqstore.store.folder import TMP_PREFIX, Folder
from tqstore.store.fork_lock import ForkLock
from tqstore.store.pack_index import SETTLE_NS
from tqstore.store.root import LOCK

_MAX_DEPTH = 6


class Usage:
    """The running total of one store's bytes.  Thread-safe; sees other processes' files."""

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._tree = _FolderUsage()
        self._lock = ForkLock()

    def total(self) -> int:
        """Bytes of all files below the root, now."""
        with self._lock:
            self._tree.refresh(self._root, 0)
            return self._tree.nbytes

    def below(self, *path: str) -> int:
        """Bytes below a folder as of the last `total`; 0 if there is none."""
        node: _FolderUsage | None = self._tree
        for name in path:
            node = node.children.get(name) if node else None
        return node.nbytes if node else 0


class _FolderUsage:
    """Sizes of one folder's files, and the folders in it."""

    def __init__(self) -> None:
        self.children: dict[str, _FolderUsage] = {}
        self._sizes: dict[str, int] = {}
        self._stamp = (-1, -1)
        self._is_settled = False
        self._own_nbytes = 0
        self._growing: list[str] = []  # temporary files and LOCK: their sizes are not final

    @property
    def nbytes(self) -> int:
        return self._own_nbytes + sum(child.nbytes for child in self.children.values())

    def is_current(self, stamp: tuple[int, int]) -> bool:
        return stamp == self._stamp and self._is_settled and not self._growing

    def refresh(self, folder: Folder, depth: int) -> None:
        status = folder.status()
        if not self.is_current((status.st_ino, status.st_mtime_ns)):
            listed_ns = time.time_ns()
            self._list(folder, depth)
            self._stamp = (status.st_ino, status.st_mtime_ns)
            self._is_settled = listed_ns - status.st_mtime_ns > SETTLE_NS
        for name in list(self.children):
            self._refresh_child(folder, name, depth)

    def _list(self, folder: Folder, depth: int) -> None:
        names = set(folder.names())
        for name in self._sizes.keys() - names:
            self._own_nbytes -= self._sizes.pop(name)
        for name in self.children.keys() - names:
            del self.children[name]
        for name in self._growing:
            self._own_nbytes -= self._sizes.pop(name, 0)
        self._growing = []
        for name in names - self._sizes.keys() - self.children.keys():
            status = folder.status_of(name)
            if status is None:
                continue
            if is_regular(status):
                self._sizes[name] = status.st_size
                self._own_nbytes += status.st_size
                if name.startswith(TMP_PREFIX) or name == LOCK:
                    self._growing.append(name)
            elif stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
                self.children[name] = _FolderUsage()

    def _refresh_child(self, folder: Folder, name: str, depth: int) -> None:
        child = self.children[name]
        status = folder.status_of(name)
        if status is None:
            del self.children[name]
        elif child.children or not child.is_current((status.st_ino, status.st_mtime_ns)):
            try:
                with folder.child(name) as opened:
                    child.refresh(opened, depth + 1)
            except NotFound:
                del self.children[name]


def folder_nbytes(folder: Folder) -> int:
    """Bytes of all files under `folder`; what vanishes meanwhile counts nothing."""
    usage = _FolderUsage()
    usage.refresh(folder, 0)
    return usage.nbytes
