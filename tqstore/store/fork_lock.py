"""A mutex that a forked child finds unlocked, whoever held it in the parent."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """Used as a context manager; not re-entrant.  What it guards must tolerate being abandoned
    half-way in the child: the store's indexes only ever add complete entries."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
