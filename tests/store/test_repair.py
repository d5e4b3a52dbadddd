"""Repair: what is good stays, what is bad is set aside, and verify is content afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import check_store
from tests.store.synthetic import SPEC, chain, check_readable, packs, read, save
from tests.store.test_misses import why
from tqstore.errors import InvalidInput
from tqstore.format.framing import FRAME_NBYTES
from tqstore.format.pack import PackLayout
from tqstore.store.page_store import PageStore

DEMO, OTHER = chain(4), chain(3, 5)


@pytest.fixture
def store(store_dir: Path) -> PageStore:
    with PageStore.open(store_dir) as made:
        save(made, "demo", DEMO, 0, 2)
        save(made, "demo", DEMO, 2, 4)
        save(made, "other", OTHER)
    return PageStore.open(store_dir)


def damage(file: Path, at: int) -> bytes:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 0x10
    file.write_bytes(raw)
    return bytes(raw)


def aside(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in (path / "quarantine").iterdir()]


def test_a_sound_store_is_left_alone(store: PageStore, store_dir: Path) -> None:
    with store:
        before = {f: f.stat().st_mtime_ns for f in store_dir.rglob("*")}
        assert store.repair() == []
        assert before == {f: f.stat().st_mtime_ns for f in store_dir.rglob("*")}


def test_promise_8_good_pages_of_a_bad_pack_are_kept(store: PageStore, store_dir: Path) -> None:
    layout = PackLayout.of(SPEC)
    first = packs(store_dir)[0]
    tail = layout.index_nbytes + layout.stride // 2
    raw = damage(first, first.stat().st_size - tail)  # the last page: layer 2, block 1
    with store:
        done = store.repair()
        assert [fix.path for fix in done] == [str(first.relative_to(store_dir))] * 2
        assert "5 good pages" in done[1].what
        assert aside(store_dir) == [raw]
        check_readable(store, "other", OTHER, 3)
        ns = store.namespace(DEMO.namespace)
        keys = [key for key in DEMO.keys(SPEC) if key != (2, DEMO.hashes[1])]
        assert (read(ns, SPEC, keys) == DEMO.records(SPEC, keys)).all()
        assert str(why(store, DEMO)) == "corrupt: layer 2 of block 1"
        assert why(store, DEMO).num_blocks == 1
        assert store.repair() == []
        assert {finding.kind for finding in store.verify()} == {"reference"}
        save(store, "demo", DEMO)  # the lost page is stored anew
        assert list(store.verify()) == []
        check_readable(store, "demo", DEMO, 4)


def test_a_damaged_page_with_a_sound_copy_is_no_loss(store: PageStore, store_dir: Path) -> None:
    with store:
        ns = store.namespace(DEMO.namespace)
        keys = DEMO.keys(SPEC, 0, 2)
        with store.commit() as commit:
            commit.rewrite_pages(ns, SPEC, DEMO.blocks, keys, DEMO.records(SPEC, keys))
        first = packs(store_dir)[0]
        damage(first, first.stat().st_size // 2)
        assert "0 good pages" in store.repair()[1].what
        check_readable(store, "demo", DEMO, 4)


def test_packs_cut_short_or_without_a_header(store: PageStore, store_dir: Path) -> None:
    files = packs(store_dir)
    layout = PackLayout.of(SPEC)
    files[0].write_bytes(files[0].read_bytes()[: -layout.index_nbytes - layout.stride // 2])
    damage(files[2], FRAME_NBYTES + 3)
    with store:
        what = [fix.what for fix in store.repair()]
        assert "5 good pages" in what[1]  # all but the one that is cut
        assert "0 good pages" in what[3]
        assert len(aside(store_dir)) == 2
        assert {finding.kind for finding in store.verify()} == {"reference"}
        save(store, "demo", DEMO)
        save(store, "other", OTHER)
    check_store(store_dir)


def test_zarr_json_and_lock_are_rebuilt(store: PageStore, store_dir: Path) -> None:
    zarr = next(store_dir.glob("ns/*/pages/*/zarr.json"))
    sound = zarr.read_bytes()
    bad = damage(zarr, 10)
    store.close()
    (store_dir / "LOCK").unlink()
    with PageStore.open(store_dir) as again:
        assert [fix.path.rsplit("/", 1)[1] for fix in again.repair()] == ["zarr.json"] * 2
        assert zarr.read_bytes() == sound
        assert aside(store_dir) == [bad]
        zarr.unlink()
        assert len(again.repair()) == 1
        assert zarr.read_bytes() == sound


def test_a_damaged_namespace_is_written_again_by_the_next_save(
    store: PageStore, store_dir: Path
) -> None:
    damage(next(store_dir.glob("ns/*/namespace.msgpack")), 40)
    with store:
        [done] = store.repair()
        assert done.path.endswith("namespace.msgpack")
        with PageStore.open(store_dir) as other:
            save(other, "demo", DEMO)
            check_readable(other, "demo", DEMO, 4)
            check_readable(other, "other", OTHER, 3)


def test_a_damaged_checkpoint_is_set_aside(store: PageStore, store_dir: Path) -> None:
    newest = sorted(store_dir.glob("sessions/demo-*/*"))[1]
    raw = damage(newest, 60)
    with store:
        [done] = store.repair()
        assert "checkpoint" in done.what or "checksum" in done.what
        assert aside(store_dir) == [raw]
        check_readable(store, "demo", DEMO, 2)


def test_access_and_leftovers(store: PageStore, store_dir: Path) -> None:
    os.chmod(packs(store_dir)[0], 0o644)
    os.chmod(store_dir / "sessions", 0o755)
    (store_dir / "sessions" / ".tmp-1-2").write_bytes(b"x")
    with store:
        assert len(store.repair()) == 3
    assert packs(store_dir)[0].stat().st_mode & 0o777 == 0o600
    assert (store_dir / "sessions").stat().st_mode & 0o777 == 0o700


def test_a_store_opened_for_reading_is_not_repaired(store: PageStore, store_dir: Path) -> None:
    store.close()
    with PageStore.open(store_dir, mode="r") as readable, pytest.raises(InvalidInput):
        readable.repair()
