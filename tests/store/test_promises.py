"""Each numbered promise of docs/concurrency.md has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_has_a_test_and_every_such_test_a_promise() -> None:
    text = (ROOT / "docs" / "concurrency.md").read_text()
    promised = {int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)}
    assert promised == set(range(1, len(promised) + 1))
    files = [*(ROOT / "tests" / "store").glob("test_*.py"), ROOT / "tests" / "test_upkeep.py"]
    files = [file for file in files if not file.name.startswith("test_crash")]
    tested = {
        int(number)
        for file in files
        for number in re.findall(r"^def test_promise_(\d+)_", file.read_text(), re.MULTILINE)
    }
    assert promised <= tested
    for number in promised:
        assert f"test_promise_{number}_*" in text
