"""Restoring a saved session into MLX memory, against a raw read of the same bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import SESSION
from tools.benchmarks.timing import stopwatch
from tools.benchmarks.workshop import Workshop

NAME = "restore"


def run(workshop: Workshop) -> list[Row]:
    path = workshop.saved_store(workshop.sizes.tokens)
    packs = sorted(path.glob("ns/*/pages/*/c*"))
    pack_nbytes = sum(pack.stat().st_size for pack in packs)
    page_nbytes = 0

    def ours() -> float:
        nonlocal page_nbytes
        seconds, page_nbytes = restore_all(path)
        return seconds

    with ExitStack() as files:
        opened = [files.enter_context(_descriptor(pack)) for pack in packs]
        used = _mapped(pack_nbytes)
        used[:] = 0
        taken = workshop.measure(
            NAME,
            {
                "ours": ours,
                "raw": lambda: read_raw(opened, used),
                "raw, fresh": lambda: read_raw(opened, _mapped(pack_nbytes)),
            },
        )
    value = page_nbytes / taken["ours"] / 1e9
    note = (
        f"{page_nbytes / 1e6:,.0f} MB of pages, {workshop.sizes.shape}; a new Store opened and the "
        "session resumed each time; files in the page cache; crc checked"
    )
    return [
        Row(
            NAME,
            value,
            "GB/s",
            "preadv of the packs into a used, page-aligned buffer",
            pack_nbytes / taken["raw"] / 1e9,
            Bar(0.40, at_most=False),
            note,
        ),
        Row(
            f"{NAME}/fresh-memory",
            value,
            "GB/s",
            "preadv of the packs into fresh, page-aligned memory",
            pack_nbytes / taken["raw, fresh"] / 1e9,
            note="as ours is: the kernel has to give every page of it",
        ),
    ]


def restore_all(path: Path) -> tuple[float, int]:
    """Seconds from opening the store until every page is hot, and the pages' bytes."""
    with stopwatch() as watch:
        store = tqstore.Store.open(path)
        cache = store.resume(SESSION).cache
        cache.restore()
    with store:
        num_pages = sum(len(layer.table) for layer in cache.layers)
        restored = cache.stats.paging["restored_pages"]
        if restored != num_pages:
            raise RuntimeError(f"{restored} of {num_pages} pages were restored")
        return watch.seconds, cache.stats.paging["restored_nbytes"]


def read_raw(descriptors: list[int], buffer: np.ndarray) -> float:  # type: ignore[type-arg]
    """Seconds to read whole files one after the other into `buffer`, one call each."""
    with stopwatch() as watch:
        position = 0
        for descriptor in descriptors:
            position += os.preadv(descriptor, [buffer[position:]], 0)
    if position != len(buffer):
        raise RuntimeError(f"{position} of {len(buffer)} bytes were read")
    return watch.seconds


def _mapped(nbytes: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
