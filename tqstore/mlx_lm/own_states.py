"""States of the cache objects that stay the model's own, as exact arrays and plain values.

Owns the turning of mlx-lm's `state` trees into NamedStates and back.  Does not own the
checkpoint they are kept in, nor any knowledge of what a state means: classes are never looked
up by a stored name, an object is made by the model and only its state is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from tqstore.errors import Corrupt, Incompatible, InvalidInput
from tqstore.mlx_lm.probe import ModelLayout, OwnEntry
from tqstore.saved_state import NamedState

Plain = Any  # what msgpack holds: None, bool, int, float, str, list, dict


def collect(cache: Sequence[Any], layout: ModelLayout) -> list[NamedState]:
    """The state of every own object of `cache` (without a draft model's entries)."""
    return [_named_state(item, leaf_of(cache, item)) for item in layout.own]


def restore(cache: Sequence[Any], layout: ModelLayout, states: Sequence[NamedState]) -> None:
    """Sets the states on a new cache list's own objects.

    Raises Incompatible if the states are not those of such objects.
    """
    stored = [(state.layer, state.class_name) for state in states]
    given = [(item.entry, item.class_name) for item in layout.own]
    if stored != given:
        raise Incompatible(
            "the model's own cache objects",
            stored,
            given,
            doing="restoring a session",
            remedy="Use the version of mlx-lm that saved it, or start a new session",
        )
    trees = [
        _unflatten(state.meta, state.arrays, f"state of entry {state.layer}") for state in states
    ]
    leaves = [leaf_of(cache, item) for item in layout.own]
    for leaf, tree in zip(leaves, trees, strict=True):
        if not isinstance(tree, tuple) or len(tree) != len(_attributes(leaf)):
            raise Incompatible(
                f"the state of a {type(leaf).__name__}",
                f"{len(tree)} parts" if isinstance(tree, tuple) else type(tree).__name__,
                " and ".join(_attributes(leaf)),
                doing="restoring a session",
                remedy="Use the version of mlx-lm that saved it, or start a new session",
            )
    for leaf, tree in zip(leaves, trees, strict=True):
        for attribute, value in zip(_attributes(leaf), tree, strict=True):
            setattr(leaf, attribute, value)


def _attributes(leaf: Any) -> tuple[str, ...]:
    """What holds an object's state: mlx-lm before 0.32 keeps offsets apart in `meta_state`."""
    return ("state", "meta_state") if hasattr(leaf, "meta_state") else ("state",)


def leaf_of(cache: Sequence[Any], item: OwnEntry) -> Any:
    """The object that `item` describes."""
    entry = cache[item.entry]
    return entry if item.part is None else entry[item.part]


def _named_state(item: OwnEntry, leaf: Any) -> NamedState:
    arrays: list[mx.array] = []
    tree = tuple(getattr(leaf, attribute) for attribute in _attributes(leaf))
    meta = _flatten(tree, arrays, f"entry {item.entry} ({item.class_name})")
    return NamedState(layer=item.entry, class_name=item.class_name, arrays=arrays, meta=meta)


def _flatten(tree: Any, arrays: list[mx.array], where: str) -> Plain:
    """`tree` with each array replaced by its place in `arrays`.

    Containers are tagged, since the classes' setters tell lists from tuples.
    """
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    if isinstance(tree, tuple | list):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_flatten(item, arrays, where) for item in tree]}
    if isinstance(tree, dict):
        items = [_flatten(item, arrays, where) for item in tree.values()]
        return {"keys": [str(key) for key in tree], "items": items}
    raise InvalidInput(
        f"the state of {where} holds a {type(tree).__name__}, which cannot be stored",
        doing="saving a session",
    )


def _unflatten(meta: Plain, arrays: Sequence[mx.array], where: str) -> Any:
    match meta:
        case {"array": int(index)} if 0 <= index < len(arrays):
            return arrays[index]
        case {"value": value}:
            return value
        case {"tuple": [*items]}:
            return tuple(_unflatten(item, arrays, where) for item in items)
        case {"list": [*items]}:
            return [_unflatten(item, arrays, where) for item in items]
        case {"keys": [*keys], "items": [*items]} if len(keys) == len(items):
            parts = [_unflatten(item, arrays, where) for item in items]
            return dict(zip(map(str, keys), parts, strict=True))
    raise Corrupt("checkpoint", f"{where} has a malformed tree", doing="restoring a session")
