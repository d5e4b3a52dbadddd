"""Whole numbers of a configuration, checked."""

from __future__ import annotations

from tqstore.errors import InvalidInput


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """InvalidInput unless `value` is an integer (not a bool) from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(f"{name} must be an integer from {low} to {high}, not {value!r}")
