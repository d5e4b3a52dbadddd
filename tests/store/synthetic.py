"""Small stores with random pages, and file operations that fail or stop where a test says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tqstore.format.arrays import RawArray
from tqstore.format.block_hash import BlockRecord, chain_blocks
from tqstore.format.checkpoint import Checkpoint, LayerTail, ModelState
from tqstore.format.namespace import Namespace
from tqstore.format.page import PageKey, stamp_headers
from tqstore.spec import CodecSpec, PageSpec
from tqstore.store.files import Files
from tqstore.store.namespace_store import NamespaceStore
from tqstore.store.page_store import PageStore
from tqstore.store.records import Location

PAGE_TOKENS = 8


def page_spec(keys: str = "prod4", values: str = "int8", heads: int = 1, dim: int = 64) -> PageSpec:
    parse = CodecSpec.parse
    return PageSpec(heads, dim, dim, PAGE_TOKENS, parse(keys), parse(values), "float16")


SPEC = page_spec()
NAMESPACE = Namespace.of("ab" * 8, [SPEC] * 3, parts={"weights": "w"})


@dataclass
class Chain:
    """Blocks of one token sequence in a namespace, with a record for each layer and block."""

    namespace: Namespace
    blocks: list[BlockRecord]
    seed: int = 0

    @property
    def hashes(self) -> list[bytes]:
        return [block.hash for block in self.blocks]

    def keys(self, spec: PageSpec, first: int = 0, last: int | None = None) -> list[PageKey]:
        layers = [i for i, layer in enumerate(self.namespace.layers) if layer == spec]
        return [(layer, block.hash) for layer in layers for block in self.blocks[first:last]]

    def records(self, spec: PageSpec, keys: list[PageKey]) -> npt.NDArray[np.uint8]:
        """Stamped records whose bytes follow from seed and key: [len(keys), page_nbytes]."""
        rows = np.empty((len(keys), spec.page_nbytes), np.uint8)
        for row, (layer, block_hash) in zip(rows, keys, strict=True):
            rng = np.random.default_rng([self.seed, layer, int.from_bytes(block_hash, "little")])
            row[:] = rng.integers(0, 256, spec.page_nbytes, dtype=np.uint8)
        stamp_headers(rows, spec, keys)
        return rows

    def checkpoint(
        self, num_blocks: int | None = None, num_tail: int = 3, **fields: Any
    ) -> Checkpoint:
        hashes = self.hashes[:num_blocks]
        start = len(hashes) * PAGE_TOKENS
        rng = np.random.default_rng(self.seed + start)
        layers = []
        for spec in self.namespace.layers:
            keys, values = (
                RawArray.of(rng.standard_normal((spec.kv_heads, num_tail, dim)).astype(np.float16))
                for dim in (spec.key_dim, spec.value_dim)
            )
            layers.append(LayerTail(start, keys, values))
        state = ModelState(1, "ArraysCache", (RawArray("bfloat16", (2, 1), b"abcd"),), {"a": [1]})
        defaults: dict[str, Any] = {"states": (state,), "metadata": {"n": start}, "created_ns": 5}
        return Checkpoint(
            namespace_id=self.namespace.id,
            page_tokens=PAGE_TOKENS,
            num_tokens=start + num_tail,
            block_hashes=tuple(hashes),
            tail_tokens=np.arange(num_tail, dtype="<i8").tobytes(),
            layers=tuple(layers),
            **(defaults | fields),
        )


def chain(num_blocks: int, seed: int = 0, namespace: Namespace = NAMESPACE) -> Chain:
    tokens = np.random.default_rng(seed).integers(-100, 1 << 40, num_blocks * PAGE_TOKENS)
    return Chain(namespace, chain_blocks(namespace.id, tokens, PAGE_TOKENS), seed)


def save(
    store: PageStore, name: str, sequence: Chain, first: int = 0, last: int | None = None
) -> int:
    """Adds the pages of blocks [first, last) of every spec and publishes a checkpoint at `last`."""
    ns = store.namespace(sequence.namespace)
    with store.commit() as commit:
        for spec in sequence.namespace.page_specs:
            keys = sequence.keys(spec, first, last)
            commit.add_pages(ns, spec, sequence.blocks, keys, sequence.records(spec, keys))
        return commit.publish(name, sequence.checkpoint(last))


def locations(ns: NamespaceStore, spec: PageSpec, keys: list[PageKey]) -> list[Location]:
    found = [ns.locate(spec, layer, block_hash) for layer, block_hash in keys]
    assert None not in found
    return [location for location in found if location is not None]


def read(ns: NamespaceStore, spec: PageSpec, keys: list[PageKey]) -> npt.NDArray[np.uint8]:
    out = np.empty((len(keys), spec.page_nbytes), np.uint8)
    ns.read_pages(spec, locations(ns, spec, keys), out)
    return out


def check_readable(store: PageStore, name: str, sequence: Chain, num_blocks: int) -> None:
    """The session's newest checkpoint is that of `num_blocks`, and all its pages are right."""
    assert store.latest(name) == sequence.checkpoint(num_blocks)
    ns = store.namespace(sequence.namespace)
    for spec in sequence.namespace.page_specs:
        keys = sequence.keys(spec, 0, num_blocks)
        assert (read(ns, spec, keys) == sequence.records(spec, keys)).all()


def packs(path: Path) -> list[Path]:
    """Pack files, oldest first."""
    return sorted(path.glob("ns/*/pages/*/c.*.0"), key=lambda file: int(file.name.split(".")[1]))


class Crashed(BaseException):
    """The process is gone: nothing after this reaches the disk."""


class ScriptedFiles:
    """The real file operations, counted; before operation number `at` something happens.

    `act` is an errno to fail that one with, or Crashed: then it and all later ones do nothing.
    """

    def __init__(self, at: int = -1, act: int | type[Crashed] = errno.EIO) -> None:
        self._real = Files()
        self._at = at
        self._act = act
        self.log: list[str] = []
        self.short_writes = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._real, name)
        return lambda *args, **options: self._run(name, real, args, options)

    def _run(self, name: str, real: Callable[..., Any], args: Any, options: Any) -> Any:
        if name == "close":  # a dead process' descriptors close, and close must not fail
            return real(*args)
        number = len(self.log)
        if self._act is Crashed and 0 <= self._at <= number:
            raise Crashed
        self.log.append(name)
        if number == self._at and isinstance(self._act, int):
            raise OSError(self._act, os.strerror(self._act))
        if name == "writev" and self.short_writes:
            fd, buffers = args
            return real(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]])
        if name == "preadv" and self.short_writes:
            fd, buffers, offset = args
            return real(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)
        return real(*args, **options)


def writing(log: list[str]) -> list[str]:
    """The operations that change something."""
    kinds = {"create", "writev", "fsync", "link", "unlink", "mkdir", "rmdir", "open_lock", "chmod"}
    return [name for name in log if name in kinds]


DEMO_SPECS = (SPEC, page_spec("mse3", "exact", heads=2, dim=80))
