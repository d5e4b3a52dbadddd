"""Every bit of a small store's files, flipped one at a time.

A flip is detected if opening fails or verify finds something; whatever is read meanwhile must be
what was written, or nothing.  Harmless without being detected is only LOCK, whose bytes are no
data (`HARMLESS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.store.synthetic import Chain, chain, page_spec, save
from tqstore.errors import TqStoreError
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes
from tqstore.spec import PageSpec
from tqstore.store.page_store import PageStore

SPEC = page_spec("uni2", "uni2", dim=8)
SMALL = chain(2, 3, Namespace.of("ef" * 8, [SPEC]))
SESSION = "small"
HARMLESS = {"LOCK": "a number that tells writers to list packs again, whatever it says"}


@dataclass
class FlipReport:
    """`regions` counts flips by what they hit; `undetected` is empty if the store is right."""

    flips: int = 0
    regions: Counter[str] = field(default_factory=Counter)
    undetected: tuple[str, ...] = ()


def make_small_store(path: Path) -> None:
    """One session of two checkpoints, one page in each of two packs."""
    with PageStore.open(path) as store:
        save(store, SESSION, SMALL, 0, 1)
        save(store, SESSION, SMALL, 1, 2)


def data_files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name not in HARMLESS)


def flip_all(
    path: Path,
    choose: Callable[[Path, int], Iterable[int]] = lambda _file, num_bits: range(num_bits),
) -> FlipReport:
    """Flips the bits that `choose` picks of each file (all), one at a time, and looks."""
    report = FlipReport()
    for file in data_files(path):
        good = file.read_bytes()
        with file.open("r+b") as stream:
            for bit in choose(file, 8 * len(good)):
                at = bit // 8
                _put(stream.fileno(), at, good[at] ^ 1 << bit % 8)
                problem = what_is_undetected(path)
                _put(stream.fileno(), at, good[at])
                report.flips += 1
                report.regions[region(file, good, at)] += 1
                if problem is not None:
                    report.undetected += (f"{file.relative_to(path)} bit {bit}: {problem}",)
    return report


def _put(fd: int, at: int, byte: int) -> None:
    import os

    os.pwrite(fd, bytes([byte]), at)


def what_is_undetected(path: Path) -> str | None:
    """Why the damage went unseen, or None if it was detected and nothing wrong was served."""
    try:
        store = PageStore.open(path, mode="r")
    except TqStoreError:
        return None
    with store:
        if not serves_only_what_was_written(store, SMALL):
            return "a read returned something else than was written"
        if not any(True for _ in store.verify()):
            return "verify finds nothing"
    return None


def serves_only_what_was_written(store: PageStore, sequence: Chain) -> bool:
    try:
        found = store.latest(SESSION)
    except TqStoreError:
        pass
    else:
        if found not in (sequence.checkpoint(1), sequence.checkpoint(2)):
            return False
    ns = store.namespace(sequence.namespace)
    for spec in sequence.namespace.page_specs:
        for key in sequence.keys(spec):
            out = np.zeros((1, spec.page_nbytes), np.uint8)
            try:
                location = ns.locate(spec, *key)
                if location is None:
                    continue
                ns.read_pages(spec, [location], out)
            except TqStoreError:
                continue
            if (out != sequence.records(spec, [key])).any():
                return False
    return True


def region(file: Path, content: bytes, at: int) -> str:
    """What byte `at` of the file is, in the format's words."""
    if content[:4] == b"TQSF":
        return "encrypted head" if at < 40 else "encrypted chunk"
    if file.name.startswith("c."):
        return f"pack {next(name for name, end in _pack_regions(content, SPEC) if at < end)}"
    kind = "checkpoint" if file.suffix == ".ckpt" else file.name
    return f"{kind} head" if at < 24 and file.name != "zarr.json" else kind


def _pack_regions(content: bytes, spec: PageSpec) -> Iterator[tuple[str, int]]:
    """(name, end) of each region of a pack, in file order."""
    layout = PackLayout.of(spec)
    header_nbytes = pack_header_nbytes(content, spec, "pack")
    num_pages = PackHeader.decode(content, spec, "pack").num_pages
    slot = layout.first_slot(header_nbytes)
    yield from (("head", 24), ("header", header_nbytes), ("header padding", slot))
    for _ in range(num_pages):
        page = slot + layout.page_nbytes
        slot += layout.stride
        yield from (("page", page), ("page checksum", page + 4), ("page padding", slot))
    yield from (("index", len(content) - 4), ("index checksum", len(content)))
