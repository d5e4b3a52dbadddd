"""The page store as the floors above use it."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.synthetic import (
    NAMESPACE,
    SPEC,
    chain,
    check_readable,
    locations,
    packs,
    page_spec,
    read,
    save,
)
from tqstore.errors import (
    BackendFailed,
    Corrupt,
    Incompatible,
    InvalidInput,
    NotFound,
    StoreFull,
)
from tqstore.format.block_hash import BlockRecord
from tqstore.format.format_file import FormatFile
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackLayout
from tqstore.store import mounts
from tqstore.store.page_store import PageStore

SIX = chain(6)


def test_saved_pages_and_checkpoints_are_read_by_another_opener(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        assert save(store, "demo", SIX, 0, 4) == 1
        assert save(store, "demo", SIX, 4, 6) == 2
    with PageStore.open(store_dir, mode="r") as store:
        check_readable(store, "demo", SIX, 6)
        ns = store.namespace(NAMESPACE)
        assert ns.tokens_of(SIX.hashes).tolist() == [
            token for block in SIX.blocks for token in block.tokens.tolist()
        ]
        block = ns.block(SIX.hashes[3])
        assert block is not None
        assert (block.hash, block.parent) == (SIX.hashes[3], SIX.hashes[2])
        assert ns.block(b"?" * 16) is None
        with pytest.raises(NotFound):
            ns.tokens_of([b"?" * 16])
        [info] = store.sessions()
        assert (info.name, info.sequence, info.num_tokens, info.num_blocks) == ("demo", 2, 51, 6)
        assert info.metadata == {"n": 48}
        [known] = store.namespaces()
        assert (known.id, known.namespace, known.num_packs) == (NAMESPACE.id, NAMESPACE, 2)
        assert known.nbytes == sum(
            f.stat().st_size for f in store_dir.glob("ns/**/*") if f.is_file()
        )


def test_the_same_store_whatever_is_open(store_dir: Path) -> None:
    """A block written by one is found by others without reopening."""
    with PageStore.open(store_dir) as writer, PageStore.open(store_dir) as reader:
        assert writer.uuid == reader.uuid
        ns = reader.namespace(NAMESPACE)
        for n in range(1, 6):
            assert ns.locate(SPEC, 0, SIX.hashes[n - 1]) is None
            save(writer, "demo", SIX, n - 1, n)
            assert ns.locate(SPEC, 0, SIX.hashes[n - 1]) is not None
            check_readable(reader, "demo", SIX, n)


def test_pages_that_are_there_are_not_written_again(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, PageStore.open(store_dir) as other:
        save(store, "a", SIX, 0, 6)
        before = locations(store.namespace(NAMESPACE), SPEC, SIX.keys(SPEC))
        twin = chain(6)
        twin.seed = 99  # equal tokens, other bytes: the first writer wins
        keys = twin.keys(SPEC)
        with other.commit() as commit:
            ns = other.namespace(NAMESPACE)
            found = commit.add_pages(ns, SPEC, twin.blocks, keys, twin.records(SPEC, keys))
            assert (commit.new_pages, commit.nbytes_written) == (0, 0)
        assert found == before
        assert (read(ns, SPEC, keys) == SIX.records(SPEC, keys)).all()
        assert len(packs(store_dir)) == 1


def test_a_key_given_twice_is_written_once(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, store.commit() as commit:
        ns = store.namespace(NAMESPACE)
        keys = SIX.keys(SPEC, 0, 1) * 2
        found = commit.add_pages(ns, SPEC, SIX.blocks, keys, SIX.records(SPEC, keys))
        assert found[:3] == found[3:]
        assert commit.new_pages == 3


def test_more_pages_than_a_pack_holds(store_dir: Path) -> None:
    spec = page_spec("exact", "exact", heads=2, dim=1024)
    namespace = Namespace.of("cd" * 8, [spec])
    long = chain(PackLayout.of(spec).max_pages * 2 + 3, 1, namespace)
    with PageStore.open(store_dir) as store:
        save(store, "long", long)
        check_readable(store, "long", long, len(long.blocks))
    assert len(packs(store_dir)) == 3


def test_layers_of_different_specs(store_dir: Path) -> None:
    other = page_spec("mse3", "exact", heads=2, dim=80)
    mixed = chain(4, 2, Namespace.of("cd" * 8, [SPEC, other, SPEC]))
    with PageStore.open(store_dir) as store:
        save(store, "mixed", mixed)
        check_readable(store, "mixed", mixed, 4)
        keys = [(0, mixed.hashes[0])]
        records, ns = mixed.records(other, keys), store.namespace(mixed.namespace)
        with store.commit() as commit, pytest.raises(InvalidInput, match="layer 0"):
            commit.add_pages(ns, other, mixed.blocks, keys, records)
        with pytest.raises(InvalidInput, match="is not a page spec"):
            store.namespace(NAMESPACE).locate(other, 1, mixed.hashes[0])


def test_match_is_the_longest_prefix_that_every_layer_can_resume(store_dir: Path) -> None:
    full, windowed = SPEC, page_spec("uni4")
    namespace = Namespace.of("cd" * 8, [full, windowed, full])
    long = chain(20, 3, namespace)
    specs, sinks = namespace.layers, [0, 4, 0]
    windows = [None, 20, None]  # 20 tokens touch 3 blocks of 8 wherever they start, plus one
    with PageStore.open(store_dir) as store:
        ns = store.namespace(namespace)
        assert ns.match(specs, windows, sinks, long.hashes) == 0
        with store.commit() as commit:
            for spec, keys in (
                (full, long.keys(full)),
                (windowed, [(1, long.hashes[i]) for i in (0, 3, 4, 5, 6, 9, 10)]),
            ):
                commit.add_pages(ns, spec, long.blocks, keys, long.records(spec, keys))
        # n = 7 needs sink block 0 and blocks 3..6; nothing longer has its last four blocks.
        assert ns.match(specs, windows, sinks, long.hashes) == 7
        assert ns.match(specs, windows, sinks, long.hashes[:6]) == 1  # block 2 is missing for 3..6
        assert ns.match(specs, windows, [0, 9, 0], long.hashes) == 1  # needs sink block 1 too
        assert ns.match(specs, [None, 1, None], sinks, long.hashes) == 11
        assert ns.match(specs, [None] * 3, sinks, long.hashes) == 1
        assert ns.match(specs, windows, sinks, [b"?" * 16, *long.hashes]) == 0
        assert ns.match(specs, windows, sinks, []) == 0


@pytest.mark.parametrize("missing", range(6))
def test_match_ends_at_the_first_missing_page(store_dir: Path, missing: int) -> None:
    with PageStore.open(store_dir) as store, store.commit() as commit:
        ns = store.namespace(NAMESPACE)
        keys = [key for key in SIX.keys(SPEC) if key != (1, SIX.hashes[missing])]
        commit.add_pages(ns, SPEC, SIX.blocks, keys, SIX.records(SPEC, keys))
        assert ns.match([SPEC] * 3, [None] * 3, [0] * 3, SIX.hashes) == missing


def test_publish_refuses_a_checkpoint_whose_pages_are_missing(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 3)
        newest = f"block {SIX.hashes[5].hex()}"
        with store.commit() as commit, pytest.raises(NotFound, match=newest):
            commit.publish("demo", SIX.checkpoint(6))
        ns = store.namespace(NAMESPACE)
        keys = [key for key in SIX.keys(SPEC, 3) if key != (2, SIX.hashes[4])]
        with store.commit() as commit:
            commit.add_pages(ns, SPEC, SIX.blocks, keys, SIX.records(SPEC, keys))
            with pytest.raises(NotFound, match=f"layer 2, block {SIX.hashes[4].hex()}"):
                commit.publish("demo", SIX.checkpoint(6))
        check_readable(store, "demo", SIX, 3)


def test_publish_notices_a_pack_that_was_deleted(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 3)
        save(store, "demo", SIX, 3, 6)
        store.remove("demo")
        packs(store_dir)[0].unlink()
        with store.commit() as commit, pytest.raises(NotFound, match="is not in the store"):
            commit.publish("demo", SIX.checkpoint(6))
        with store.commit() as commit, pytest.raises(NotFound):
            commit.publish("demo", SIX.checkpoint(2))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"page_tokens": 4, "block_hashes": ()}, "page_tokens"),
        ({"layers": ()}, "0 layers"),
        ({"metadata": {"x": object()}}, "metadata"),
    ],
)
def test_publish_refuses_a_checkpoint_of_another_form(
    store_dir: Path, fields: dict[str, Any], what: str
) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 2)
        base = SIX.checkpoint(0 if "block_hashes" in fields else 2)
        with store.commit() as commit, pytest.raises(InvalidInput, match=what):
            commit.publish("demo", replace(base, **fields))
        check_readable(store, "demo", SIX, 2)


def test_publish_checks_tails_against_the_page_specs(store_dir: Path) -> None:
    other = chain(0, 0, Namespace.of("ab" * 8, [page_spec(dim=80)] * 3, parts={"weights": "w"}))
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 1)
        bad = replace(other.checkpoint(), namespace_id=NAMESPACE.id)
        with store.commit() as commit, pytest.raises(InvalidInput, match="layer 0's tail"):
            commit.publish("demo", bad)


def test_a_session_without_a_page_says_its_namespace(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "short", chain(0))
        assert store.stored_namespace(NAMESPACE.id) == NAMESPACE
        with pytest.raises(NotFound):
            store.stored_namespace(bytes(32))
    with PageStore.open(store_dir) as store, store.commit() as commit:
        # The handle comes from the file.
        assert commit.publish("short", chain(0).checkpoint(num_tail=4)) == 2


def test_checkpoints_are_pruned_to_two_and_numbers_go_on(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        assert [save(store, "demo", SIX, n, n + 1) for n in range(5)] == [1, 2, 3, 4, 5]
    names = sorted(file.name for file in store_dir.glob("sessions/*/*"))
    assert names == ["000000000004.ckpt", "000000000005.ckpt"]


def test_remove(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "a", SIX, 0, 1)
        save(store, "b", SIX, 0, 1)
        store.remove("a")
        assert [info.name for info in store.sessions()] == ["b"]
        for missing in (store.latest, store.remove):
            with pytest.raises(NotFound, match="no session 'a'"):
                missing("a")
        assert save(store, "a", SIX, 1, 2) == 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a\n", " a", "a ", "ä", "x" * 129, 5]
)
def test_names_that_cannot_be_sessions(store_dir: Path, name: Any) -> None:
    with PageStore.open(store_dir) as store:
        for use in (store.latest, store.remove, lambda name: save(store, name, SIX, 0, 1)):
            with pytest.raises(InvalidInput, match="cannot name a session"):
                use(name)
        assert store.sessions() == []


def test_names_that_a_case_blind_file_system_would_confuse(store_dir: Path) -> None:
    names = ["Demo", "demo", "de mo", "de-mo", "de.mo", "d" * 128, "D" * 128, "-", "_"]
    with PageStore.open(store_dir) as store:
        for name in names:
            save(store, name, SIX, 0, 1)
        assert {info.name for info in store.sessions()} == set(names)
    folders = [folder.name for folder in (store_dir / "sessions").iterdir()]
    assert len({folder.lower() for folder in folders}) == len(names)


def test_everything_is_private_whatever_the_umask(store_dir: Path) -> None:
    old = os.umask(0o277)
    try:
        with PageStore.open(store_dir) as store:
            save(store, "demo", SIX)
    finally:
        os.umask(old)
    for path in [store_dir, *store_dir.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_read_only_mode_writes_nothing(store_dir: Path) -> None:
    with pytest.raises(NotFound, match="no store at"):
        PageStore.open(store_dir, mode="r")
    assert not store_dir.exists()
    store_dir.mkdir()
    with pytest.raises(NotFound, match="no store at"):
        PageStore.open(store_dir, mode="r")
    assert list(store_dir.iterdir()) == []
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX)
    before = {path: path.stat().st_mtime_ns for path in store_dir.rglob("*")}
    with PageStore.open(store_dir, mode="r") as store:
        check_readable(store, "demo", SIX, 6)
        assert list(store.verify()) == []
        with pytest.raises(InvalidInput, match="mode='r'"), store.commit():
            pass
        with pytest.raises(InvalidInput, match="mode='r'"):
            store.remove("demo")
    assert before == {path: path.stat().st_mtime_ns for path in store_dir.rglob("*")}


def test_folders_that_are_not_stores(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput, match="is a file"):
        PageStore.open(tmp_path / "file")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "letter.txt").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"holds 'letter\.txt'"):
        PageStore.open(tmp_path / "docs")
    assert [file.name for file in (tmp_path / "docs").iterdir()] == ["letter.txt"]


def test_a_store_that_lost_its_format(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX)
    (store_dir / "FORMAT").unlink()
    with pytest.raises(Corrupt, match="is missing from a store that has data"):
        PageStore.open(store_dir)


def test_newer_formats_and_unknown_features_are_refused(store_dir: Path) -> None:
    PageStore.open(store_dir).close()
    good = (store_dir / "FORMAT").read_bytes()
    feature = FormatFile(bytes(16), 1, ("encryption",)).encode()
    for content, error in ((feature, Incompatible), (good[:-1], Corrupt), (b"", Corrupt)):
        (store_dir / "FORMAT").write_bytes(content)
        with pytest.raises(error):
            PageStore.open(store_dir)
    (store_dir / "FORMAT").write_bytes(good)


def test_a_lost_lock_is_made_anew_on_opening(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        (store_dir / "LOCK").unlink()
        with pytest.raises(Corrupt, match="LOCK: is missing"):
            save(store, "demo", SIX)
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX)


def test_an_interrupted_creation_is_finished(store_dir: Path) -> None:
    (store_dir / "ns").mkdir(parents=True, mode=0o700)
    store_dir.chmod(0o700)
    (store_dir / "LOCK").touch(mode=0o600)
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX)


def test_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQSTORE_HOME", str(tmp_path / "home"))
    with PageStore.open() as store:
        assert store.path == tmp_path / "home"
    monkeypatch.delenv("TQSTORE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with PageStore.open() as store:
        assert tmp_path in store.path.parents


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "filesystem_kind", lambda _: "nfs4")
    with pytest.raises(BackendFailed, match="network file system"):
        PageStore.open(tmp_path / "deep" / "store")
    assert list(tmp_path.iterdir()) == []


def test_the_budget_holds(store_dir: Path) -> None:
    with PageStore.open(store_dir, max_bytes=60_000) as store:
        save(store, "demo", SIX, 0, 1)
        with pytest.raises(StoreFull, match="exceed the store's budget"):
            save(store, "demo", chain(60, 5))
        check_readable(store, "demo", SIX, 1)
    assert sum(f.stat().st_size for f in store_dir.rglob("*") if f.is_file()) <= 60_000
    with PageStore.open(store_dir, max_bytes=1) as store, pytest.raises(StoreFull):
        save(store, "demo", chain(1, 6))


def test_wrong_pages_are_refused_and_nothing_is_written(store_dir: Path) -> None:
    keys = SIX.keys(SPEC)
    records = SIX.records(SPEC, keys)
    forged = [
        BlockRecord(block.hash, block.parent, block.tokens + (i == 2))
        for i, block in enumerate(SIX.blocks)
    ]
    foreign = chain(6, 0, Namespace.of("cd" * 8, [SPEC] * 3))
    cases: list[tuple[Any, Any, Any]] = [
        (SIX.blocks, keys[:-1], records),
        (SIX.blocks, keys[::-1], records),
        (SIX.blocks, keys, records[:, :-1]),
        (SIX.blocks, keys, records.astype(np.int16)),
        (SIX.blocks[:-1], keys, records),
        (forged, keys, records),
        (foreign.blocks, foreign.keys(SPEC), foreign.records(SPEC, foreign.keys(SPEC))),
    ]
    with PageStore.open(store_dir) as store, store.commit() as commit:
        for blocks, case_keys, case_records in cases:
            with pytest.raises(InvalidInput):
                commit.add_pages(store.namespace(NAMESPACE), SPEC, blocks, case_keys, case_records)
    assert list((store_dir / "ns").iterdir()) == []


def test_out_must_fit(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 1)
        ns = store.namespace(NAMESPACE)
        found = locations(ns, SPEC, SIX.keys(SPEC, 0, 1))
        good = np.empty((3, SPEC.page_nbytes), np.uint8)
        frozen = good.copy()
        frozen.flags.writeable = False
        for bad in (good[:2], good[:, :-1], good.view(np.int8), good[:, ::-1], frozen):
            with pytest.raises(InvalidInput, match="out must be"):
                ns.read_pages(SPEC, found, bad)
        ns.read_pages(SPEC, found, memoryview(good).cast("B"))
        assert (good == SIX.records(SPEC, SIX.keys(SPEC, 0, 1))).all()
        ns.read_pages(SPEC, [], good[:0])


def test_pages_are_read_in_any_order(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        for n in range(6):
            save(store, "demo", SIX, n, n + 1)
        keys = SIX.keys(SPEC)
        shuffled = [keys[i] for i in np.random.default_rng(0).permutation(len(keys))]
        assert (
            read(store.namespace(NAMESPACE), SPEC, shuffled) == SIX.records(SPEC, shuffled)
        ).all()


def test_a_missing_pack_is_not_found_and_forgotten(
    store_dir: Path, expected_findings: set[str]
) -> None:
    expected_findings.add("reference")
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX, 0, 3)
        save(store, "demo", SIX, 3, 6)
    with PageStore.open(store_dir) as store:
        ns = store.namespace(NAMESPACE)
        found = locations(ns, SPEC, SIX.keys(SPEC))
        packs(store_dir)[1].unlink()
        out = np.empty((len(found), SPEC.page_nbytes), np.uint8)
        with pytest.raises(NotFound):
            ns.read_pages(SPEC, found, out)
        assert ns.match([SPEC] * 3, [None] * 3, [0] * 3, SIX.hashes) == 3
        assert ns.locate(SPEC, 0, SIX.hashes[4]) is None


def test_an_unlinked_pack_stays_readable_while_it_is_open(
    store_dir: Path, expected_findings: set[str]
) -> None:
    expected_findings.add("reference")
    with PageStore.open(store_dir) as store:
        save(store, "demo", SIX)
        ns = store.namespace(NAMESPACE)
        keys = SIX.keys(SPEC)
        found = locations(ns, SPEC, keys)
        out = np.empty((len(found), SPEC.page_nbytes), np.uint8)
        ns.read_pages(SPEC, found[:1], out[:1])
        packs(store_dir)[0].unlink()
        ns.read_pages(SPEC, found, out)
        assert (out == SIX.records(SPEC, keys)).all()


def test_many_threads_use_one_store(store_dir: Path) -> None:
    chains = [chain(4, seed) for seed in range(6)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(4):
                save(store, f"s{number}", chains[number], n, n + 1)
                check_readable(store, f"s{number}", chains[number], n + 1)
        except BaseException as error:
            errors.append(error)

    with PageStore.open(store_dir) as store:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store.sessions()) == 6


def test_a_closed_store_says_so(store_dir: Path) -> None:
    store = PageStore.open(store_dir)
    with store.commit() as commit:
        pass
    with pytest.raises(InvalidInput, match="this commit is over"):
        commit.publish("demo", chain(0).checkpoint())
    store.close()
    store.close()
    for use in (store.sessions, store.namespaces, lambda: store.latest("a")):
        with pytest.raises(InvalidInput, match="is closed"):
            use()
