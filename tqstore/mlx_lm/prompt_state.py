"""The saved state of each cache class, in every layout that mlx-lm's files have had.

Classes are looked up in a fixed table, never by a name that a file gives.  Does not own the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from tqstore.errors import Corrupt, InvalidInput
from tqstore.mlx_lm.prompt_entry import DenseEntry, Entry, Layout, OwnState
from tqstore.spec import MODEL_DTYPES

_MAX_TOKENS = 1 << 40


def entries_of(
    layout: Layout,
    classes: Sequence[str],
    states: Sequence[Any],
    infos: Sequence[Any],
    where: str,
) -> Iterator[Entry]:
    """The entries of a file in order, the parts of a CacheList one after the other.

    `infos` are the `meta_state`s of the layout before 0.32.  Raises Corrupt for a state that its
    class cannot have, InvalidInput for what cannot be taken over.
    """
    for index, (name, state, info) in enumerate(zip(classes, states, infos, strict=True)):
        if name != "CacheList":
            yield _entry(_Saved(layout, name, state, info, index, None, where))
            continue
        for part, (own_name, own_state, own_info) in enumerate(
            _parts(layout, index, state, info, where)
        ):
            yield _entry(_Saved(layout, own_name, own_state, own_info, index, part, where))


def _parts(
    layout: Layout, index: int, state: Any, info: Any, where: str
) -> Iterator[tuple[str, Any, Any]]:
    """Class name, state and meta_state of each part of a CacheList."""
    if not isinstance(state, list):
        raise Corrupt(where, f"entry {index}: its CacheList has no parts", doing="importing")
    if layout is Layout.SCALARS:
        for item in state:
            if not (isinstance(item, list) and len(item) == 2 and isinstance(item[1], str)):
                raise Corrupt(where, f"entry {index}: a part of its CacheList has no class")
            yield item[1], item[0], ""
        return
    if info == "":
        raise InvalidInput(
            f"entry {index} of {where} is a CacheList, and mlx-lm before 0.31 did not save what "
            "it consists of",
            doing="importing",
            remedy="Feed the tokens to a new session instead",
        )
    is_pair = isinstance(info, list) and len(info) == 2
    if not is_pair or any(not isinstance(x, list) or len(x) != len(state) for x in info):
        raise Corrupt(where, f"entry {index}: its CacheList is malformed", doing="importing")
    yield from zip(info[0], state, info[1], strict=True)


@dataclass(frozen=True)
class _Saved:
    """One cache's state as it stands in the file."""

    layout: Layout
    name: str
    state: Any
    info: Any
    entry: int
    part: int | None
    where: str

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(self.where, f"entry {self.entry} ({self.name}): {what}", doing="importing")

    def refused(self, why: str, remedy: str) -> InvalidInput:
        problem = f"entry {self.entry} of {self.where} ({self.name}) {why}"
        return InvalidInput(problem, doing="importing", remedy=remedy)

    def split(self, num_arrays: int, num_numbers: int) -> tuple[list[Any], list[int]]:
        """The state's arrays (or lists of them) and its last `num_numbers` numbers."""
        if self.layout is Layout.SCALARS:
            if not isinstance(self.state, list) or len(self.state) != num_arrays + num_numbers:
                raise self.corrupt("its state has the wrong number of parts")
            arrays, numbers = self.state[:num_arrays], self.state[num_arrays:]
        else:
            # mlx-lm 0.28.0 to 0.28.3 keep the growth step too, which means nothing here
            numbers = list(self.info) if isinstance(self.info, list) else []
            if self.name == "RotatingKVCache" and len(numbers) == 5:
                del numbers[2]
            if self.name == "QuantizedKVCache" and len(numbers) == 4:
                del numbers[0]
            arrays = self.state
            if not isinstance(arrays, list) or len(arrays) != num_arrays:
                raise self.corrupt("its state has the wrong number of arrays")
            if len(numbers) != num_numbers:
                raise self.corrupt("its meta_state has the wrong number of parts")
        return arrays, [self._count(number) for number in numbers]

    def _count(self, number: Any) -> int:
        is_text = isinstance(number, str) and number.isascii() and number.isdigit()
        if not is_text and type(number) is not int:
            raise self.corrupt(f"{number!r} is not a number of tokens")
        count = int(number[:20]) if is_text else number
        if not 0 <= count < _MAX_TOKENS:
            raise self.corrupt(f"{count} is not a number of tokens")
        return count

    def is_old(self) -> bool:
        return self.layout is Layout.META_STATE

    def dense(
        self,
        keys: Any,
        values: Any,
        offset: int,
        *,
        window: int | None = None,
        keep: int = 0,
        bits: int | None = None,
    ) -> DenseEntry:
        """Arrays [1, heads, n, dim] that were checked to be such."""
        for role, array in (("keys", keys), ("values", values)):
            dtype = str(array.dtype).rpartition(".")[2]
            if dtype not in MODEL_DTYPES:
                raise self.refused(f"has {role} of {dtype}", "Only floats can be paged")
        return DenseEntry(
            self.entry, self.part, keys[0], values[0], offset, window=window, keep=keep, bits=bits
        )

    def check_arrays(self, keys: Any, values: Any) -> None:
        for role, array in (("keys", keys), ("values", values)):
            if not isinstance(array, mx.array) or array.ndim != 4:
                raise self.refused(f"has no {role} yet", "Only caches that were used can be taken")
            if array.shape[0] != 1:
                raise self.refused(
                    f"holds {array.shape[0]} sequences", "Save each with extract() first"
                )
        if keys.shape[:3] != values.shape[:3]:
            raise self.corrupt(f"keys {keys.shape} and values {values.shape} do not match")


def _entry(saved: _Saved) -> Entry:
    read = _READERS.get(saved.name)
    if read is None:
        raise saved.refused(
            "is of a class that cannot be taken over", f"Known are {', '.join(_READERS)}"
        )
    return read(saved)


def _full(saved: _Saved) -> DenseEntry:
    (keys, values), numbers = saved.split(2, 0 if saved.is_old() else 1)
    saved.check_arrays(keys, values)
    offset = keys.shape[2] if saved.is_old() else numbers[0]
    if offset > keys.shape[2]:
        raise saved.corrupt(f"{offset} tokens in {keys.shape[2]} rows")
    return saved.dense(keys[:, :, :offset], values[:, :, :offset], offset)


def _rotating(saved: _Saved) -> DenseEntry:
    (keys, values), numbers = saved.split(2, 4)
    saved.check_arrays(keys, values)
    rows = keys.shape[2]
    if saved.is_old():
        keep, max_size, offset, index = numbers
    else:
        offset, keep, max_size, index = numbers
    is_whole = index in (rows, offset)
    if index > min(rows, offset) or keep >= max_size or not (is_whole or keep <= index):
        raise saved.corrupt(f"its place {index} is not one of {rows} rows")
    if not is_whole and rows != max_size:
        raise saved.corrupt(f"a ring of {max_size} has {rows} rows")
    keys, values = (_in_temporal_order(array, keep, index, offset) for array in (keys, values))
    return saved.dense(keys, values, offset, window=max_size - keep, keep=keep)


def _in_temporal_order(ring: mx.array, keep: int, index: int, offset: int) -> mx.array:
    """A ring's rows [1, heads, rows, dim] from the oldest token to the newest."""
    if index in (ring.shape[2], offset):
        return ring[:, :, :index]
    return mx.concatenate([ring[:, :, :keep], ring[:, :, index:], ring[:, :, keep:index]], axis=2)


def _quantized(saved: _Saved) -> DenseEntry:
    (keys, values), (offset, group_size, bits) = saved.split(2, 3)
    sides = []
    for side in (keys, values):
        if not (isinstance(side, list) and len(side) == 3):
            raise saved.corrupt("its keys or values are not codes, scales and biases")
        try:
            codes, scales, biases = side
            sides.append(mx.dequantize(codes, scales, biases, group_size, bits))
        except (ValueError, RuntimeError, TypeError) as error:
            raise saved.corrupt(f"its codes cannot be decoded: {error}") from error
    saved.check_arrays(*sides)
    if offset > sides[0].shape[2]:
        raise saved.corrupt(f"{offset} tokens in {sides[0].shape[2]} rows")
    keys, values = (side[:, :, :offset] for side in sides)
    return saved.dense(keys, values, offset, bits=bits)


def _arrays(saved: _Saved) -> OwnState:
    parts = saved.state if saved.is_old() else saved.split(3, 0)[0][0]
    if not isinstance(parts, list) or not all(
        part is None or isinstance(part, mx.array) for part in parts
    ):
        raise saved.corrupt("its state is not a list of arrays")
    leaf = ArraysCache(size=len(parts))
    leaf.cache = list(parts)
    if not saved.is_old() and any(part is not None for part in saved.state[1:]):
        raise saved.refused("is padded as a batch is", "Save each sequence with extract() first")
    return OwnState(saved.entry, saved.part, leaf)


def _chunked(saved: _Saved) -> OwnState:
    if saved.is_old():
        raise saved.refused(
            "does not say how many of its rows are in use: mlx-lm before 0.32 forgot to save it",
            "Feed the tokens to a new session instead",
        )
    (keys, values), (offset, chunk_size, start) = saved.split(2, 3)
    saved.check_arrays(keys, values)
    if not start <= offset <= start + keys.shape[2]:
        raise saved.corrupt(f"{offset} tokens from {start} on in {keys.shape[2]} rows")
    leaf: Any = ChunkedKVCache(chunk_size)  # type: ignore[no-untyped-call]
    leaf.keys, leaf.values, leaf.offset, leaf.start_position = keys, values, offset, start
    return OwnState(saved.entry, saved.part, leaf)


_READERS: dict[str, Callable[[_Saved], Entry]] = {
    "KVCache": _full,
    "RotatingKVCache": _rotating,
    "QuantizedKVCache": _quantized,
    "ArraysCache": _arrays,
    "MambaCache": _arrays,
    "ChunkedKVCache": _chunked,
}
