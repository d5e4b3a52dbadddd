"""The spill thread: writes sealed pages to the store while the model goes on.

Owns a bounded queue of finished host records and the thread that commits them.  It never touches an
MLX array: what it gets are bytes, what it gives back are outcomes, taken on the owner's thread.
"""

from __future__ import annotations

import os
import queue
import threading
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

MAX_WAITING_SPILLS = 2


@dataclass(frozen=True)
class Spill:
    """Pages of one page spec on their way out.  `refs[layer]` are the slots they came from."""

    spec: PageSpec
    blocks: Sequence[BlockRecord]
    keys: Sequence[tuple[int, bytes]]
    records: npt.NDArray[np.uint8]  # [pages, page_nbytes], stamped
    refs: dict[int, Refs]


@dataclass(frozen=True)
class Outcome:
    """A spill that is durable, or what kept it from being so."""

    spill: Spill
    error: Exception | None


class Spiller:
    """One writer thread, started at the first spill.  Never drops a spill.

    `submit` waits when the queue is full (backpressure).  The thread ends with the object.
    """

    def __init__(self, pages: NamespaceStore) -> None:
        self._pages = pages
        self._waiting: queue.Queue[Spill | None] = queue.Queue(MAX_WAITING_SPILLS)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self.num_pending = 0
        self.num_waits = 0

    def submit(self, spill: Spill) -> None:
        """Queues pages; the caller must not change `records` any more."""
        self._forget_parent()
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self.num_waits += self._waiting.full()
        self.num_pending += 1
        self._waiting.put(spill)

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        """Spills that have come to an end; with `wait` at least one if any is pending."""
        self._forget_parent()
        found = []
        while self.num_pending and (wait or not self._outcomes.empty()):
            found.append(self._outcomes.get())
            self.num_pending -= 1
            wait = False
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
    waiting: queue.Queue[Spill | None],
    outcomes: queue.SimpleQueue[Outcome],
) -> None:
    """Holds no reference to the Spiller, so that it can be collected while this waits."""
    while (spill := waiting.get()) is not None:
        error: Exception | None = None
        try:
            with pages.store.commit() as commit:
                commit.add_pages(pages, spill.spec, spill.blocks, spill.keys, spill.records)
        except Exception as problem:
            error = problem
        outcomes.put(Outcome(spill, error))
