"""Plain values as canonical msgpack, and checked reading of them back.

Plain is None, bool, int (64 bits), float, str, bytes, and lists and string-keyed maps of these.
Canonical: map keys sorted by their UTF-8 bytes, shortest form of every integer and length, so
equal values are equal bytes and may be hashed.  `Fields` is how a decoder takes a map apart without
believing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

from tqstore.errors import Corrupt, InvalidInput

MAX_DEPTH = 32
_T = TypeVar("_T")


def canonical(value: Any, where: str, depth: int = 0) -> Any:
    """`value` with maps sorted and tuples as lists; InvalidInput naming `where` it isn't plain."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidInput(f"{where} is {value}, which does not fit 64 bits")
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise InvalidInput(f"{where} is not a number")
        return float(value)
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _canonical_map(value, where, depth)
    raise InvalidInput(
        f"{where} is a {type(value).__name__}",
        remedy="Use None, bool, int, float, str, bytes, lists and string-keyed dicts",
    )


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{where} is not valid Unicode text: {error}") from error
    return str(value)


def _canonical_map(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise InvalidInput(f"{where} has the key {key!r}; keys must be text")
        _text(key, f"key {key!r} of {where}")
    # Code point order is the order of UTF-8 bytes.
    return {key: canonical(value[key], f"{where}.{key}", depth + 1) for key in sorted(value)}


def pack_plain(value: Any, where: str) -> bytes:
    """Canonical msgpack of `value`; InvalidInput if it isn't plain."""
    packed: bytes = msgpack.packb(canonical(value, where), use_bin_type=True)
    return packed


def unpack_map(body: memoryview | bytes, file: str) -> Fields:
    """The map `body` holds; Corrupt for anything else, whatever the bytes are."""
    try:
        value = msgpack.unpackb(body, object_hook=_require_text_keys, ext_hook=_refuse_ext)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Corrupt(file, f"not a msgpack record: {error}") from error
    return Fields(value, file)


def _require_text_keys(value: dict[Any, Any]) -> dict[str, Any]:
    """Of every map at every depth: msgpack itself lets bytes be keys."""
    for key in value:
        if type(key) is not str:
            raise ValueError(f"the map key {key!r} is not text")
    return value


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def is_counts(value: Mapping[Any, Any]) -> bool:
    """Whether it is a map from text to non-negative 63-bit ints."""
    return all(
        isinstance(name, str) and type(count) is int and 0 <= count < 1 << 63
        for name, count in value.items()
    )


class Fields:
    """A decoded map whose fields are taken one by one, each checked; Corrupt names the field."""

    def __init__(self, value: object, file: str, where: str = "record") -> None:
        self.file = file
        self.where = where
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise Corrupt(file, f"{where} is not a string-keyed map")
        self._rest: dict[str, Any] = value

    def take(self, name: str, kind: type[_T]) -> _T:
        """The field's value, which must be exactly of type `kind` (bool is no int)."""
        value = self.take_any(name)
        if type(value) is not kind:
            raise Corrupt(self.file, f"{self.where}.{name} is not a {kind.__name__}")
        return value

    def take_any(self, name: str) -> Any:
        if name not in self._rest:
            raise Corrupt(self.file, f"{self.where} has no field {name!r}")
        return self._rest.pop(name)

    def take_optional(self, name: str, kind: type[_T]) -> _T | None:
        if self._rest.get(name, 0) is None:
            del self._rest[name]
            return None
        return self.take(name, kind)

    def take_flag(self, name: str, *, absent: bool) -> bool:
        """A bool that writers leave out where it is `absent`."""
        return self.take(name, bool) if name in self._rest else absent

    def take_counts(self, name: str) -> dict[str, int]:
        """A map of non-negative 63-bit ints that writers leave out where it is empty."""
        counts = self.take(name, dict) if name in self._rest else {}
        if not is_counts(counts):
            raise Corrupt(self.file, f"{self.where}.{name} is not a map of non-negative integers")
        return counts

    def take_int(self, name: str, low: int, high: int) -> int:
        value = self.take(name, int)
        if not low <= value <= high:
            raise Corrupt(self.file, f"{self.where}.{name} is {value}, not in {low}..{high}")
        return value

    def take_bytes(self, name: str, nbytes: int) -> bytes:
        value = self.take(name, bytes)
        if len(value) != nbytes:
            raise Corrupt(self.file, f"{self.where}.{name} has {len(value)} bytes, not {nbytes}")
        return value

    def take_maps(self, name: str) -> list[Fields]:
        items = self.take(name, list)
        return [Fields(item, self.file, f"{name}[{i}]") for i, item in enumerate(items)]

    def done(self) -> None:
        """Corrupt if a field is left that this format does not define."""
        if self._rest:
            raise Corrupt(
                self.file, f"{self.where} has the unknown field {next(iter(self._rest))!r}"
            )
