"""`tqstore verify`: exit codes and findings, for a sound store and each kind of damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run, flip, packs_of, the_error
from tqstore.cli.counted_files import CountedFiles
from tqstore.cli.printable import counted
from tqstore.store.page_store import PageStore


def test_a_sound_store(chats: Path, run: Run) -> None:
    ran = run("verify", "--store", chats)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("0 errors, 0 warnings; read ")
    told = run("verify", "--store", chats, "--json").json
    assert told["findings"] == []
    # Every file is read but the lock; FORMAT is read twice, once to open the store.
    files = [file for file in chats.rglob("*") if file.is_file() and file.name != "LOCK"]
    nbytes = sum(file.stat().st_size for file in files) + (chats / "FORMAT").stat().st_size
    assert told["nbytes_read"] == nbytes


def _flip_page(store: Path) -> None:
    flip(packs_of(store)[0], packs_of(store)[0].stat().st_size // 2)


def _cut_pack(store: Path) -> None:
    pack = packs_of(store)[0]
    pack.write_bytes(pack.read_bytes()[:-5])


def _drop_pack(store: Path) -> None:
    packs_of(store)[0].unlink()


def _flip_checkpoint(store: Path) -> None:
    flip(next(store.glob("sessions/*/*.ckpt")), 50)


def _open_up(store: Path) -> None:
    packs_of(store)[0].chmod(0o644)


def _leave_temporary(store: Path) -> None:
    (store / "sessions" / ".tmp-1-2").write_bytes(b"x")


def _add_stranger(store: Path) -> None:
    (store / "red \x1b[31m\n").write_bytes(b"x")
    os.chmod(store / "red \x1b[31m\n", 0o600)


@pytest.mark.parametrize(
    ("damage", "kinds", "severity"),
    [
        (_flip_page, {"page", "reference"}, "error"),
        (_cut_pack, {"pack", "reference"}, "error"),
        (_drop_pack, {"reference"}, "error"),
        (_flip_checkpoint, {"checkpoint"}, "error"),
        (_open_up, {"access"}, "warning"),
        (_leave_temporary, {"leftover"}, "warning"),
        (_add_stranger, {"stranger"}, "warning"),
    ],
)
def test_findings(
    chats: Path,
    run: Run,
    expected_findings: set[str],
    damage: Callable[[Path], None],
    kinds: set[str],
    severity: str,
) -> None:
    expected_findings |= kinds
    damage(chats)
    ran = run("verify", "--store", chats)
    assert ran.code == 1
    assert "\x1b" not in ran.out  # what a file is named does not steer the terminal
    for kind in kinds:
        assert kind in ran.out
    told = run("verify", "--store", chats, "--json")
    assert told.code == 1
    findings = told.json["findings"]
    assert {finding["kind"] for finding in findings} == kinds
    assert {finding["severity"] for finding in findings} == {severity}
    num_errors = len(findings) if severity == "error" else 0
    warnings = counted(len(findings) - num_errors, "warning")
    assert f"{counted(num_errors, 'error')}, {warnings}; read" in ran.out


def test_errors_come_first(chats: Path, run: Run, expected_findings: set[str]) -> None:
    expected_findings |= {"access", "checkpoint"}
    _open_up(chats)
    _flip_checkpoint(chats)
    findings = run("verify", "--store", chats, "--json").json["findings"]
    assert [finding["severity"] for finding in findings] == ["error", "warning"]


def test_a_damaged_format_file_is_refused(chats: Path, run: Run) -> None:
    whole = (chats / "FORMAT").read_bytes()
    flip(chats / "FORMAT", 30)
    ran = run("verify", "--store", chats)
    assert ran.code == 15
    assert "FORMAT" in the_error(ran)
    (chats / "FORMAT").write_bytes(whole)


def test_progress_counts_what_is_read(chats: Path) -> None:
    files, seen = CountedFiles(), []
    files.on_read = seen.append
    with PageStore.open(chats, mode="r", files=files) as store:
        assert list(store.verify()) == []
    assert sum(seen) == files.nbytes_read > 0
