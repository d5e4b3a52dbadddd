"""LOCK: writers hold it shared, gc exclusively, readers not at all.

Owns the lock file and the number in it, which gc raises before it deletes packs, so that a writer
knows without looking whether what it indexed may be gone.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

from tqstore.errors import Conflict, Corrupt
from tqstore.store.files import failure
from tqstore.store.folder import Folder
from tqstore.store.root import LOCK
from tqstore.store.transfer import read_all

_GENERATION = struct.Struct("<Q")


class HeldLock:
    """An own open file description: a thread's or a child's closing can't release another's."""

    def __init__(self, root: Folder, fd: int) -> None:
        self._root = root
        self._fd = fd
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Conflict in a child forked while the lock was held."""
        if os.getpid() != self._pid:
            raise Conflict(
                "this commit belongs to the process that was forked",
                remedy="Open a commit of its own in the child",
            )

    def generation(self) -> int:
        """How often packs have been deleted from this store."""
        raw = bytearray(_GENERATION.size)
        try:
            count = read_all(self._root.files, self._fd, [memoryview(raw)], 0)
        except OSError as error:
            raise failure(error, "reading the lock", self._root.path_of(LOCK)) from error
        return int(_GENERATION.unpack(raw)[0]) if count == len(raw) else 0

    def release(self) -> None:
        # A forked child shares the description: unlocking there would unlock the parent's.
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._root.files.unlock(self._fd)
        self._root.files.close(self._fd)


@contextlib.contextmanager
def shared_lock(root: Folder) -> Iterator[HeldLock]:
    """Waits while gc runs."""
    try:
        fd = root.files.open_lock(root.fd, LOCK)
    except FileNotFoundError as error:
        # Made anew only on opening: one that is gone may still be held by others.
        remedy = "Stop every process that uses the store, then open it again"
        raise Corrupt(root.path_of(LOCK), "is missing", remedy=remedy) from error
    except OSError as error:
        raise failure(error, "opening the lock", root.path_of(LOCK)) from error
    held = HeldLock(root, fd)
    try:
        try:
            root.files.lock_shared(fd)
        except OSError as error:
            raise failure(error, "locking", root.path_of(LOCK)) from error
        yield held
    finally:
        held.release()
