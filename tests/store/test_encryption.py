"""Encryption at rest: what is hidden, that nothing forged is taken, and whose key it is."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import random
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import check_store
from tests.store.synthetic import (
    DEMO_SPECS,
    NAMESPACE,
    SPEC,
    ScriptedFiles,
    chain,
    check_readable,
    packs,
    save,
)
from tests.store.test_processes import in_child
from tools.faults.cuts import cut_everywhere, memory_folder
from tools.faults.flips import flip_all, make_small_store
from tools.faults.scenarios import SCENARIOS, Scenario
from tqstore.errors import Corrupt, Incompatible, InvalidInput, NotFound, StoreFull, TqStoreError
from tqstore.format import format_file
from tqstore.format.format_file import FormatFile
from tqstore.format.namespace import Namespace
from tqstore.store import encryption
from tqstore.store.encryption import CHUNK_NBYTES, SealedFiles, plain_nbytes, sealed_nbytes
from tqstore.store.encryption_key import KEY_FILE_VARIABLE, KEY_VARIABLE
from tqstore.store.files import Files
from tqstore.store.folder import Folder
from tqstore.store.gc_plan import GcOptions
from tqstore.store.inspect import view_pack, view_page
from tqstore.store.page_store import PageStore

pytest.importorskip("cryptography")
KEY = bytes(range(32))
DEMO = chain(4)
SOUND = [s for s in SCENARIOS if not s.is_damaged]  # the damage is made for plain files
NOW = GcOptions(grace_seconds=0)
TEXT = "the patient's name is secret"


@pytest.fixture
def _keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of the test is opened with KEY, by the environment."""
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())


@pytest.fixture
def saved(_keyed: None, store_dir: Path) -> Path:
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 2)
        save(store, "demo", DEMO, 2, 4)
    return store_dir


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# What is hidden


@pytest.mark.usefixtures("_keyed")
def test_secure_promise_7_nothing_of_a_conversation_is_readable(store_dir: Path) -> None:
    secret = Namespace.of("fe" * 32, [SPEC], parts={"weights": TEXT})
    sequence = chain(3, 0, secret)
    with PageStore.open(store_dir) as store:
        ns = store.namespace(secret)
        with store.commit() as commit:
            keys = sequence.keys(SPEC)
            records = sequence.records(SPEC, keys)
            commit.add_pages(ns, SPEC, sequence.blocks, keys, records)
            commit.publish("demo", sequence.checkpoint(metadata={"title": TEXT}))
            tail = sequence.checkpoint().layers[0].keys.data
        store.gc(NOW)
        assert store.latest("demo").metadata == {"title": TEXT}
    found = contents(store_dir)
    assert len(found) == 6
    for hidden in (
        *(TEXT.encode(), tail, records[0].tobytes()[64:], sequence.blocks[0].token_bytes),
        *(b"fingerprint", b"TQPK", b"TQPG", b"TQNS", b"TQCK", b"zarr", *sequence.hashes, KEY),
    ):
        assert [name for name, content in found.items() if hidden in content] == []
    assert {name for name, content in found.items() if content[:4] != b"TQSF"} == {"FORMAT", "LOCK"}


def test_what_is_written_is_read_by_another_opener_and_forked_child(saved: Path) -> None:
    with PageStore.open(saved) as store:
        check_readable(store, "demo", DEMO, 4)
        assert in_child(lambda: check_readable(store, "demo", DEMO, 4)) == 0
        assert in_child(lambda: save(store, "child", DEMO, 0, 3)) == 0
        check_readable(store, "child", DEMO, 3)
        assert list(store.verify()) == []


@pytest.mark.usefixtures("_keyed")
def test_several_specs_gc_and_purge(store_dir: Path) -> None:
    mixed = chain(5, 1, Namespace.of("ab" * 8, DEMO_SPECS))
    with PageStore.open(store_dir) as store:
        save(store, "mixed", mixed)
        save(store, "demo", DEMO)
        store.purge("mixed")
        store.gc(NOW)
        check_readable(store, "demo", DEMO, 4)
        assert store.repair() == []
        assert len(store.namespaces()) == 1
    with PageStore.open(store_dir, mode="r", key=KEY) as store:
        check_readable(store, "demo", DEMO, 4)


@pytest.mark.usefixtures("_keyed")
def test_the_budget_counts_what_is_on_the_disk(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 1)
    limit = sum(map(len, contents(store_dir).values())) + 30_000
    num_saved = 0
    with PageStore.open(store_dir, max_bytes=limit) as store, contextlib.suppress(StoreFull):
        for num_saved in range(50):
            save(store, f"more-{num_saved}", chain(2, num_saved + 10))
    assert 0 < num_saved < 49
    assert sum(map(len, contents(store_dir).values())) <= limit
    check_store(store_dir)


def test_single_packs_are_inspected_with_the_key(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in packs(saved):
        view = view_pack(path)
        for slot, key in enumerate(view.header.page_keys):
            page = view_page(view, slot)
            assert page.problem is None
            codes = next(s for s in page.streams if s.spec.name == "value_codes")
            record = DEMO.records(SPEC, [key])[0]
            at = codes.spec.offset
            assert codes.array.tobytes() == record[at : at + codes.spec.nbytes].tobytes()
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(Incompatible, match="no key"):
        view_pack(packs(saved)[0])
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())


def test_the_command_line_takes_the_key_from_the_environment(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from tqstore.cli.app import app

    pack = str(packs(saved)[0])
    for command in (["ls"], ["verify"], ["inspect", pack], ["inspect", "demo"], ["stats"]):
        arguments = [command[0], *command[1:], "--store", str(saved)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (command, done.output)
    with monkeypatch.context() as patch:
        patch.delenv(KEY_VARIABLE)
        done = CliRunner().invoke(app, ["ls", "--store", str(saved)])
        assert isinstance(done.exception, Incompatible) or done.exit_code == Incompatible.exit_code


# The bytes


def open_by_hand(sealed: bytes, key: bytes, uuid: bytes, place: str) -> bytes:
    """docs/format.md, independently of the package."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    assert sealed[:8] == b"TQSF" + bytes([1, 0, 0, 0])
    message = b"tqstore file key\0" + uuid + sealed[8:40] + place.encode()
    cipher = AESGCM(hmac.new(key, message, hashlib.sha256).digest())
    plain, at, number = b"", 40, 0
    while at < len(sealed):
        chunk = sealed[at : at + 65552]
        at += 65552
        nonce = number.to_bytes(11, "big") + (b"\1" if at >= len(sealed) else b"\0")
        plain += cipher.decrypt(nonce, chunk, None)
        number += 1
    return plain


def test_the_bytes_are_those_of_the_specification(saved: Path) -> None:
    record = FormatFile.decode((saved / "FORMAT").read_bytes())
    assert record.required_features == ("aes-256-gcm",)
    message = b"tqstore key check\0" + record.uuid
    assert record.key_check == hmac.new(KEY, message, hashlib.sha256).digest()[:16]
    [namespace] = saved.glob("ns/*/namespace.msgpack")
    plain = open_by_hand(namespace.read_bytes(), KEY, record.uuid, f"ns/{NAMESPACE.id.hex()}")
    assert plain == NAMESPACE.encode()
    for pack in packs(saved):
        place = str(pack.parent.relative_to(saved))
        assert open_by_hand(pack.read_bytes(), KEY, record.uuid, place)[:4] == b"TQPK"


SIZES = [0, 1, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, 3 * CHUNK_NBYTES, 400_000]


def sealed_folder(path: Path, files: Any = None) -> Folder:
    path.mkdir(exist_ok=True)
    (path / "inner").mkdir(exist_ok=True)
    inner = files or Files()
    root = inner.open_root(str(path))
    sealed = SealedFiles(inner, root, KEY, bytes(16))
    return Folder(sealed, sealed.open_folder(root, "inner"), str(path / "inner"))


@pytest.mark.parametrize("nbytes", SIZES)
def test_any_part_of_a_file_can_be_read(tmp_path: Path, nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    cuts = sorted(random.Random(1).choices(range(nbytes + 1), k=5))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    for short in (False, True):
        files = ScriptedFiles()
        files.short_writes = short
        folder = sealed_folder(tmp_path, files)
        folder.create([f"file-{short}"], pieces)
        name = f"file-{short}"
        assert (tmp_path / "inner" / name).stat().st_size == sealed_nbytes(nbytes)
        assert plain_nbytes(sealed_nbytes(nbytes), name) == nbytes
        assert folder.read(name, nbytes) == content
        with folder.reading(name) as (fd, size):
            assert size == nbytes
            for at in [*cuts, nbytes - 1, nbytes, nbytes + 5]:
                for length in (1, 24, CHUNK_NBYTES, nbytes):
                    at = max(0, at)
                    assert folder.read_range(name, fd, at, length) == content[at : at + length]
        folder.close()


@given(st.integers(0, 10**6))
@settings(max_examples=300)
def test_sizes_go_to_and_fro(nbytes: int) -> None:
    assert plain_nbytes(sealed_nbytes(nbytes), "") == nbytes
    for size in range(sealed_nbytes(nbytes) + 1, sealed_nbytes(nbytes + 1)):
        with pytest.raises(Corrupt):
            plain_nbytes(size, "")


def test_a_file_is_at_its_end_when_it_was_synced(tmp_path: Path) -> None:
    folder = sealed_folder(tmp_path)
    fd = folder.files.create(folder.fd, "x")
    folder.files.writev(fd, [b"1"])
    folder.files.fsync(fd)
    with pytest.raises(OSError, match="after its end"):
        folder.files.writev(fd, [b"2"])
    folder.files.close(fd)
    folder.close()


@pytest.mark.usefixtures("_keyed")
def test_secure_promise_7_no_nonce_is_used_twice(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every (key, nonce) of all encryptions of many saves, equal ones among them, is another."""
    used: list[tuple[bytes, bytes]] = []
    real = encryption.aes_gcm

    class Recorder:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, real(key)

        def encrypt(self, nonce: bytes, data: bytes, more: None) -> bytes:
            used.append((self._key, nonce))
            return self._cipher.encrypt(nonce, data, more)

        def decrypt(self, nonce: bytes, data: bytes, more: None) -> bytes:
            return self._cipher.decrypt(nonce, data, more)

    monkeypatch.setattr(encryption, "aes_gcm", Recorder)
    with PageStore.open(store_dir) as store:
        for n in range(5):
            save(store, "demo", chain(20), 0, 20)
            save(store, f"other-{n}", chain(90, n))
            store.remove("demo")
            store.gc(NOW)
    assert len(used) > 40
    assert len(set(used)) == len(used)
    assert any(int.from_bytes(nonce[:11], "big") > 2 for _, nonce in used)


def test_every_operation_is_passed_on() -> None:
    """One that is new must be decided upon, not fall through to the real file system."""
    public = {name for name in vars(Files) if not name.startswith("_")}
    assert public - set(vars(SealedFiles)) == set()


# What is forged


@pytest.mark.usefixtures("_keyed")
def test_secure_promise_7_every_flip_is_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(0)
    with memory_folder() as folder:
        make_small_store(folder / "store")
        report = flip_all(folder / "store", lambda _file, bits: rng.sample(range(bits), 60))
    assert report.undetected == ()
    assert set(report.regions) == {"FORMAT", "FORMAT head", "encrypted head", "encrypted chunk"}


def test_secure_promise_7_what_is_cut_moved_or_planted_is_refused(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks cut off, swapped, repeated; files in another's place; plain files."""
    caplog.set_level(logging.ERROR)
    with PageStore.open(saved) as store:
        big = chain(60, 77)
        save(store, "big", big)
    pack = max(packs(saved), key=lambda file: file.stat().st_size)
    good = pack.read_bytes()
    chunks = [good[at : at + 65552] for at in range(40, len(good), 65552)]
    assert len(chunks) > 3
    head = good[:40]
    forged = {
        "cut at a chunk": head + b"".join(chunks[:-1]),
        "cut to the head": head,
        "swapped": head + b"".join([chunks[1], chunks[0], *chunks[2:]]),
        "repeated": head + b"".join([*chunks[:-1], chunks[-2], chunks[-1]]),
        "last twice": good + chunks[-1],
        "longer": good + b"x",
        "empty": b"",
        "plain": open_by_hand(
            good,
            KEY,
            FormatFile.decode((saved / "FORMAT").read_bytes()).uuid,
            str(pack.parent.relative_to(saved)),
        ),
        "version": b"TQSF\2\0" + good[6:],
    }
    for what, content in forged.items():
        pack.write_bytes(content)
        with PageStore.open(saved, mode="r") as store:
            assert any(f.kind == "pack" for f in store.verify()), what
            with pytest.raises((TqStoreError, AssertionError)):
                check_readable(store, "big", big, 60)
    pack.write_bytes(good)
    check_store(saved)


def test_secure_promise_7_a_file_of_another_place_is_refused(saved: Path, tmp_path: Path) -> None:
    """The same bytes, sound and of the same key: in another session, namespace and store."""
    with PageStore.open(saved) as store:
        save(store, "other", DEMO, 0, 1)
        save(store, "else", chain(1, 0, Namespace.of("cd" * 8, [SPEC] * 3)))
        other_store = tmp_path / "another"
    with PageStore.open(other_store) as store:
        save(store, "demo", DEMO, 0, 4)
    mine = max(saved.glob("sessions/demo-*/*.ckpt"))
    theirs = max(saved.glob("sessions/other-*/*.ckpt"))
    elsewhere = max(other_store.glob("sessions/demo-*/*.ckpt"))
    for source, target in ((mine, theirs), (elsewhere, mine)):
        kept = target.read_bytes()
        shutil.copy(source, target)
        with PageStore.open(saved, mode="r") as store:
            found = [finding.what for finding in store.verify() if finding.kind == "checkpoint"]
            assert ["not what was written here" in what for what in found] == [True]
        target.write_bytes(kept)
    folders = sorted(saved.glob("ns/*/pages/*"))
    assert len(folders) == 2
    shutil.copy(packs(saved)[0], folders[0] / "c.7.0")
    shutil.copy(packs(saved)[0], folders[1] / "c.7.0")
    with PageStore.open(saved, mode="r") as store:
        assert sum(f.kind == "pack" for f in store.verify()) == 1
    (folders[0] / "c.7.0").unlink()
    (folders[1] / "c.7.0").unlink()


def test_a_damaged_chunk_costs_its_pages_and_no_more(
    saved: Path, expected_findings: set[str]
) -> None:
    expected_findings |= {"reference", "leftover"}
    sequence = chain(60, 5)
    with PageStore.open(saved) as store:
        save(store, "long", sequence)
    pack = max(packs(saved), key=lambda file: file.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[-20_000] ^= 1
    pack.write_bytes(content)
    keys = sequence.keys(SPEC)

    def readable(store: PageStore) -> set[tuple[int, bytes]]:
        ns, found = store.namespace(NAMESPACE), set()
        for key in keys:
            out = np.zeros((1, SPEC.page_nbytes), np.uint8)
            location = ns.locate(SPEC, *key)
            try:
                if location is not None:
                    ns.read_pages(SPEC, [location], out)
                    assert (out == sequence.records(SPEC, [key])).all()
                    found.add(key)
            except (Corrupt, NotFound):
                assert ns.locate(SPEC, *key) is None  # set aside
        return found

    with PageStore.open(saved) as store:
        ns = store.namespace(NAMESPACE)
        located = [location for key in keys if (location := ns.locate(SPEC, *key))]
        with pytest.raises(Corrupt, match="chunk"):  # all in one go: the bad one is found
            ns.read_pages(SPEC, located, np.zeros((len(keys), SPEC.page_nbytes), np.uint8))
        good = readable(store)
        assert 0 < len(keys) - len(good) < len(keys) // 2
        store.repair()
        assert readable(store) == good
    with PageStore.open(saved) as store:
        assert readable(store) == good
        assert {finding.kind for finding in store.verify()} <= {"reference"}


@pytest.mark.parametrize("scenario", SOUND, ids=lambda scenario: scenario.name)
@pytest.mark.usefixtures("_keyed")
def test_a_power_cut_of_an_encrypted_store(scenario: Scenario) -> None:
    """All the durability there is, unchanged."""
    report = cut_everywhere(scenario, num_random=2, max_states=40)
    assert report.broken == ()


# Whose key


def test_a_wrong_or_missing_key_is_told_as_such(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(saved)
    for key in (bytes(32), secrets.token_bytes(32)):
        with pytest.raises(Incompatible, match=r"key differs.*the key the store was made with"):
            PageStore.open(saved, key=key)
    monkeypatch.delenv(KEY_VARIABLE)
    for mode in ("a", "r"):
        with pytest.raises(Incompatible, match=f"encryption differs.*Set {KEY_FILE_VARIABLE}"):
            PageStore.open(saved, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a key is 32 bytes"):
        PageStore.open(saved, key=b"password")
    assert contents(saved) == before
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())


def test_a_key_to_a_store_that_takes_none(store_dir: Path) -> None:
    """Its user would believe it to be encrypted."""
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO)
    with pytest.raises(Incompatible, match="encryption differs: stored 'none'"):
        PageStore.open(store_dir, key=KEY)


def test_a_reader_that_knows_no_encryption_refuses(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(format_file, "KNOWN_FEATURES", frozenset())
        with pytest.raises(Incompatible, match="aes-256-gcm"):
            PageStore.open(saved)


def test_keys_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_dir, file = tmp_path / "store", tmp_path / "key"
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(file))
    with pytest.raises(InvalidInput, match="No such file"):
        PageStore.open(store_dir)
    for content in (KEY, KEY.hex().encode(), b"  " + KEY.hex().upper().encode() + b"\n"):
        file.write_bytes(content)
        file.chmod(0o600)
        with PageStore.open(store_dir) as store:
            save(store, "demo", DEMO)
            check_readable(store, "demo", DEMO, 4)
    file.chmod(0o640)
    with pytest.raises(InvalidInput, match=r"others may read.*chmod 600"):
        PageStore.open(store_dir)
    file.chmod(0o600)
    for bad in (b"", b"x" * 31, b"zz" * 32, KEY.hex().encode()[:-2], b"a" * 5000):
        file.write_bytes(bad)
        with pytest.raises(InvalidInput, match="holds no key"):
            PageStore.open(store_dir)
    file.write_bytes(KEY)
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    with pytest.raises(InvalidInput, match="both set"):
        PageStore.open(store_dir)


def test_no_key_and_no_content_in_messages(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Incompatible) as raised:
        PageStore.open(saved, key=bytes(31) + b"\1")
    assert KEY.hex() not in str(raised.value)
    assert (bytes(31) + b"\1").hex() not in str(raised.value)
    assert os.environ[KEY_VARIABLE] not in caplog.text
