"""Single-bit flips, a sample of every region.  `tools/crash --flips` flips every bit."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tools.faults.cuts import memory_folder
from tools.faults.flips import HARMLESS, SMALL, flip_all, make_small_store, region
from tools.faults.flips import serves_only_what_was_written as serves_right
from tqstore.store import page_reader, verify_pack
from tqstore.store.page_store import PageStore

A_REGION = 12  # flips of each region of each file
REGIONS = {
    *("FORMAT", "FORMAT head", "namespace.msgpack", "namespace.msgpack head", "zarr.json"),
    *("checkpoint", "checkpoint head", "pack head", "pack header", "pack header padding"),
    *("pack page", "pack page checksum", "pack page padding", "pack index", "pack index checksum"),
}


@pytest.fixture
def small(caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    caplog.set_level(logging.ERROR, logger="tqstore")
    with memory_folder() as folder:
        make_small_store(folder / "store")
        yield folder / "store"


def sample(file: Path, num_bits: int) -> Iterable[int]:
    """Some bits of every region the file has."""
    content, rng = file.read_bytes(), random.Random(0)
    by_region: dict[str, list[int]] = {}
    for at in range(num_bits // 8):
        by_region.setdefault(region(file, content, at), []).append(at)
    for places in by_region.values():
        for at in rng.sample(places, min(A_REGION, len(places))):
            yield 8 * at + rng.randrange(8)


def test_every_flipped_bit_is_found_and_none_is_served(small: Path) -> None:
    """Promise 5, of every region of every kind of file."""
    report = flip_all(small, sample)
    assert report.undetected == ()
    assert set(report.regions) == REGIONS
    with PageStore.open(small, mode="r") as store:
        assert list(store.verify()) == []


def test_an_unchecked_page_is_seen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the page's checksum flips go unseen, so that the test above can fail."""
    monkeypatch.setattr(page_reader.PageReader, "_check", lambda *_: None)
    monkeypatch.setattr(verify_pack, "page_fault", lambda *_: None)
    assert flip_all(small, sample).undetected


def test_what_is_harmless_is_so_whatever_it_says(small: Path) -> None:
    assert set(HARMLESS) == {"LOCK"}
    for content in (b"\1", bytes(8), b"\xff" * 8, b"\xff" * 8000):
        (small / "LOCK").write_bytes(content)
        with PageStore.open(small) as store:
            assert serves_right(store, SMALL)
            assert store.latest("small") == SMALL.checkpoint(2)
            with store.commit() as commit:
                commit.publish("small", SMALL.checkpoint(2))
