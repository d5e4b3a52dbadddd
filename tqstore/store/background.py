"""Writes that other threads do for a store: it stays open until they have ended."""

from __future__ import annotations

import os
import threading


class Background:
    """Jobs begun and not ended.  Thread-safe; a forked child has none of its parent's."""

    def __init__(self) -> None:
        self._processes: dict[threading.Event, int] = {}  # unfinished jobs -> who does them

    def begin(self) -> threading.Event:
        """A new job, to be ended by whoever does it, whatever comes of it."""
        job = threading.Event()
        self._processes[job] = os.getpid()
        return job

    def end(self, job: threading.Event) -> None:
        self._processes.pop(job, None)
        job.set()

    def wait(self) -> None:
        """Returns when every job begun so far by this process has ended."""
        for job, process in list(self._processes.items()):
            if process == os.getpid():
                job.wait()
