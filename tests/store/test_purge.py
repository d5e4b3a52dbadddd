"""Purge: a session's bytes are gone from the files, others' stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.synthetic import NAMESPACE, SPEC, chain, check_readable, save
from tests.store.test_gc import grown
from tqstore.errors import NotFound
from tqstore.store.gc_plan import GcOptions
from tqstore.store.page_store import PageStore


def contains(path: Path, needle: bytes) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and needle in file.read_bytes()]


def test_promise_9_a_purge_leaves_no_byte_of_what_nobody_shares(store_dir: Path) -> None:
    common = chain(3)
    mine, theirs = grown(common, 3, 1), grown(common, 2, 2)
    with PageStore.open(store_dir) as store:
        save(store, "mine", mine)
        save(store, "theirs", theirs)
        save(store, "other", chain(2, 5))
        report = store.purge("mine")
        assert report.shared == {"theirs": 3}
        assert (report.session, report.blocks, report.kept_back) == ("mine", 6, ())
        for block in mine.blocks[3:]:
            assert contains(store_dir, block.hash) == []
            assert contains(store_dir, block.token_bytes) == []
        key = [(1, mine.hashes[4])]
        assert contains(store_dir, mine.records(SPEC, key)[0].tobytes()[64:]) == []
        check_readable(store, "theirs", theirs, 5)
        check_readable(store, "other", chain(2, 5), 2)
        with pytest.raises(NotFound):
            store.latest("mine")
        with pytest.raises(NotFound):
            store.purge("mine")


def test_purging_the_last_session_of_a_namespace(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "mine", chain(3))
        store.gc(GcOptions(grace_seconds=0))
        report = store.purge("mine")
        assert report.packs_deleted == 1
        assert store.namespaces() == []
        assert contains(store_dir, chain(3).hashes[0][:8]) == []


def test_purge_forgets_what_gc_noted_and_spares_the_garbage_of_others(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "gone", chain(3, 1))
        save(store, "kept", chain(3, 2))
        save(store, "spilled", chain(3, 3))
        store.remove("gone")
        store.gc(GcOptions(grace_seconds=0))
        assert contains(store_dir / "gone", chain(3, 1).hashes[0][:8])
        store.remove("spilled")
        store.purge("kept")
        assert contains(store_dir, chain(3, 1).hashes[0][:8]) == []
        assert store.namespace(NAMESPACE).locate(SPEC, 0, chain(3, 3).hashes[0]) is not None
        stats = store.stats()
        assert (stats.num_packs, stats.num_pages, stats.num_sessions) == (1, 9, 0)
        assert stats.garbage_nbytes > stats.collectable_nbytes == 0


def test_purging_a_session_without_blocks_takes_nothing_of_others(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "spilled", chain(3))
        store.remove("spilled")
        save(store, "short", chain(0, 3))
        assert store.purge("short").packs_deleted == 0
        assert store.stats().num_pages == 9  # within the grace
