"""Sizes, ages, ranges and JSON of any value."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqstore.cli.printable import age, json_text, moment, printable, ranges, size

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"),
     (5 << 30, "5.0 GiB"), (1 << 60, "1024.0 PiB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-50, "0 s"), (5, "5 s"), (90, "1 min"), (7300, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert age(now - seconds * 10**9) == text


def test_moments_that_no_calendar_has() -> None:
    assert moment(0).startswith(("1970-01-01", "1969-12-31"))
    assert moment(1 << 62)


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_each_index_once(indices: set[int]) -> None:
    told = []
    for part in filter(None, ranges(sorted(indices)).split(", ")):
        first, _, last = part.partition("-")
        told += range(int(first), int(last or first) + 1)
    assert told == sorted(indices)


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


@given(plain)
def test_any_metadata_is_strict_json(value: object) -> None:
    json.loads(json_text(value), parse_constant=lambda constant: pytest.fail(constant))
