"""Medians of trials that take turns, so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Trial = Callable[[], float]


class Stopwatch:
    """`seconds` after its block; collection of garbage is held back meanwhile."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    gc.collect()
    gc.disable()
    watch = Stopwatch()
    started = time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - started
        gc.enable()


def timed(work: Callable[[], object]) -> Trial:
    """A trial that is all of `work`."""

    def trial() -> float:
        with stopwatch() as watch:
            work()
        return watch.seconds

    return trial


def medians(
    trials: Mapping[str, Trial],
    rounds: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    warm_up: int = 1,
) -> dict[str, float]:
    """Seconds of each trial: A B A B ..., the first `warm_up` rounds not counted.

    A trial returns the seconds of the part of it that counts.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    taken: dict[str, list[float]] = {name: [] for name in trials}
    total = (rounds + warm_up) * len(trials)
    for round_idx in range(rounds + warm_up):
        for position, (name, trial) in enumerate(trials.items()):
            progress(round_idx * len(trials) + position, total)
            seconds = trial()
            if round_idx >= warm_up:
                taken[name].append(seconds)
    progress(total, total)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
