"""The documents of guarantees: every numbered promise names tests, and they exist."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("concurrency", "durability", "security")


def written_tests() -> set[str]:
    files = [*(ROOT / "tests" / "store").glob("test_*.py"), *(ROOT / "tests").glob("test_*.py")]
    return {
        name
        for file in files
        for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)
    }


def promises(document: str) -> list[str]:
    """The numbered items under `## Promises`, in order."""
    text = (ROOT / "docs" / f"{document}.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    [found] = [part for part in section if part.startswith("Promises\n")]
    items = re.split(r"^(\d+)\. ", found, flags=re.MULTILINE)[1:]
    assert [int(n) for n in items[::2]] == list(range(1, len(items) // 2 + 1))
    return items[1::2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_promise_names_tests_that_exist(document: str) -> None:
    written = written_tests()
    found = promises(document)
    assert len(found) >= 6
    for promise in found:
        named = re.findall(r"`(test_[\w*]+)`", promise)
        assert named, f"no test is named by: {promise}"
        for pattern in named:
            assert fnmatch.filter(written, pattern), f"there is no test {pattern}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_a_document_names_exists(document: str) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text()
    written = written_tests()
    for pattern in re.findall(r"`(test_[\w*]+)`", text):
        assert fnmatch.filter(written, pattern), pattern
