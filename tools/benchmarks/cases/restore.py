"""Restoring a saved session into MLX memory, against a raw read of the same bytes."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import tqstore
from tools.benchmarks.host_memory import freed_memory_kept, give_back_freed_memory
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import SESSION
from tools.benchmarks.timing import stopwatch
from tools.benchmarks.workshop import Workshop

NAME = "restore"


def run(workshop: Workshop) -> list[Row]:
    path = workshop.saved_store(workshop.sizes.tokens)
    packs = sorted(path.glob("ns/*/pages/*/c*"))
    pack_nbytes = sum(pack.stat().st_size for pack in packs)
    page_nbytes = restore_all(path)[1]
    with ExitStack() as files:
        descriptors = [files.enter_context(opened(pack)) for pack in packs]
        used = mapped(pack_nbytes)
        used[:] = 0
        with freed_memory_kept():
            in_used = workshop.measure(
                NAME,
                {
                    "ours": lambda: restore_all(path)[0],
                    "raw": lambda: read_raw(descriptors, used),
                },
            )
        in_fresh = workshop.measure(
            f"{NAME} into fresh memory",
            {
                "ours": lambda: restore_fresh(path),
                "raw": lambda: read_raw(descriptors, mapped(pack_nbytes)),
            },
        )
    note = (
        f"{page_nbytes / 1e6:,.0f} MB of pages, {workshop.sizes.shape}; a new Store and a new pool "
        "each time, files in the page cache, crc checked"
    )
    return [
        Row(
            NAME,
            page_nbytes / in_used["ours"] / 1e9,
            "GB/s",
            "preadv of the packs, page-aligned",
            pack_nbytes / in_used["raw"] / 1e9,
            Bar(0.40, at_most=False),
            f"{note}; both into memory that the process had used before",
        ),
        Row(
            f"{NAME}/fresh-memory",
            page_nbytes / in_fresh["ours"] / 1e9,
            "GB/s",
            "preadv of the packs, page-aligned",
            pack_nbytes / in_fresh["raw"] / 1e9,
            note="both into memory that the kernel has to hand out, page by page",
        ),
    ]


def restore_all(path: Path) -> tuple[float, int]:
    """Seconds until every page of the session is hot, and the pages' bytes."""
    with tqstore.Store.open(path) as store:
        cache = store.resume(SESSION).cache
        with stopwatch() as watch:
            cache.restore()
            mx.eval([arena.segments.arrays for arena in cache.pager.pool.arenas])
        num_pages = sum(len(layer.table) for layer in cache.layers)
        restored = cache.stats.paging["restored_pages"]
        if restored != num_pages:
            raise RuntimeError(f"{restored} of {num_pages} pages were restored")
        return watch.seconds, cache.stats.paging["restored_nbytes"]


def restore_fresh(path: Path) -> float:
    """As `restore_all`, but nothing freed before may be used again."""
    gc.collect()
    give_back_freed_memory()
    return restore_all(path)[0]


def read_raw(descriptors: list[int], buffer: npt.NDArray[np.uint8]) -> float:
    """Seconds to read whole files one after the other into `buffer`, one call each."""
    with stopwatch() as watch:
        position = 0
        for descriptor in descriptors:
            position += os.preadv(descriptor, [buffer[position:]], 0)
    if position != len(buffer):
        raise RuntimeError(f"{position} of {len(buffer)} bytes were read")
    return watch.seconds


def mapped(nbytes: int) -> npt.NDArray[np.uint8]:
    """Page-aligned memory of its own, fresh."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
