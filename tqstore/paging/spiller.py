"""The background writer: one thread that makes sealed pages durable while the owner goes on.

Owns the thread and what is on its way.  Touches no MLX array: what it gets are bytes, what it gives
back are outcomes, taken on the owner's thread.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tqstore.format.block_hash import BlockRecord
from tqstore.paging.page_table import Refs
from tqstore.spec import PageSpec

if TYPE_CHECKING:
    from tqstore.store.page_store import NamespaceStore

# One being written and two behind it: the thread never idles while the owner copies the next.
MAX_PENDING_SPILLS = 3


@dataclass(frozen=True)
class Spill:
    """Pages of one page spec on their way out.  `refs[layer]` are the slots they came from, in the
    order of `keys`: all of one layer, then all of the next."""

    spec: PageSpec
    keys: Sequence[tuple[int, bytes]]
    refs: dict[int, Refs]


@dataclass(frozen=True)
class Payload:
    """What a spill writes: `records` uint8 [pages, page_nbytes], stamped, and their blocks."""

    blocks: Sequence[BlockRecord]
    records: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Outcome:
    """A spill that is durable, or what kept it from being so."""

    spill: Spill
    error: Exception | None


Job = tuple[Spill, Payload, threading.Event]


class Spiller:
    """One writer thread, started at the first spill.  Never drops a spill.

    `pending` are the spills whose outcome was not taken yet, oldest first, `MAX_PENDING_SPILLS` at
    most; a payload is let go of as soon as it is written.  The thread ends with the object, after
    what it was given: the store stays open for that.
    """

    def __init__(self, pages: NamespaceStore) -> None:
        self._pages = pages
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._pending: list[Spill] = []
        self.num_waits = 0

    @property
    def pending(self) -> Sequence[Spill]:
        self._forget_parent()
        return self._pending

    @property
    def is_full(self) -> bool:
        return len(self.pending) >= MAX_PENDING_SPILLS

    def submit(self, spill: Spill, payload: Payload) -> None:
        """Queues pages, without waiting; the caller must not change `payload` any more."""
        assert not self.is_full, "an outcome must be taken first"
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self._pending.append(spill)
        self._waiting.put((spill, payload, self._pages.store.background.begin()))

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        """Spills that have come to an end; with `wait` at least one if any is pending."""
        if not self.pending:
            return []
        found = []
        if wait and self._outcomes.empty():
            self.num_waits += 1
            found.append(self._outcomes.get())
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        del self._pending[: len(found)]  # one thread: they end in the order they were given
        return found

    def _forget_parent(self) -> None:
        """In a forked child: what the parent's thread is writing is not ours to wait for."""
        if self._process != os.getpid():
            self.__init__(self._pages)  # type: ignore[misc]

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_write_spills,
            args=(self._pages, self._waiting, self._outcomes),
            name="tqstore-spill",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._waiting.put, None)


def _write_spills(
    pages: NamespaceStore,
    waiting: queue.SimpleQueue[Job | None],
    outcomes: queue.SimpleQueue[Outcome],
) -> None:
    """Holds no reference to the Spiller, so that it can be collected while this waits."""
    while (job := waiting.get()) is not None:
        spill, payload, ended = job
        try:
            error = _written(pages, spill, payload)
            del job, payload  # not held while this waits
            _forget_locals(error)
            outcomes.put(Outcome(spill, error))
        finally:
            pages.store.background.end(ended)


def _written(pages: NamespaceStore, spill: Spill, payload: Payload) -> Exception | None:
    try:
        with pages.store.commit() as commit:
            commit.add_pages(pages, spill.spec, payload.blocks, spill.keys, payload.records)
    except Exception as error:
        return error
    return None


def _forget_locals(error: BaseException | None) -> None:
    """The frames of its traceback would keep the payload as long as the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
