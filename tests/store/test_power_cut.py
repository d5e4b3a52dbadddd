"""Power cuts of a real file system: a loop-mounted ext4, shut down without flushing.  Root only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.faults.power_cuts import PowerCutsUnavailable, cut_power_often
from tqstore.store.folder import Folder

CUTS = 12


def test_power_cuts_lose_nothing(tmp_path: Path) -> None:
    """Promises 1 and 2 against power cuts, on the file system of this machine's kernel."""
    try:
        report = cut_power_often(tmp_path, CUTS)
    except PowerCutsUnavailable as error:
        pytest.skip(str(error))
    assert report.broken == ()
    assert report.kills == CUTS
    assert report.acknowledged > CUTS


def test_the_cut_is_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that never syncs a folder loses what it acknowledged."""
    monkeypatch.setattr(Folder, "sync", lambda _folder: None)
    try:
        report = cut_power_often(tmp_path, 5)
    except PowerCutsUnavailable as error:
        pytest.skip(str(error))
    assert report.broken
