"""Files whose contents are encrypted: AES-256-GCM in chunks, so that any part can be read alone.

A layer over another `Files`: those above see plain sizes and bytes.  The files of the store's own
folder, FORMAT and LOCK, stay plain; every other file must be encrypted, and one that isn't is
refused.  Names of files are not hidden.  docs/format.md has the bytes.

A file's key is its own (`encryption_key.file_key`), and a chunk's nonce is its number and whether
it is the last.  A file is written once, from its first byte to its last: no nonce is used twice.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqstore.errors import Corrupt, InvalidInput
from tqstore.store.encryption_key import file_key
from tqstore.store.files import Files, is_regular
from tqstore.store.transfer import read_all, write_all

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"TQSF"
VERSION = 1
CHUNK_NBYTES = 1 << 16
TAG_NBYTES = 16
SALT_NBYTES = 32
_HEAD = struct.Struct("<4sHH32s")
_SEALED_CHUNK = CHUNK_NBYTES + TAG_NBYTES


def plain_nbytes(sealed: int, file: str) -> int:
    """Bytes in a file of `sealed` bytes; Corrupt if no file can be so long."""
    rest = sealed - _HEAD.size
    whole, last = divmod(rest, _SEALED_CHUNK)
    is_empty_last = last == TAG_NBYTES and whole > 0
    if rest < TAG_NBYTES or 0 < last < TAG_NBYTES or is_empty_last:
        raise Corrupt(file, f"cut short: no encrypted file has {sealed} bytes")
    return rest - (whole + bool(last)) * TAG_NBYTES


def sealed_nbytes(plain: int) -> int:
    """Bytes that a file of `plain` bytes takes."""
    return _HEAD.size + plain + max(1, -(-plain // CHUNK_NBYTES)) * TAG_NBYTES


def aes_gcm(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise InvalidInput(
            "an encrypted store needs the package `cryptography`",
            remedy="In a clone of tqstore, pip install '.[encryption]'",
        ) from error
    return AESGCM(key)


def _invalid_tag() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def _nonce(chunk: int, is_last: bool) -> bytes:
    return chunk.to_bytes(11, "big") + bytes([is_last])


class _Writer:
    """One file being written: what is not yet a whole chunk waits for more, or for the end."""

    def __init__(self, cipher: AESGCM, salt: bytes) -> None:
        self._cipher = cipher
        self._waiting = b""
        self._out = _HEAD.pack(MAGIC, VERSION, 0, salt)
        self._chunks = 0
        self._is_over = False

    def add(self, buffers: Sequence[bytes | memoryview]) -> list[bytes]:
        """Ciphertext that can be written now.  At least a byte waits, to be in the last chunk."""
        if self._is_over:
            raise OSError(errno.EBADF, "an encrypted file cannot be written after its end")
        data = b"".join([self._waiting, *buffers])
        count = max(0, len(data) - 1) // CHUNK_NBYTES
        parts = memoryview(data)
        sealed = [
            self._seal(parts[i * CHUNK_NBYTES : (i + 1) * CHUNK_NBYTES], is_last=False)
            for i in range(count)
        ]
        self._waiting = data[count * CHUNK_NBYTES :]
        return self._with_head(sealed)

    def end(self) -> list[bytes]:
        if self._is_over:
            return []
        self._is_over = True
        return self._with_head([self._seal(self._waiting, is_last=True)])

    def _seal(self, data: bytes | memoryview, *, is_last: bool) -> bytes:
        sealed = self._cipher.encrypt(_nonce(self._chunks, is_last), data, None)
        self._chunks += 1
        return sealed

    def _with_head(self, sealed: list[bytes]) -> list[bytes]:
        head, self._out = self._out, b""
        return [part for part in (head, *sealed) if part]


class _Reader:
    """One file being read, by one thread at a time.  The last chunk is kept: reads are adjacent."""

    def __init__(self, files: Files, fd: int, cipher: AESGCM, nbytes: int, name: str) -> None:
        self._files = files
        self._fd = fd
        self._cipher = cipher
        self._name = name
        self.nbytes = nbytes  # of plain bytes
        self._num_chunks = max(1, -(-nbytes // CHUNK_NBYTES))
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Plain bytes offset .. offset + nbytes, fewer only at the end."""
        end = min(offset + nbytes, self.nbytes)
        if end <= offset:
            return memoryview(b"")
        first, last = offset // CHUNK_NBYTES, (end - 1) // CHUNK_NBYTES
        chunks = self._chunks(first, last)
        plain = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        return plain[offset - first * CHUNK_NBYTES : end - first * CHUNK_NBYTES]

    def _chunks(self, first: int, last: int) -> list[bytes]:
        kept: list[bytes] = []
        if self._last[0] == first:
            kept, first = [self._last[1]], first + 1
        if first > last:
            return kept
        sealed = bytearray((last - first + 1) * _SEALED_CHUNK)
        offset = _HEAD.size + first * _SEALED_CHUNK
        count = read_all(self._files, self._fd, [memoryview(sealed)], offset)
        view = memoryview(sealed)[:count]
        opened = [
            self._open(first + i, view[i * _SEALED_CHUNK : (i + 1) * _SEALED_CHUNK])
            for i in range(last - first + 1)
        ]
        self._last = (last, opened[-1])
        return kept + opened

    def _open(self, chunk: int, sealed: memoryview) -> bytes:
        try:
            return self._cipher.decrypt(_nonce(chunk, chunk == self._num_chunks - 1), sealed, None)
        except (_invalid_tag(), ValueError) as error:
            what = f"chunk {chunk} is not what was written here with this store's key"
            raise Corrupt(self._name, what) from error


class SealedFiles(Files):
    """`files` with everything below the store's folder encrypted.  Thread-safe; fork-safe.

    `root` is the descriptor of that folder, opened with `files`.
    """

    def __init__(self, files: Files, root: int, key: bytes, uuid: bytes) -> None:
        self._files = files
        self._key = key
        self._uuid = uuid
        self._places: dict[int, str] = {root: ""}  # of open folders, from the store's on
        self._writers: dict[int, _Writer] = {}
        self._unread: dict[int, tuple[str, str]] = {}  # opened files: place and name
        self._readers: dict[int, _Reader] = {}

    # What is encrypted

    def create(self, folder: int, name: str) -> int:
        fd = self._files.create(folder, name)
        if place := self._places[folder]:
            salt = secrets.token_bytes(SALT_NBYTES)
            self._writers[fd] = _Writer(self._cipher(salt, place), salt)
        return fd

    def writev(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        writer = self._writers.get(fd)
        if writer is None:
            return self._files.writev(fd, buffers)
        write_all(self._files, fd, writer.add(buffers))
        return sum(map(len, buffers))

    def fsync(self, fd: int) -> None:
        writer = self._writers.get(fd)
        if writer is not None:
            write_all(self._files, fd, writer.end())
        self._files.fsync(fd)

    def open_file(self, folder: int, name: str) -> int:
        fd = self._files.open_file(folder, name)
        if place := self._places[folder]:
            self._unread[fd] = (place, name)
        return fd

    def fstatus(self, fd: int) -> os.stat_result:
        """With the number of plain bytes."""
        status = self._files.fstatus(fd)
        if not is_regular(status) or not (fd in self._readers or fd in self._unread):
            return status
        fields = list(status[:10])
        fields[6] = self._reader(fd).nbytes
        return os.stat_result(fields)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        if fd not in self._readers and fd not in self._unread:
            return self._files.preadv(fd, buffers, offset)
        plain = self._reader(fd).read(offset, sum(map(len, buffers)))
        at = 0
        for buffer in buffers:
            piece = plain[at : at + len(buffer)]
            memoryview(buffer).cast("B")[: len(piece)] = piece
            at += len(piece)
        return at

    def _reader(self, fd: int) -> _Reader:
        if fd in self._unread:
            place, name = self._unread[fd]
            self._readers[fd] = self._start(fd, place, f"{place}/{name}")
            del self._unread[fd]
        return self._readers[fd]

    def _start(self, fd: int, place: str, path: str) -> _Reader:
        head = bytearray(_HEAD.size)
        count = read_all(self._files, fd, [memoryview(head)], 0)
        if count < len(head):
            raise Corrupt(path, f"cut short: {count} bytes")
        magic, version, flags, salt = _HEAD.unpack(head)
        if magic != MAGIC:
            raise Corrupt(path, "is not encrypted, in a store that is")
        if version != VERSION or flags:
            raise Corrupt(path, f"unknown version {version} or flags {flags} of encryption")
        nbytes = plain_nbytes(self._files.fstatus(fd).st_size, path)
        return _Reader(self._files, fd, self._cipher(salt, place), nbytes, path)

    def _cipher(self, salt: bytes, place: str) -> AESGCM:
        return aes_gcm(file_key(self._key, self._uuid, salt, place))

    def stored_nbytes(self, nbytes: int) -> int:
        """At most, for a pack with its folder's two files beside it."""
        return nbytes + 3 * (_HEAD.size + TAG_NBYTES) + nbytes // CHUNK_NBYTES * TAG_NBYTES

    def close(self, fd: int) -> None:
        for known in (self._places, self._writers, self._unread, self._readers):
            known.pop(fd, None)
        self._files.close(fd)

    # Folders: where they are is remembered

    def open_folder(self, folder: int, name: str) -> int:
        fd = self._files.open_folder(folder, name)
        place = self._places[folder]
        self._places[fd] = f"{place}/{name}" if place else name
        return fd

    def open_again(self, folder: int) -> int:
        fd = self._files.open_again(folder)
        self._places[fd] = self._places[folder]
        return fd

    # All else is as it is

    def open_root(self, path: str) -> int:
        return self._files.open_root(path)

    def open_lock(self, folder: int, name: str) -> int:
        return self._files.open_lock(folder, name)

    def chmod(self, fd: int, mode: int) -> None:
        self._files.chmod(fd, mode)

    def chmod_folder(self, folder: int, name: str) -> None:
        self._files.chmod_folder(folder, name)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        return self._files.pwrite(fd, data, offset)

    def flush_device(self, folder: int, name: str) -> None:
        self._files.flush_device(folder, name)

    def link(self, folder: int, source: str, target: str) -> None:
        self._files.link(folder, source, target)

    def link_to(self, folder: int, source: str, target_folder: int, target: str) -> None:
        self._files.link_to(folder, source, target_folder, target)

    def touch(self, folder: int, name: str, time_ns: int) -> None:
        self._files.touch(folder, name, time_ns)

    def unlink(self, folder: int, name: str) -> None:
        self._files.unlink(folder, name)

    def mkdir(self, folder: int, name: str) -> None:
        self._files.mkdir(folder, name)

    def rmdir(self, folder: int, name: str) -> None:
        self._files.rmdir(folder, name)

    def names(self, folder: int) -> list[str]:
        return self._files.names(folder)

    def status(self, folder: int, name: str) -> os.stat_result:
        return self._files.status(folder, name)

    def lock_shared(self, fd: int) -> None:
        self._files.lock_shared(fd)

    def lock_exclusive(self, fd: int, *, wait: bool) -> None:
        self._files.lock_exclusive(fd, wait=wait)

    def unlock(self, fd: int) -> None:
        self._files.unlock(fd)
