"""Values as text and JSON that is safe to show, whoever wrote the files they come from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def printable(text: str) -> str:
    """`text` with control characters escaped: a file's text must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """`1.5 MiB`, at most one decimal; whole bytes below 1 KiB."""
    value, unit = float(nbytes), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def age(created_ns: int) -> str:
    """How long ago, in the largest unit that fits; `0 s` for a time that is yet to come."""
    seconds = max(0, (time.time_ns() - created_ns) // 1_000_000_000)
    length, unit = next((u for u in _AGES if seconds >= u[0]), _AGES[-1])
    return f"{seconds // length} {unit}"


def moment(created_ns: int) -> str:
    """Local date and time, with the zone's offset."""
    try:
        local = time.localtime(created_ns / 1e9)
    except (OverflowError, OSError, ValueError):
        return f"{created_ns} ns"
    return time.strftime("%Y-%m-%d %H:%M:%S %z", local)


def counted(count: int, what: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def ranges(indices: Iterable[int]) -> str:
    """`0-4, 6` of sorted indices."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it: bytes as hex, infinities as text, keys as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value


def json_text(value: Any) -> str:
    return json.dumps(plain_json(value), indent=2, allow_nan=False)
