"""Every system call that touches a store, one method each, and what their failures mean.

Nothing else in tqstore opens, writes, links or locks a file of a store, so that a test may record
the operations, stop after any of them, or make any of them fail.  Names are always relative to an
open folder and never followed through a symbolic link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Sequence

from tqstore.errors import BackendFailed, Corrupt, NotFound, StoreFull, TqStoreError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
IOV_MAX = 1024
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
_F_FULLFSYNC = 51  # macOS: flush the drive's own cache too
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def failure(error: OSError, doing: str, path: str) -> TqStoreError:
    """The typed error for a failed operation on `path`."""
    said = f"{path}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        return NotFound(said, doing=doing)
    if error.errno in _FULL:
        return StoreFull(said, doing=doing, remedy="Free disk space; what was saved is intact")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        remedy = "A store holds no symbolic links; restore the folder or use another store"
        return Corrupt(path, "a symbolic link or a file where a folder belongs", remedy=remedy)
    if error.errno in _DENIED:
        remedy = "Give this user write access, open the store with mode='r', or use another folder"
        return BackendFailed(said, doing=doing, remedy=remedy)
    if error.errno in (errno.EOPNOTSUPP, errno.EMLINK):
        remedy = "The store needs a local file system with hard links"
        return BackendFailed(said, doing=doing, remedy=remedy)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return BackendFailed(said, doing=doing, remedy="Raise the limit of open files (ulimit -n)")
    return BackendFailed(said, doing=doing, remedy="Check the disk; what was saved is intact")


class Files:
    """The real file system.  Stateless; every method is one operation and raises OSError."""

    def open_root(self, path: str) -> int:
        """Descriptor of the store's own folder, which may be reached through links."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_folder(self, folder: int, name: str) -> int:
        return os.open(name, _READ | os.O_DIRECTORY, dir_fd=folder)

    def open_file(self, folder: int, name: str) -> int:
        """For reading.  A fifo or device in a file's place must not block or act: O_NONBLOCK."""
        return os.open(name, _READ | os.O_NONBLOCK, dir_fd=folder)

    def open_lock(self, folder: int, name: str) -> int:
        """An existing lock file, for locking and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=folder)

    def create(self, folder: int, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, FILE_MODE, dir_fd=folder)

    def chmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def chmod_folder(self, folder: int, name: str) -> None:
        """Of a folder just made: without it an odd umask would keep even us out."""
        os.chmod(name, FOLDER_MODE, dir_fd=folder)

    def writev(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        return os.writev(fd, buffers)

    def stored_nbytes(self, nbytes: int) -> int:
        """Bytes that a file with so many takes on the disk, at most."""
        return nbytes

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Only ever the number in LOCK: no other file is written in place."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def flush_device(self, folder: int, name: str) -> None:
        """macOS: fsync leaves the drive's own cache unflushed; once before acknowledging we do."""
        if sys.platform == "darwin":
            fd = self.open_file(folder, name)
            try:
                fcntl.fcntl(fd, _F_FULLFSYNC)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
            finally:
                os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, folder: int, source: str, target: str) -> None:
        """Fails with EEXIST rather than replace."""
        os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def link_to(self, folder: int, source: str, target_folder: int, target: str) -> None:
        """As `link`, into another folder."""
        os.link(source, target, src_dir_fd=folder, dst_dir_fd=target_folder, follow_symlinks=False)

    def touch(self, folder: int, name: str, time_ns: int) -> None:
        """Sets the times of use.  What a file holds never changes; when it was used does."""
        os.utime(name, ns=(time_ns, time_ns), dir_fd=folder, follow_symlinks=False)

    def unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def mkdir(self, folder: int, name: str) -> None:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)

    def rmdir(self, folder: int, name: str) -> None:
        os.rmdir(name, dir_fd=folder)

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def status(self, folder: int, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def fstatus(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def open_again(self, folder: int) -> int:
        """A description of its own of an open folder, for locking."""
        return os.open(".", _READ | os.O_DIRECTORY, dir_fd=folder)

    def lock_shared(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_SH)

    def lock_exclusive(self, fd: int, *, wait: bool) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)
