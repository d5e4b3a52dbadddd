"""A file's caches as the layout of a model's list of caches, and whether they are such a model's.

Owns what becomes paged and what stays an own object, and every comparison of a file with a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqstore.errors import Incompatible
from tqstore.mlx_lm.probe import ModelLayout, OwnEntry, PagedEntry
from tqstore.mlx_lm.prompt_entry import DenseEntry, Entry, OwnState
from tqstore.mlx_lm.prompt_file import PromptFile

Place = tuple[int, int | None]  # of a cache: its entry in the model's list, and its part there


def _paged_entry(entry: DenseEntry) -> PagedEntry:
    return PagedEntry(
        entry=entry.entry,
        part=entry.part,
        kv_heads=entry.keys.shape[0],
        key_dim=entry.keys.shape[2],
        value_dim=entry.values.shape[2],
        key_dtype=entry.keys.dtype,
        value_dtype=entry.values.dtype,
        window=entry.window,
        sink_tokens=entry.keep,
        is_read_again=False,
    )


def layout_of(file: PromptFile) -> ModelLayout:
    """The layout as the file has it: keys and values by position are paged, all else is own."""
    return ModelLayout(
        tuple(_paged_entry(entry) for entry in file.entries if isinstance(entry, DenseEntry)),
        tuple(
            OwnEntry(entry.entry, entry.part, type(entry.leaf).__name__, "not by position")
            for entry in file.entries
            if isinstance(entry, OwnState)
        ),
    )


def checked_layout(layout: ModelLayout, file: PromptFile) -> ModelLayout:
    """The model's layout; Incompatible where the file's caches are not such a model's."""
    found: dict[Place, Entry] = {(entry.entry, entry.part): entry for entry in file.entries}
    places: list[Place] = [(item.entry, item.part) for item in layout.paged]
    places += [(item.entry, item.part) for item in layout.own]
    if sorted(found, key=str) != sorted(places, key=str):
        raise Incompatible("number of caches", len(found), len(places), doing="importing")
    for item in layout.paged:
        entry = found[item.entry, item.part]
        if not isinstance(entry, DenseEntry):
            kind = type(entry.leaf).__name__
            raise Incompatible(f"entry {item.entry}", kind, "keys and values", doing="importing")
        stored, given = _paged_entry(entry), replace(item, is_read_again=False, attention=None)
        for field in vars(given):
            if getattr(stored, field) != getattr(given, field):
                raise Incompatible(
                    f"entry {item.entry}.{field}",
                    str(getattr(stored, field)),
                    str(getattr(given, field)),
                    doing="importing",
                    remedy="The file is of another model, or of other options (--max-kv-size)",
                )
    for own in layout.own:
        kind = type(_leaf(found[own.entry, own.part])).__name__
        if kind != own.class_name:
            raise Incompatible(f"entry {own.entry}", kind, own.class_name, doing="importing")
    return layout


def _leaf(entry: Entry) -> Any:
    return entry.as_cache() if isinstance(entry, DenseEntry) else entry.leaf


def own_objects(entries: Sequence[Entry], layout: ModelLayout) -> Any:
    """What `collect` takes: objects by entry, and by part where an entry is a CacheList."""
    objects: dict[int, Any] = {}
    found: Mapping[Place, Entry] = {(entry.entry, entry.part): entry for entry in entries}
    for item in layout.own:
        leaf = _leaf(found[item.entry, item.part])
        if item.part is None:
            objects[item.entry] = leaf
        else:
            objects.setdefault(item.entry, {})[item.part] = leaf
    return objects
