"""Damage anywhere: verify names it, readers never return wrong bytes, inspect shows it."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.store.synthetic import DEMO_SPECS, Chain, chain, check_readable, packs, save
from tqstore.errors import Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackLayout
from tqstore.store.folder import Folder
from tqstore.store.inspect import list_packs, view_pack, view_page
from tqstore.store.page_store import PageStore

SPEC, OTHER = DEMO_SPECS
NAMESPACE = Namespace.of("ab" * 8, [SPEC, OTHER])
DEMO = chain(3, 0, NAMESPACE)


@pytest.fixture
def saved(store_dir: Path, expected_findings: set[str]) -> Path:
    """A store with two checkpoints of one session; tests damage it."""
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 2)
        save(store, "demo", DEMO, 2, 3)
    expected_findings |= {
        "format", "namespace", "zarr", "pack", "index", "page", "block", "checkpoint", "reference",
        "leftover", "stranger", "access", "folder",
    }  # fmt: skip
    return store_dir


def findings(path: Path) -> dict[str, str]:
    """kind -> what of each finding."""
    with PageStore.open(path, mode="r") as store:
        return {finding.kind: finding.what for finding in store.verify()}


def is_wrong(path: Path, sequence: Chain) -> bool:
    """True if any read returns something else than was written; errors and misses are fine."""
    with PageStore.open(path, mode="r") as store:
        try:
            checkpoint = store.latest("demo")
        except TqStoreError:
            return False
        if checkpoint not in (sequence.checkpoint(2), sequence.checkpoint(3)):
            return True
        ns = store.namespace(sequence.namespace)
        for spec in sequence.namespace.page_specs:
            for key in sequence.keys(spec):
                location = ns.locate(spec, *key)
                out = np.zeros((1, spec.page_nbytes), np.uint8)
                try:
                    if location is not None:
                        ns.read_pages(spec, [location], out)
                        if (out != sequence.records(spec, [key])).any():
                            return True
                except TqStoreError:
                    assert ns.locate(spec, *key) != location  # set aside
    return False


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "LOCK")


def spots(file: Path, rng: random.Random) -> Iterator[int]:
    """A sample of bits; of packs surely every region: header, its padding, page, crc, index."""
    nbytes = file.stat().st_size
    yield from rng.sample(range(8 * nbytes), 25)
    if file.name.startswith("c."):
        view = view_pack(file)
        end = view.first_slot + view.layout.page_nbytes
        for at in (0, 20, 23, view.header_nbytes, view.first_slot, end, end + 4, nbytes - 1):
            yield 8 * at


def test_every_flip_is_found_and_none_is_returned(saved: Path) -> None:
    rng = random.Random(0)
    for file in files(saved):
        good = file.read_bytes()
        for bit in spots(file, rng):
            damaged = bytearray(good)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            if file.name == "FORMAT":
                with pytest.raises(TqStoreError):
                    PageStore.open(saved)
                continue
            assert findings(saved), (file, bit)
            assert not is_wrong(saved, DEMO), (file, bit)
        file.write_bytes(good)
    assert findings(saved) == {}


def test_files_cut_at_every_length(saved: Path) -> None:
    rng = random.Random(0)
    for file in files(saved):
        good = file.read_bytes()
        lengths = range(len(good)) if len(good) < 300 else rng.sample(range(len(good)), 20)
        for length in lengths:
            file.write_bytes(good[:length])
            if file.name == "FORMAT":
                with pytest.raises(Corrupt):
                    PageStore.open(saved)
                continue
            assert findings(saved), (file, length)
            assert not is_wrong(saved, DEMO), (file, length)
        file.write_bytes(good)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = max(saved.glob("sessions/*/*.ckpt"))
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with PageStore.open(saved) as store:
        check_readable(store, "demo", DEMO, 2)
        assert "bad checksum" in caplog.text
        assert save(store, "demo", DEMO, 0, 3) == 3
        check_readable(store, "demo", DEMO, 3)


def test_a_checkpoint_that_claims_gigabytes_is_refused_unread(saved: Path) -> None:
    """Two valid heads and a sparse file behind them; reading it would take 3 GB of memory."""
    newest = max(saved.glob("sessions/*/*.ckpt"))
    with newest.open("r+b") as file:
        file.truncate(3 << 30)
    tracemalloc.start()
    try:
        with PageStore.open(saved) as store:
            check_readable(store, "demo", DEMO, 2)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_session_whose_checkpoints_are_all_damaged(saved: Path) -> None:
    for file in saved.glob("sessions/*/*.ckpt"):
        file.write_bytes(b"TQCK")
    with PageStore.open(saved) as store:
        with pytest.raises(Corrupt, match="cut short"):
            store.latest("demo")
        [info] = store.sessions()
        assert info.problem is not None
        assert "cut short" in info.problem
        store.remove("demo")
        assert store.sessions() == []


def test_a_checkpoint_in_another_sessions_folder(saved: Path) -> None:
    with PageStore.open(saved) as store:
        save(store, "other", DEMO, 0, 1)
    mine, theirs = (max(saved.glob(f"sessions/{name}-*/*.ckpt")) for name in ("demo", "other"))
    shutil.copy(mine, theirs)
    with PageStore.open(saved) as store, pytest.raises(Corrupt, match="of session 'demo'"):
        store.latest("other")
    assert "of session 'demo'" in findings(saved)["checkpoint"]


def test_a_page_in_another_pages_place(saved: Path) -> None:
    """Two sound pages swapped: each checksum is right, the header says it is another page."""
    pack = packs(saved)[0]
    view = view_pack(pack)
    stride = view.layout.stride
    content = bytearray(pack.read_bytes())
    first, second = view.first_slot, view.first_slot + stride
    one, two = content[first : first + stride], content[second : second + stride]
    content[first : first + stride], content[second : second + stride] = two, one
    pack.write_bytes(content)
    assert "names another page" in findings(saved)["page"]
    assert not is_wrong(saved, DEMO)
    assert view_page(view_pack(pack), 0).problem == "its header names another page than the pack's"


def test_a_pack_in_another_specs_folder(saved: Path) -> None:
    folders = sorted(saved.glob("ns/*/pages/*"))
    shutil.copy(packs(folders[0].parents[3])[0], folders[0] / "c.7.0")
    for pack in list(folders[0].glob("c.*.0")):
        shutil.move(pack, folders[1] / pack.name)
    assert "page spec is not" in findings(saved)["pack"]
    assert not is_wrong(saved, DEMO)


def test_strangers_leftovers_and_open_doors(saved: Path) -> None:
    (saved / "notes.txt").write_bytes(b"")
    (packs(saved)[0].parent / ".tmp-1-abc").write_bytes(b"half a pack")
    packs(saved)[0].chmod(0o644)
    (saved / "sessions").chmod(0o755)
    (saved / "sessions" / "../sessions" / "strange name").mkdir()
    (saved / "ns" / "not-a-namespace").mkdir()
    with PageStore.open(saved, mode="r") as store:
        found = list(store.verify())
        check_readable(store, "demo", DEMO, 3)
    assert {finding.severity for finding in found} == {"warning"}
    assert sorted(f.kind for f in found) == ["access"] * 2 + ["leftover"] + ["stranger"] * 3
    assert all(not f.path.startswith("/") and ".." not in f.path for f in found)
    shutil.rmtree(saved / "ns" / "not-a-namespace")


def test_a_missing_pack_is_a_broken_reference(saved: Path) -> None:
    packs(saved)[-1].unlink()
    found = findings(saved)
    assert set(found) == {"reference"}
    assert "pages are missing" in found["reference"]


def test_a_namespace_file_of_another_namespace(saved: Path) -> None:
    file = next(saved.glob("ns/*/namespace.msgpack"))
    file.write_bytes(Namespace.of("cd" * 8, [SPEC]).encode())
    assert findings(saved)["namespace"].endswith("is another namespace's")
    with PageStore.open(saved) as store:
        with pytest.raises(Corrupt, match="another namespace's"):
            store.stored_namespace(NAMESPACE.id)
        [info] = store.namespaces()
        assert info.namespace is None
        assert info.problem is not None


def test_another_zarr_json_is_not_overwritten(saved: Path) -> None:
    for file in saved.glob("ns/*/pages/*/zarr.json"):
        file.write_bytes(b"{}")
    with PageStore.open(saved) as store, pytest.raises(Corrupt, match="is not what this release"):
        save(store, "more", chain(2, 9, NAMESPACE))
    assert findings(saved)["zarr"] == "does not describe these packs"


def test_inspect_shows_a_page(saved: Path) -> None:
    assert list_packs(saved) == sorted(packs(saved), key=lambda p: (p.parent, p.name))
    for path in list_packs(saved):
        view = view_pack(path)
        assert view.namespace == NAMESPACE
        assert view.layout == PackLayout.of(view.spec)
        for slot, key in enumerate(view.header.page_keys):
            page = view_page(view, slot)
            assert page.problem is None
            assert (page.header.layer, page.header.block_hash) == key
            record = DEMO.records(view.spec, [key])[0]
            for stream in page.streams:
                raw = record[stream.spec.offset :][: stream.spec.nbytes]
                assert stream.array.shape == stream.spec.shape
                if stream.spec.dtype == "uint8":
                    assert stream.array.tobytes() == raw.tobytes()
                    assert stream.statistics()["mean"] == pytest.approx(raw.mean())
        with pytest.raises(InvalidInput, match="has no page"):
            view_page(view, view.header.num_pages)


def test_inspect_of_what_is_no_pack(saved: Path) -> None:
    for bad in (saved / "FORMAT", saved, saved / "ns" / "x" / "y" / "c.1.0"):
        with pytest.raises(InvalidInput, match="is not a pack"):
            view_pack(bad)
    with pytest.raises(NotFound):
        view_pack(packs(saved)[0].parent / "c.1.0")
    with pytest.raises(NotFound):
        view_pack(saved / "ns" / "x" / "pages" / "y" / "c.1.0")


def test_inspect_says_what_is_wrong_with_a_page(saved: Path) -> None:
    pack = packs(saved)[0]
    view = view_pack(pack)
    content = bytearray(pack.read_bytes())
    content[view.first_slot + 100] ^= 1
    pack.write_bytes(content)
    assert view_page(view, 0).problem == "bad checksum"
    assert view_page(view, 1).problem is None


def test_what_others_publish_while_verify_lists_is_no_stranger(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack, a session and a record of gc each appear right after a folder was listed."""
    names, saved, is_busy = Folder.names, [], []

    with PageStore.open(store_dir) as store:
        save(store, "first", chain(2))

        def listing(self: Folder) -> list[str]:
            listed = names(self)
            if not is_busy and len(saved) < 30:
                is_busy.append(1)
                saved.append(len(saved) + 1)
                save(store, f"new-{saved[-1]}", chain(2, saved[-1]))
                is_busy.clear()
            return listed

        monkeypatch.setattr(Folder, "names", listing)
        assert [finding for finding in store.verify() if finding.kind == "stranger"] == []
    assert len(saved) > 5
