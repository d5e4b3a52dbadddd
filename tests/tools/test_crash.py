"""tools/crash: a short run, and what it says when something is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import crash
from tools.faults.scenarios import SCENARIOS
from tqstore.store.folder import Folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["crash", *arguments])
    monkeypatch.setattr(crash, "SCENARIOS", SCENARIOS[:1])
    return crash.main()


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    assert run(monkeypatch, "--kills", "5", "--cuts", "1", "--json", str(file)) == 0
    figures = json.loads(file.read_text())
    assert figures["model"]["broken"] == figures["kills"]["broken"] == []
    assert figures["model"]["scenarios"]["first save"]["cuts"] > 30
    assert figures["kills"]["kills"] == 5
    assert figures["power_cuts"].get("cuts", 1) == 1


def test_a_loss_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Folder, "sync", lambda _folder: None)
    assert run(monkeypatch) == 1
    assert "is lost" in capsys.readouterr().out
