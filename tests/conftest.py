"""Fixtures every floor's tests share: a store folder that is checked when the test is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tqstore.store.page_store import PageStore

# No test is timed: a busy machine must not fail one.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def check_store(path: Path, *, expected: frozenset[str] = frozenset()) -> None:
    """Fails for any finding of verify whose kind is not `expected`, and for any temporary file."""
    if not (path / "FORMAT").exists():
        return
    if "leftover" not in expected:
        assert [file for file in path.rglob("*") if file.name.startswith(".tmp-")] == []
    with PageStore.open(path, mode="r") as store:
        findings = [finding for finding in store.verify() if finding.kind not in expected]
    assert findings == []


def open_descriptors() -> set[str]:
    """What this process' descriptors stand for, as far as the system tells."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return set()
    found = set()
    for link in folder.iterdir():
        try:
            found.add(os.readlink(link))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def expected_findings() -> set[str]:
    """Kinds of findings that a test makes on purpose: add them."""
    return set()


@pytest.fixture
def store_dir(tmp_path: Path, expected_findings: set[str]) -> Iterator[Path]:
    """A path for a store, not made yet.

    Afterwards verify must find nothing unexpected, no temporary file may be left, and no
    descriptor of a file in it may be open.
    """
    path = tmp_path / "store"
    yield path
    check_store(path, expected=frozenset(expected_findings))
    inside = [name for name in open_descriptors() if name.startswith(str(path))]
    assert inside == [], "descriptors leaked"
