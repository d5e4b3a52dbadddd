"""An open folder of a store, and the durable operations on it.

Owns the order of operations that makes a new file survive a power cut (docs/durability.md): write
a temporary, fsync it, link it to its name, unlink the temporary, fsync the folder.  Every failure
comes out as a TqStoreError, with the temporary gone and nothing published.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from tqstore.errors import Corrupt, NotFound, TqStoreError
from tqstore.store.files import FILE_MODE, Files, failure, is_regular
from tqstore.store.transfer import read_all, write_all

TMP_PREFIX = ".tmp-"


class Folder:
    """Holds a descriptor until closed.  Names are single path components, checked by callers."""

    def __init__(self, files: Files, fd: int, path: str) -> None:
        self.files = files
        self.fd = fd
        self.path = path

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self.files.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def child(self, name: str) -> Folder:
        """An existing subfolder; NotFound if there is none, Corrupt if it is a link or a file."""
        with self._failing("opening", name):
            return Folder(self.files, self.files.open_folder(self.fd, name), self.path_of(name))

    def duplicate(self) -> Folder:
        """This folder once more, closed on its own."""
        with self._failing("opening", ""):
            return Folder(self.files, self.files.open_again(self.fd), self.path)

    def descend(self, *names: str) -> Folder:
        """A folder some levels down, no level of it a link."""
        folder = self.child(names[0])
        for name in names[1:]:
            with folder:
                folder = folder.child(name)
        return folder

    def make_child(self, name: str) -> Folder:
        """The subfolder, made durably if it isn't there, and this folder's own entries synced.

        Synced even if it was there: whoever made it may not have come to that yet.
        """
        with self._failing("making", name):
            with contextlib.suppress(FileExistsError):
                self.files.mkdir(self.fd, name)
                self.files.chmod_folder(self.fd, name)
            fd = self.files.open_folder(self.fd, name)
        child = Folder(self.files, fd, self.path_of(name))
        try:
            self.sync()
        except BaseException:
            child.close()
            raise
        return child

    def sync(self) -> None:
        """Makes the folder's entries survive a power cut."""
        with self._failing("syncing", ""):
            self.files.fsync(self.fd)

    def flush_device(self, name: str) -> None:
        """Has the drive write what it was given: once, by way of the file published last."""
        with self._failing("flushing the disk of", name):
            self.files.flush_device(self.fd, name)

    def names(self) -> list[str]:
        with self._failing("listing", ""):
            return self.files.names(self.fd)

    def status(self) -> os.stat_result:
        """Of the folder itself; st_nlink is 0 once it was removed."""
        with self._failing("looking at", ""):
            return self.files.fstatus(self.fd)

    def status_of(self, name: str) -> os.stat_result | None:
        """Of an entry, itself if it is a link; None if there is none."""
        try:
            return self.files.status(self.fd, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure(error, "looking at", self.path_of(name)) from error

    def create(self, names: Iterable[str], buffers: Sequence[bytes | memoryview]) -> str | None:
        """Publishes `buffers` under the first of `names` that is free; None if none was.

        The file's bytes are durable when this returns; its name only after `sync`.
        """
        temporary = f"{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        with self._failing("writing", temporary):
            fd = self.files.create(self.fd, temporary)
        try:
            self._fill(fd, temporary, buffers)
            name = self._publish(temporary, names)
        except BaseException:
            self._discard(temporary)
            raise
        with self._failing("removing", temporary):
            self.files.unlink(self.fd, temporary)
        return name

    def create_if_absent(self, name: str, buffers: Sequence[bytes | memoryview]) -> bool:
        """Publishes a file under a fixed name, durably; False if one is there (synced as well)."""
        created = self.status_of(name) is None and self.create([name], buffers) is not None
        self.sync()
        return created

    def _fill(self, fd: int, temporary: str, buffers: Sequence[bytes | memoryview]) -> None:
        try:
            with self._failing("writing", temporary):
                self.files.chmod(fd, FILE_MODE)  # whatever the umask is
                write_all(self.files, fd, buffers)
                # Never retried: after a failed fsync the kernel may have dropped the dirty pages.
                self.files.fsync(fd)
        finally:
            self.files.close(fd)

    def _publish(self, temporary: str, names: Iterable[str]) -> str | None:
        for name in names:
            try:
                self.files.link(self.fd, temporary, name)
            except FileExistsError:
                continue
            except OSError as error:
                raise failure(error, "publishing", self.path_of(name)) from error
            return name
        return None

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            self.files.unlink(self.fd, temporary)

    def unlink(self, name: str) -> None:
        """Removes a file; one that is gone already is fine."""
        with contextlib.suppress(NotFound), self._failing("removing", name):
            self.files.unlink(self.fd, name)

    def rmdir(self, name: str) -> bool:
        """Removes an empty subfolder; False if something is in it (again)."""
        try:
            self.files.rmdir(self.fd, name)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise failure(error, "removing", self.path_of(name)) from error
        return True

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, int]]:
        """(descriptor, bytes) of a regular file, closed afterwards."""
        with self._failing("opening", name):
            fd = self.files.open_file(self.fd, name)
        try:
            with self._failing("looking at", name):
                status = self.files.fstatus(fd)
            if not is_regular(status):
                raise Corrupt(self.path_of(name), "not a regular file")
            yield fd, status.st_size
        finally:
            self.files.close(fd)

    def read(self, name: str, max_nbytes: int) -> bytes:
        """A whole small file; Corrupt if it is larger than `max_nbytes`."""
        with self.reading(name) as (fd, nbytes):
            if nbytes > max_nbytes:
                raise Corrupt(self.path_of(name), f"{nbytes} bytes, more than {max_nbytes}")
            return self.read_range(name, fd, 0, nbytes)

    def read_head(
        self, name: str, nbytes: int, whole_of: Callable[[bytes], int]
    ) -> tuple[bytes, int]:
        """What a regular file starts with, and its size.

        Reads `nbytes` (fewer if the file is shorter), and then as many as `whole_of` says on seeing
        them.  As `reading` and `read_range`, in one go: opening a store does this for every pack.
        """
        fd = -1
        try:
            fd = self.files.open_file(self.fd, name)
            status = self.files.fstatus(fd)
            if not is_regular(status):
                raise Corrupt(self.path_of(name), "not a regular file")
            raw = self._read_up_to(fd, 0, min(nbytes, status.st_size))
            wanted = min(whole_of(raw), status.st_size)
            if wanted > len(raw):
                raw += self._read_up_to(fd, len(raw), wanted - len(raw))
        except TqStoreError:
            raise
        except OSError as error:
            raise failure(error, "reading", self.path_of(name)) from error
        finally:
            if fd >= 0:
                self.files.close(fd)
        return raw, status.st_size

    def _read_up_to(self, fd: int, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        count = read_all(self.files, fd, [memoryview(buffer)], offset)
        return bytes(buffer if count == nbytes else buffer[:count])

    def read_range(self, name: str, fd: int, offset: int, nbytes: int) -> bytes:
        """Bytes offset .. offset + nbytes of an open file, fewer only at its end."""
        buffer = bytearray(nbytes)
        with self._failing("reading", name):
            count = read_all(self.files, fd, [memoryview(buffer)], offset)
        return bytes(memoryview(buffer)[:count])

    @contextlib.contextmanager
    def _failing(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, TqStoreError):
                raise
            raise failure(error, doing, self.path_of(name) if name else self.path) from error
