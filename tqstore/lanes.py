"""Lanes: independent parts of one computation side by side on the processor's cores.

On a CPU an MLX stream is one thread, so all that is put on one stream uses one core.  A lane is a
stream; parts are dealt out to lanes in turn and whoever needs their results joins them.  Which lane
a part runs on changes no bit of it.  A GPU works in parallel by itself: there, and on one core,
every lane is the caller's own stream.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import mlx.core as mx

from tqstore.device import is_cpu

MAX_LANES = 8


def lane(index: int) -> AbstractContextManager[object]:
    """The context to build part `index` of a computation in; contexts do not nest."""
    if not has_many():
        return nullcontext()
    streams = _streams()
    return mx.stream(streams[index % len(streams)])


def has_many() -> bool:
    """Whether parts run side by side, so that it pays to begin each as soon as it is built."""
    return len(_streams()) > 1 and is_cpu()


@cache
def _streams() -> tuple[mx.ThreadLocalStream, ...]:
    """Thread-local ones: in MLX a stream belongs to the thread that made it."""
    return tuple(mx.new_thread_local_stream(mx.cpu) for _ in range(min(_num_cores(), MAX_LANES)))


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
