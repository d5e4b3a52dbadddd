"""Whether this process's freed memory stays with it: fresh memory costs more than any copy.

The kernel zeroes each page it hands out.  A measurement has to say which memory it used, and use
the same for the peer.  Does nothing where the C library is not glibc.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 << 20
_DEFAULT_THRESHOLD = 128 << 10


def _glibc(name: str) -> Callable[..., int]:
    if sys.platform.startswith("linux"):
        function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            return function
    return lambda *_arguments: 0


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, memory that was freed (in pieces below 32 MiB) is used again."""
    configure = _glibc("mallopt")
    configure(_M_TRIM_THRESHOLD, _LARGEST)
    configure(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    try:
        yield
    finally:
        configure(_M_TRIM_THRESHOLD, _DEFAULT_THRESHOLD)
        configure(_M_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """To the kernel, all that the allocator can."""
    _glibc("malloc_trim")(0)
