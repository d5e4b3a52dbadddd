"""LOCK: writers hold it shared, gc exclusively, readers not at all.

Owns the lock file and the number in it, which gc raises before it deletes packs, so that a writer
knows without looking whether what it indexed may be gone.

The root folder itself is locked too, as a gate: everyone passes it on the way to LOCK, and gc keeps
it closed while it waits for the writers inside.  Without it writers whose commits overlap would
keep gc out for ever.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

from tqstore.errors import Conflict, Corrupt
from tqstore.store.files import failure
from tqstore.store.folder import Folder
from tqstore.store.fork_lock import ForkLock
from tqstore.store.root import LOCK
from tqstore.store.transfer import read_all

EXCLUSIVE_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.001
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

    def raise_generation(self) -> None:
        """Says that packs are about to be deleted.  Only under the exclusive lock.

        Not synced: after a power cut nobody is left who remembers the number before.
        """
        raised = _GENERATION.pack(self.generation() + 1)
        try:
            written = self._root.files.pwrite(self._fd, raised, 0)
        except OSError as error:
            raise failure(error, "writing the lock", self._root.path_of(LOCK)) from error
        if written != len(raised):
            raise Corrupt(self._root.path_of(LOCK), f"took {written} of {len(raised)} bytes")

    def lock_shared(self) -> None:
        try:
            self._root.files.lock_shared(self._fd)
        except OSError as error:
            raise failure(error, "locking", self._root.path_of(LOCK)) from error

    def lock_exclusive(self, deadline: float) -> None:
        """Polls until `deadline` (time.monotonic): waiting in the kernel could not be given up."""
        while True:
            try:
                return self._root.files.lock_exclusive(self._fd, wait=False)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Conflict(
                        "a commit has been open too long",
                        doing="collecting garbage",
                        remedy="Try again; `lsof` on the file LOCK tells which process holds it",
                    ) from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise failure(error, "locking", self._root.path_of(LOCK)) from error

    def unlock(self) -> None:
        with contextlib.suppress(OSError):
            self._root.files.unlock(self._fd)

    def release(self) -> None:
        # A forked child shares the description: unlocking there would unlock the parent's.
        try:
            if os.getpid() == self._pid:
                self.unlock()
        finally:
            self._root.files.close(self._fd)


class Writers:
    """How many commits this process has open on one store.

    While there is one, others of the process don't wait at the gate: a save waits for pages that
    its own background thread is committing, and gc for the save.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._count = 0
        self._lock = ForkLock()

    def enter(self) -> bool:
        """True for the first, which has to pass the gate."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._count = os.getpid(), 0
            self._count += 1
            return self._count == 1

    def leave(self) -> None:
        with self._lock:
            if self._pid == os.getpid() and self._count:
                self._count -= 1


class SharedLock:
    """LOCK held shared by one commit, which may let go of it for a while."""

    def __init__(self, root: Folder, writers: Writers) -> None:
        self._root = root
        self._writers = writers
        self._held = _open_lock(root)
        self._is_held = False

    def acquire(self) -> None:
        """Waits while gc deletes."""
        has_to_pass = self._writers.enter()
        try:
            if has_to_pass:
                _pass_gate(self._root)
            self._held.lock_shared()
        except BaseException:
            self._writers.leave()
            raise
        self._is_held = True

    def let_go(self) -> None:
        """Lets gc in.  What was looked up before must be looked up again."""
        if self._is_held:
            self._is_held = False
            self._held.unlock()
            self._writers.leave()

    def close(self) -> None:
        self._held.release()
        if self._is_held:
            self._is_held = False
            self._writers.leave()

    def check_process(self) -> None:
        self._held.check_process()

    def generation(self) -> int:
        return self._held.generation()


@contextlib.contextmanager
def shared_lock(root: Folder, writers: Writers) -> Iterator[SharedLock]:
    """A commit's hold on the store."""
    lock = SharedLock(root, writers)
    try:
        lock.acquire()
        yield lock
    finally:
        lock.close()


@contextlib.contextmanager
def exclusive_lock(
    root: Folder, wait_seconds: float = EXCLUSIVE_WAIT_SECONDS
) -> Iterator[HeldLock]:
    """No commit is open anywhere and none begins.  Conflict if one stays open for too long."""
    gate = _open_gate(root)
    try:
        deadline = time.monotonic() + wait_seconds
        gate.lock_exclusive(deadline)
        held = _open_lock(root)
        try:
            held.lock_exclusive(deadline)
            yield held
        finally:
            held.release()
    finally:
        gate.release()


def _pass_gate(root: Folder) -> None:
    gate = _open_gate(root)
    try:
        gate.lock_shared()
    finally:
        gate.release()


def _open_gate(root: Folder) -> HeldLock:
    try:
        return HeldLock(root, root.files.open_again(root.fd))
    except OSError as error:
        raise failure(error, "opening the lock", root.path) from error


def _open_lock(root: Folder) -> HeldLock:
    try:
        return HeldLock(root, root.files.open_lock(root.fd, LOCK))
    except FileNotFoundError as error:
        # Made anew only on opening: one that is gone may still be held by others.
        remedy = "Stop every process that uses the store, then open it again"
        raise Corrupt(root.path_of(LOCK), "is missing", remedy=remedy) from error
    except OSError as error:
        raise failure(error, "opening the lock", root.path_of(LOCK)) from error
