"""File operations that count what they read: the progress of commands that read everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tqstore.store.files import Files


class CountedFiles(Files):
    """`nbytes_read` so far; `on_read`, if set, is called with each read's bytes."""

    def __init__(self) -> None:
        self.nbytes_read = 0
        self.on_read: Callable[[int], object] | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        nbytes = super().preadv(fd, buffers, offset)
        self.nbytes_read += nbytes
        if self.on_read is not None:
            self.on_read(nbytes)
        return nbytes
