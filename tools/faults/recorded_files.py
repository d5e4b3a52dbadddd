"""The real file operations, with a record of every one that changes the disk.

Owns the log and the numbering of files; what a crash may make of the log is `disk_model`'s.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqstore.store.files import Files

# Methods that leave what is on the disk as it is, as far as a crash is concerned.
HARMLESS = frozenset(
    {
        *("open_root", "open_folder", "open_file", "open_lock", "close", "preadv", "names"),
        *("status", "fstatus", "lock_shared", "lock_exclusive", "unlock"),
        *("chmod", "chmod_folder", "flush_device", "open_again", "stored_nbytes"),
        "touch",  # times of use may be lost: gc then takes a page for older than it is
    }
)


@dataclass(frozen=True)
class Entry:
    """`folder`'s entry `name` now means `node`, or nothing."""

    folder: int
    name: str
    node: int | None

    @property
    def owner(self) -> int:
        """The file or folder whose fsync makes this durable."""
        return self.folder


@dataclass(frozen=True)
class Write:
    node: int
    offset: int
    data: bytes

    @property
    def owner(self) -> int:
        return self.node


@dataclass(frozen=True)
class Sync:
    node: int


@dataclass(frozen=True)
class Mark:
    """Something the scenario says: a promise begun or acknowledged."""

    said: Any


Operation = Entry | Write | Sync | Mark


class RecordedFiles(Files):
    """Thread-safe.  `before` is called with an operation's name and the entry's name first."""

    def __init__(self, top: Path) -> None:
        """`top` is the folder above the store; what is there already counts as durable."""
        known = HARMLESS | {name for name in vars(RecordedFiles) if not name.startswith("_")}
        unknown = {name for name in vars(Files) if not name.startswith("_")} - known
        if unknown:
            raise NotImplementedError(f"the crash model doesn't know what {unknown} do to a disk")
        self.log: list[Operation] = []
        self.before: Callable[[str, str], None] = lambda _operation, _name: None
        self.folders: dict[int, dict[str, int]] = {}
        self.contents: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self._nodes: dict[int, int] = {}  # inode -> our number: inodes are used again
        self._next = 0
        self.top = self._scan(top)

    def _scan(self, path: Path) -> int:
        node = self._new(path.stat().st_ino)
        if path.is_dir():
            self.folders[node] = {child.name: self._scan(child) for child in path.iterdir()}
        else:
            self.contents[node] = path.read_bytes()
        return node

    def _new(self, inode: int) -> int:
        self._nodes[inode] = self._next
        self._next += 1
        return self._next - 1

    def _node(self, fd: int) -> int:
        return self._nodes[os.fstat(fd).st_ino]

    def _node_at(self, folder: int, name: str) -> int:
        return self._nodes[os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino]

    def node_of(self, path: Path) -> int:
        """Our number of an existing file or folder."""
        return self._nodes[path.stat().st_ino]

    def mark(self, said: Any) -> None:
        with self._lock:
            self.log.append(Mark(said))

    def create(self, folder: int, name: str) -> int:
        with self._lock:
            self.before("create", name)
            fd = super().create(folder, name)
            self.log.append(Entry(self._node(folder), name, self._new(os.fstat(fd).st_ino)))
            return fd

    def mkdir(self, folder: int, name: str) -> None:
        with self._lock:
            self.before("mkdir", name)
            super().mkdir(folder, name)
            inode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
            self.log.append(Entry(self._node(folder), name, self._new(inode)))
            self.folders.setdefault(self._next - 1, {})

    def link(self, folder: int, source: str, target: str) -> None:
        with self._lock:
            self.before("link", target)
            super().link(folder, source, target)
            self.log.append(Entry(self._node(folder), target, self._node_at(folder, target)))

    def link_to(self, folder: int, source: str, target_folder: int, target: str) -> None:
        with self._lock:
            self.before("link_to", target)
            super().link_to(folder, source, target_folder, target)
            node = self._node_at(target_folder, target)
            self.log.append(Entry(self._node(target_folder), target, node))

    def unlink(self, folder: int, name: str) -> None:
        with self._lock:
            self.before("unlink", name)
            super().unlink(folder, name)
            self.log.append(Entry(self._node(folder), name, None))

    def rmdir(self, folder: int, name: str) -> None:
        with self._lock:
            self.before("rmdir", name)
            super().rmdir(folder, name)
            self.log.append(Entry(self._node(folder), name, None))

    def writev(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        with self._lock:
            self.before("writev", "")
            offset = os.lseek(fd, 0, os.SEEK_CUR)
            written = super().writev(fd, buffers)
            self.log.append(Write(self._node(fd), offset, b"".join(buffers)[:written]))
            return written

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._lock:
            self.before("pwrite", "")
            written = super().pwrite(fd, data, offset)
            self.log.append(Write(self._node(fd), offset, data[:written]))
            return written

    def fsync(self, fd: int) -> None:
        with self._lock:
            self.before("fsync", "")
            super().fsync(fd)
            self.log.append(Sync(self._node(fd)))
