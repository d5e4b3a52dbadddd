"""A real process that saves, removes and collects garbage, telling what it begins and what is done.

Owns the worker and its messages; how it ends is `kills`' and `power_cuts`'.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
from pathlib import Path

from tests.store.synthetic import Chain, chain, save
from tools.faults.promises import State, Step
from tools.faults.scenarios import ALL, PLAIN
from tqstore.errors import NotFound
from tqstore.store.page_store import PageStore

NUM_SESSIONS = 3
NUM_BLOCKS = 4
NUM_KNOWN = 2  # chains that are saved again and again; others are new each time
GC_SHARE = 0.15  # of saves and removals are followed by gc
_MESSAGE = struct.Struct("<cBIB")  # kind, session, seed of the chain, number of blocks (0: none)


class Writer:
    """Forked when made.  `stop` kills it; then `heard` is what it said before."""

    def __init__(self, path: Path, seed: int) -> None:
        self._said, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._said)
                _work(path, write_end, random.Random(seed))
            finally:
                os._exit(1)
        os.close(write_end)

    def stop(self) -> int:
        """SIGKILL, if it is not over; its exit code (minus the signal)."""
        os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def heard(self) -> list[Step]:
        said = b""
        while piece := os.read(self._said, 1 << 16):
            said += piece
        os.close(self._said)
        return [_step(message) for message in _MESSAGE.iter_unpack(said)]


def line(seed: int) -> Chain:
    return chain(NUM_BLOCKS, seed, PLAIN)


def _work(path: Path, out: int, rng: random.Random) -> None:
    with PageStore.open(path) as store:
        while True:
            session, num_blocks = rng.randrange(NUM_SESSIONS), rng.randint(0, NUM_BLOCKS)
            seed = rng.choice([rng.randrange(NUM_KNOWN), rng.getrandbits(31)])
            os.write(out, _MESSAGE.pack(b"b", session, seed, num_blocks))
            if num_blocks:
                save(store, f"session-{session}", line(seed), 0, num_blocks)
            else:
                with contextlib.suppress(NotFound):
                    store.remove(f"session-{session}")
            os.write(out, _MESSAGE.pack(b"a", session, seed, num_blocks))
            if rng.random() < GC_SHARE:
                store.gc(ALL)


def _step(message: tuple[bytes, int, int, int]) -> Step:
    kind, session, seed, num_blocks = message
    state = State(line(seed), num_blocks) if num_blocks else None
    return Step("acknowledged" if kind == b"a" else "begun", f"session-{session}", state)
