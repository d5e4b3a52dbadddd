"""What the store hands to and takes from the floors above."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tqstore.format.block_hash import BlockRecord
from tqstore.format.namespace import Namespace

__all__ = ["BlockRecord", "Counters", "Location", "NamespaceInfo", "SessionInfo"]


class Location(NamedTuple):
    """Where a page is: its pack's number and its slot there; and which page it is."""

    pack: int
    slot: int
    layer: int
    block_hash: bytes


@dataclass(frozen=True)
class SessionInfo:
    """One line of `ls`.  `problem` says why no checkpoint of it can be read; numbers are 0 then
    and `name` is that of its folder.  `expires_ns`: when gc may take it, 0 for never.  `paging`:
    counters of its pool when it was saved."""

    name: str
    sequence: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    created_ns: int = 0
    expires_ns: int = 0
    namespace_id: bytes = b""
    nbytes: int = 0
    metadata: dict[str, Any] | None = None
    problem: str | None = None
    paging: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace on disk; `namespace` is None if its file cannot be read, for `problem`."""

    id: bytes
    namespace: Namespace | None
    num_packs: int
    nbytes: int
    problem: str | None = None


@dataclass
class Counters:
    """What this process did with a store since it opened it.  Bytes as written and read."""

    pages_written: int = 0
    pages_deduplicated: int = 0
    packs_written: int = 0
    checkpoints_written: int = 0
    nbytes_written: int = 0
    pages_read: int = 0
    nbytes_read: int = 0
    pages_quarantined: int = 0
    packs_deleted: int = 0
    nbytes_evicted: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # kind of reason -> times it was told
