"""Every file operation of a save failing, and the process dying before every one of them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.conftest import check_store
from tests.store.synthetic import (
    Crashed,
    ScriptedFiles,
    chain,
    check_readable,
    packs,
    save,
    writing,
)
from tqstore.errors import BackendFailed, Corrupt, StoreFull, TqStoreError
from tqstore.store import transfer
from tqstore.store.files import Files
from tqstore.store.page_store import PageStore

DEMO = chain(4)
OTHER = chain(3, 7)


def open_with(path: Path, files: ScriptedFiles, **options: Any) -> PageStore:
    return PageStore.open(path, files=cast(Files, files), **options)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system has such a folder: hundreds of stores are made and synced."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one acknowledged session of two blocks."""
    path = tmp_path_factory.mktemp("before") / "store"
    with PageStore.open(path) as store:
        save(store, "demo", DEMO, 0, 2)
        save(store, "demo", DEMO, 0, 2)
    return path


def attempt(path: Path, files: ScriptedFiles) -> int:
    """What the tests interrupt: a second turn of the session, and one of another namespace."""
    with open_with(path, files) as store:
        sequence = save(store, "demo", DEMO, 2, 4)
        save(store, "new", OTHER)
        return sequence


def operations(tmp_path: Path, before: Path) -> list[str]:
    files = ScriptedFiles()
    shutil.copytree(before, tmp_path / "dry")
    attempt(tmp_path / "dry", files)
    return files.log


def fresh(tmp_path: Path, before: Path, number: int) -> Iterator[Path]:
    path = tmp_path / f"store-{number}"
    shutil.copytree(before, path)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_every_operation_may_fail(memory_path: Path, before: Path, code: int) -> None:
    """A typed error, nothing left behind, the old checkpoint or the new one; a retry works."""
    log = operations(memory_path, before)
    for number, operation in enumerate(log):
        if code != errno.EIO and operation not in writing(log):
            continue
        for path in fresh(memory_path, before, number):
            files = ScriptedFiles(number, code)
            error = StoreFull if (code, operation) == (errno.ENOSPC, "writev") else TqStoreError
            # Some may fail without harm: pruning, and making a folder that is there.
            with contextlib.suppress(error):
                attempt(path, files)
            # What cannot be removed is left for gc.
            expected = {"leftover"} if operation in ("unlink", "rmdir") else set()
            check_store(path, expected=frozenset(expected))
            with PageStore.open(path) as store:
                saved = store.latest("demo").num_tokens
                assert saved in (2 * 8 + 3, 4 * 8 + 3), (number, operation)
                check_readable(store, "demo", DEMO, saved // 8)
                save(store, "demo", DEMO, 2, 4)
                check_readable(store, "demo", DEMO, 4)


def test_every_operation_may_be_the_last(memory_path: Path, before: Path) -> None:
    """Killed before operation k: what was acknowledged is there, and the next process goes on."""
    log = operations(memory_path, before)
    assert len(writing(log)) > 25
    for number in range(len(log)):
        for path in fresh(memory_path, before, number):
            with pytest.raises(Crashed):
                attempt(path, ScriptedFiles(number, Crashed))
            check_store(path, expected=frozenset({"leftover"}))
            with PageStore.open(path) as store:
                check_readable(store, "demo", DEMO, store.latest("demo").num_tokens // 8)
                save(store, "demo", DEMO, 2, 4)
                check_readable(store, "demo", DEMO, 4)


def test_creating_a_store_may_stop_anywhere(memory_path: Path) -> None:
    tmp_path = memory_path
    files = ScriptedFiles()
    with open_with(tmp_path / "dry" / "store", files):
        pass
    for number in range(len(files.log)):
        path = tmp_path / str(number) / "store"
        with pytest.raises(Crashed):
            open_with(path, ScriptedFiles(number, Crashed)).close()
        with PageStore.open(path) as store:
            save(store, "demo", DEMO)
        check_store(path, expected=frozenset({"leftover"}))


def test_the_order_of_a_save(store_dir: Path) -> None:
    """Data before its name, the name before the folder's sync, pages before the checkpoint."""
    files = ScriptedFiles()
    with open_with(store_dir, files) as store:
        save(store, "demo", DEMO, 0, 1)
        files.log.clear()
        save(store, "demo", DEMO, 1, 2)
    assert writing(files.log) == [
        "open_lock",
        *["create", "chmod", "writev", "fsync", "link", "unlink", "fsync"],  # the pack
        *["mkdir", "fsync"],  # the session's folder, which was there
        *["create", "chmod", "writev", "fsync", "link", "unlink", "fsync"],  # the checkpoint
    ]
    assert files.log[-1] == "unlock" or "flush_device" in files.log


def test_a_save_costs_what_is_new_whatever_the_session_holds(store_dir: Path) -> None:
    """The same operations and the same bytes for one more block of 2 as of 200."""
    long, logs, written = chain(201), [], []
    files = ScriptedFiles()
    with open_with(store_dir, files) as store:
        save(store, "demo", long, 0, 1)
        for first in (1, 200):
            if first == 200:
                save(store, "demo", long, 2, 200)
            before = store.counters.nbytes_written
            files.log.clear()
            save(store, "demo", long, first, first + 1)
            logs.append(list(files.log))
            written.append(store.counters.nbytes_written - before)
    # The folder's listing shows two packs more; their headers were read by the save that made them.
    assert writing(logs[1]) == [*writing(logs[0]), "unlink"]  # a third checkpoint is pruned
    assert logs[1].count("open_file") == logs[0].count("open_file")
    assert written[1] - written[0] <= 16 * 199 + 16


def test_fsync_is_never_tried_again(store_dir: Path, before: Path) -> None:
    shutil.copytree(before, store_dir)
    log = operations(store_dir.parent / "x", before)
    first = log.index("fsync", log.index("writev"))
    files = ScriptedFiles(first, errno.EIO)
    with pytest.raises(BackendFailed):
        attempt(store_dir, files)
    after = files.log[first + 1 :]
    assert "fsync" not in after
    assert "link" not in after


def test_short_writes_and_reads_are_continued(store_dir: Path) -> None:
    files = ScriptedFiles()
    files.short_writes = True
    with open_with(store_dir, files) as store:
        save(store, "demo", chain(2))
        check_readable(store, "demo", chain(2), 2)


def test_more_than_one_call_may_take(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_CALL_NBYTES", 100)
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(2))
        check_readable(store, "demo", chain(2), 2)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    try:
        with PageStore.open(mount / "store") as store:
            save(store, "demo", DEMO, 0, 2)
            with pytest.raises(StoreFull, match="Free disk space"):
                save(store, "big", chain(60, 5))
            check_readable(store, "demo", DEMO, 2)
            with pytest.raises(StoreFull):
                save(store, "big", chain(60, 5))
        check_store(mount / "store")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting read-only needs root")
def test_a_read_only_file_system(tmp_path: Path, before: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(before, path)
    if subprocess.run(["mount", "--bind", path, path], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        with PageStore.open(path, mode="r") as store:
            check_readable(store, "demo", DEMO, 2)
        with pytest.raises(BackendFailed, match="mode='r'"), PageStore.open(path) as store:
            save(store, "demo", DEMO, 2, 4)
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_one_may_not_write(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(BackendFailed, match="write access"):
        PageStore.open(tmp_path / "locked" / "store")


def is_readable(store: PageStore) -> bool:
    try:
        check_readable(store, "demo", DEMO, 4)
    except (TqStoreError, AssertionError):
        return False
    return True


def test_links_inside_a_store_are_not_followed(
    store_dir: Path, expected_findings: set[str]
) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO)
    expected_findings |= {
        "link",
        "reference",
        "folder",
        "checkpoint",
        "namespace",
        "zarr",
        "format",
    }
    outside = store_dir.parent / "outside"
    spots = [
        packs(store_dir)[0],
        next(store_dir.glob("ns/*/pages/*")),
        next(store_dir.glob("ns/*/namespace.msgpack")),
        next(store_dir.glob("ns/*")),
        next(store_dir.glob("sessions/*/*.ckpt")),
        next(store_dir.glob("sessions/*")),
        store_dir / "LOCK",
    ]
    for spot in spots:
        shutil.move(spot, outside)
        spot.symlink_to(outside)
        with PageStore.open(store_dir) as store:
            assert "link" in {finding.kind for finding in store.verify()}, spot
            if spot.name == "LOCK":
                with pytest.raises(Corrupt, match="symbolic link"):
                    save(store, "demo", DEMO)
            elif spot.name == "namespace.msgpack":
                with pytest.raises(Corrupt, match="symbolic link"):
                    store.stored_namespace(DEMO.namespace.id)
            else:
                assert not is_readable(store)
        spot.unlink()
        shutil.move(outside, spot)
        check_store(store_dir)
