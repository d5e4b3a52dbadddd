"""Power cuts by model: after every operation, whatever part of the unsynced data is lost.

docs/durability.md says what is promised; `tools/faults` holds the model and the scenarios.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tools.faults import scenarios
from tools.faults.cuts import cut_everywhere, memory_folder
from tools.faults.disk_model import Disk, fingerprint
from tools.faults.recorded_files import Entry, RecordedFiles, Sync, Write
from tools.faults.scenarios import SCENARIOS, Scenario
from tqstore.store.files import Files
from tqstore.store.folder import Folder
from tqstore.store.pack_index import PackIndex

MAX_STATES = 120  # of a scenario, a few milliseconds each; tools/crash checks all


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_power_cut_after_any_operation_loses_nothing(scenario: Scenario) -> None:
    """Promises 1 and 2, of every scenario and every loss the model knows."""
    report = cut_everywhere(scenario, max_states=MAX_STATES)
    assert report.broken == ()
    assert report.cuts > 10
    assert report.states > 15


def no_folder_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "sync", lambda _folder: None)


def no_file_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Folder._fill

    def fill(folder: Folder, fd: int, temporary: str, buffers: list[bytes]) -> None:
        folder.files.fsync, kept = lambda _fd: None, folder.files.fsync  # type: ignore[method-assign]
        try:
            real(folder, fd, temporary, buffers)
        finally:
            folder.files.fsync = kept  # type: ignore[method-assign]

    monkeypatch.setattr(Folder, "_fill", fill)


def no_trust_in_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackIndex, "make_durable", lambda _index, _numbers: None)


@pytest.mark.parametrize(
    ("fault", "scenario"),
    [
        (no_folder_sync, scenarios.SCENARIOS[1]),
        (no_file_sync, scenarios.SCENARIOS[1]),
        (no_trust_in_neighbours, scenarios.SCENARIOS[2]),
        (no_folder_sync, scenarios.SCENARIOS[4]),
    ],
)
def test_the_model_sees_a_missing_sync(
    fault: Callable[[pytest.MonkeyPatch], None],
    scenario: Scenario,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sync left out breaks a promise, so that the test above can fail."""
    fault(monkeypatch)
    assert cut_everywhere(scenario, max_states=150).broken


def test_what_was_synced_stays_and_the_rest_meets_every_fate() -> None:
    disk = Disk(0, {0: {}}, {})
    for operation in (Entry(0, "a", 1), Write(1, 0, b"1234"), Sync(1), Entry(0, "b", 1)):
        disk.do(operation)
    trees = [disk.after_crash(fates) for fates in disk.fates(random.Random(0), 0)]
    assert len({fingerprint(tree) for tree in trees}) == len(trees) == 4
    assert all(set(tree.values()) <= {b"1234"} for tree in trees)
    disk.do(Sync(0))
    assert [disk.after_crash(fates) for fates in disk.fates(random.Random(0), 0)] == [
        {"a": b"1234", "b": b"1234"}
    ]
    disk.do(Write(1, 4, b"5678"))
    contents = {disk.after_crash(f)["a"] for f in disk.fates(random.Random(0), 0)}
    assert contents == {b"1234", b"123456", b"12345678", b"1234\0\0\0\0"}


def test_an_operation_the_model_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "novelty", lambda _files: None, raising=False)
    with memory_folder() as work, pytest.raises(NotImplementedError, match="novelty"):
        RecordedFiles(work)
