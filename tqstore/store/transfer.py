"""Moving many buffers to or from a file in few calls, and all of them though a call does less."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from tqstore.store.files import IOV_MAX, Files

MAX_CALL_NBYTES = 1 << 30


def write_all(files: Files, fd: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Writes every byte: a full disk may take a part and report no error, so short writes loop."""
    rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    at = 0
    while at < len(rest):
        written = files.writev(fd, _some(rest[at : at + IOV_MAX]))
        if written <= 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        while at < len(rest) and written >= len(rest[at]):
            written -= len(rest[at])
            at += 1
        if written:
            rest[at] = rest[at][written:]


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills `buffers` (at most IOV_MAX) from `offset`; the bytes read, fewer only at the end."""
    rest = list(buffers)
    wanted = sum(map(len, rest))
    total = 0
    while total < wanted:
        count = files.preadv(fd, _some(rest), offset + total)
        total += count
        if count == 0 or total == wanted:
            break
        while count >= len(rest[0]):
            count -= len(rest.pop(0))
        rest[0] = rest[0][count:]
    return total


def _some(buffers: list[memoryview]) -> list[memoryview]:
    """As many of `buffers` as one system call takes: macOS refuses 2 GiB and more."""
    if sum(map(len, buffers)) <= MAX_CALL_NBYTES:
        return buffers
    if len(buffers[0]) > MAX_CALL_NBYTES:
        return [buffers[0][:MAX_CALL_NBYTES]]
    return _some(buffers[: max(1, len(buffers) // 2)])
