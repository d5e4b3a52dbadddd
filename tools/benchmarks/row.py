"""One measured figure beside its peer's, and the bar it is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """What the ratio should be: `at_most` or, else, at least `limit`."""

    limit: float
    at_most: bool = True

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:.3g}"


@dataclass(frozen=True)
class Row:
    """`value` and `peer_value` are medians in `unit`; None for a peer that could not be measured.

    The row that a benchmark is named after comes first and has its name; others are `name/detail`.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    bar: Bar | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def is_met(self) -> bool | None:
        """None without a bar or without a peer."""
        if self.bar is None or self.ratio is None:
            return None
        return self.bar.is_met(self.ratio)

    @property
    def verdict(self) -> str:
        """For people: "<= 0.42, met"."""
        if self.bar is None:
            return ""
        if self.is_met is None:
            return f"{self.bar}, not measured"
        return f"{self.bar}, {'met' if self.is_met else 'NOT met'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": self.peer_value,
            "ratio": self.ratio,
            "bar": None if self.bar is None else str(self.bar),
            "met": self.is_met,
            "note": self.note,
        }
