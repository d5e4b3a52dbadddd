"""What a power cut may leave of recorded operations.

What was synced is there.  Of the rest any part may be: a folder's entries each or not, a file's
bytes all, none, the first half, or as zeros.  Stricter than any one file system: none is relied on.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.faults.recorded_files import Entry, Mark, Operation, Sync, Write

Tree = dict[str, bytes | None]  # path -> content, None for a folder
Fate = str  # what becomes of one pending operation
_ENTRY_FATES: tuple[Fate, ...] = ("kept", "lost")
_WRITE_FATES: tuple[Fate, ...] = ("kept", "lost", "torn", "zeros")


class Disk:
    """The disk after some operations: what is durable, and what is not yet."""

    def __init__(
        self, top: int, folders: dict[int, dict[str, int]], contents: dict[int, bytes]
    ) -> None:
        self._top = top
        self._folders = {node: dict(entries) for node, entries in folders.items()}
        self._contents = dict(contents)
        self.pending: list[Entry | Write] = []

    def do(self, operation: Operation) -> None:
        if isinstance(operation, Mark):
            return
        if not isinstance(operation, Sync):
            self.pending.append(operation)
            return
        rest: list[Entry | Write] = []
        for earlier in self.pending:
            if earlier.owner == operation.node:
                _apply(earlier, "kept", self._folders, self._contents)
            else:
                rest.append(earlier)
        self.pending = rest

    def after_crash(self, fates: Sequence[Fate]) -> Tree:
        """The files and folders there are if the pending operations meet these fates."""
        folders = {node: dict(entries) for node, entries in self._folders.items()}
        contents = dict(self._contents)
        for operation, fate in zip(self.pending, fates, strict=True):
            _apply(operation, fate, folders, contents)
        tree: Tree = {}
        self._walk(self._top, "", folders, contents, tree)
        return tree

    def _walk(
        self,
        node: int,
        path: str,
        folders: dict[int, dict[str, int]],
        contents: dict[int, bytes],
        tree: Tree,
    ) -> None:
        for name, child in folders.get(node, {}).items():
            if child in folders:
                tree[f"{path}{name}"] = None
                self._walk(child, f"{path}{name}/", folders, contents, tree)
            else:
                tree[f"{path}{name}"] = contents.get(child, b"")

    def fates(self, rng: random.Random, num_random: int) -> Iterator[tuple[Fate, ...]]:
        """All combinations if they are few; else all kept, all lost, each one apart, and some."""
        choices = [_ENTRY_FATES if isinstance(p, Entry) else _WRITE_FATES for p in self.pending]
        total = 1
        for choice in choices:
            total *= len(choice)
        if total <= max(16, num_random):
            yield from itertools.product(*choices)
            return
        yield from _one_apart(choices)
        for _ in range(num_random):
            yield tuple(rng.choice(choice) for choice in choices)


def _one_apart(choices: Sequence[tuple[Fate, ...]]) -> Iterator[tuple[Fate, ...]]:
    for common in ("kept", "lost"):
        everyone = (common,) * len(choices)
        yield everyone
        for i, choice in enumerate(choices):
            for fate in choice:
                if fate != common:
                    yield (*everyone[:i], fate, *everyone[i + 1 :])


def _apply(
    operation: Entry | Write,
    fate: Fate,
    folders: dict[int, dict[str, int]],
    contents: dict[int, bytes],
) -> None:
    if fate == "lost":
        return
    if isinstance(operation, Entry):
        entries = folders.setdefault(operation.folder, {})
        if operation.node is None:
            entries.pop(operation.name, None)
        else:
            entries[operation.name] = operation.node
        return
    data = operation.data
    if fate == "torn":
        data = data[: len(data) // 2]
    elif fate == "zeros":
        data = bytes(len(data))
    old = contents.get(operation.node, b"").ljust(operation.offset, b"\0")
    end = operation.offset + len(data)
    contents[operation.node] = old[: operation.offset] + data + old[end:]


def fingerprint(tree: Tree) -> bytes:
    """Equal for equal trees: many fates leave the same disk."""
    digest = hashlib.sha256()
    for path, content in sorted(tree.items()):
        digest.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.digest()


def write_tree(tree: Tree, top: Path) -> None:
    """Makes the files of `tree` below `top`, with a store's modes."""
    top.mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        if content is None:
            (top / path).mkdir(mode=0o700)
        else:
            (top / path).write_bytes(content)
            (top / path).chmod(0o600)
