"""What gc took away and why, so that a miss can say `evicted` or `expired`.

Owns gone/: immutable records of 8 bytes a block, of the newest 32,768 blocks at least while there
is room.  Nothing depends on them but the reason that is told; a purge leaves none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tqstore.errors import Corrupt, NotFound, TqStoreError
from tqstore.format.format_file import FORMAT_VERSION
from tqstore.format.framing import read_frame, write_frame
from tqstore.format.plain import pack_plain, unpack_map
from tqstore.store.folder import Folder

GONE = "gone"
MAGIC = b"TQGN"
MAX_NBYTES = 1 << 20
Reason = Literal["evicted", "expired", "corrupt"]
_REASONS: tuple[Reason, ...] = ("evicted", "expired", "corrupt")
_PREFIX_NBYTES = 8
_MAX_BLOCKS = 1 << 15
_MAX_SESSIONS = 1 << 10
_KEPT_RECORDS = 2
_NAME = re.compile(r"([0-9]{12})\.gone")


@dataclass
class Gone:
    """Reasons by the first 8 bytes of block hashes, and by sessions' folders; oldest first."""

    blocks: dict[bytes, Reason] = field(default_factory=dict)
    sessions: dict[str, Reason] = field(default_factory=dict)

    def reason_of(self, block_hash: bytes) -> Reason | None:
        return self.blocks.get(block_hash[:_PREFIX_NBYTES])

    def add(self, blocks: Mapping[bytes, Reason], sessions: Mapping[str, Reason]) -> None:
        for block, reason in blocks.items():
            self.blocks.pop(block[:_PREFIX_NBYTES], None)
            self.blocks[block[:_PREFIX_NBYTES]] = reason
        for session, reason in sessions.items():
            self.sessions.pop(session, None)
            self.sessions[session] = reason

    def encode(self) -> bytes:
        body = {
            "sessions": [list(item) for item in self.sessions.items()][-_MAX_SESSIONS:],
            "reasons": bytes(_REASONS.index(reason) for reason in self.blocks.values()),
            "blocks": b"".join(self.blocks),
        }
        return write_frame(MAGIC, FORMAT_VERSION, pack_plain(body, "record of what is gone"))

    @classmethod
    def decode(cls, data: bytes, file: str) -> Gone:
        """Corrupt, or Incompatible if newer."""
        fields = unpack_map(
            read_frame(data, MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_NBYTES), file
        )
        sessions = fields.take("sessions", list)
        reasons = fields.take("reasons", bytes)
        blocks = fields.take("blocks", bytes)
        fields.done()
        if len(blocks) != _PREFIX_NBYTES * len(reasons) or any(r >= len(_REASONS) for r in reasons):
            raise Corrupt(file, "blocks and reasons do not fit together")
        if not all(_is_session(item) for item in sessions):
            raise Corrupt(file, "a session is not (folder, reason)")
        prefixes = (blocks[at : at + _PREFIX_NBYTES] for at in range(0, len(blocks), 8))
        return cls(
            {prefix: _REASONS[r] for prefix, r in zip(prefixes, reasons, strict=True)},
            dict(sessions),
        )


def _is_session(item: object) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 2
        and isinstance(item[0], str)
        and item[1] in _REASONS
    )


def record_number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _numbers(folder: Folder) -> list[int]:
    """Newest first."""
    found = (record_number(name) for name in folder.names())
    return sorted((number for number in found if number is not None), reverse=True)


def _name(number: int) -> str:
    return f"{number:012d}.gone"


def list_records(root: Folder) -> list[int]:
    """Numbers of the records, newest first: they change when there is something new."""
    try:
        with root.child(GONE) as folder:
            return _numbers(folder)
    except NotFound:
        return []


def read_gone(root: Folder) -> Gone:
    """All that is known to be gone; records that cannot be read are passed over."""
    gone = Gone()
    with contextlib.suppress(NotFound), root.child(GONE) as folder:
        for number in reversed(_numbers(folder)):
            with contextlib.suppress(TqStoreError):
                older = Gone.decode(folder.read(_name(number), MAX_NBYTES), folder.path)
                gone.add(older.blocks, older.sessions)
    return gone


def write_gone(
    root: Folder, blocks: Mapping[bytes, Reason], sessions: Mapping[str, Reason]
) -> None:
    """Adds a record, joined with the newest while it is small, and drops the oldest."""
    with root.make_child(GONE) as folder:
        numbers = _numbers(folder)
        joined, merged = _joined(folder, numbers, blocks, sessions)
        following = range(max(numbers, default=0) + 1, 10**12)
        folder.create((_name(number) for number in following), [joined.encode()])
        folder.sync()
        for number in [*merged, *numbers[_KEPT_RECORDS - 1 :]]:
            folder.unlink(_name(number))


def forget_gone(root: Folder) -> None:
    """Drops every record: what was purged must leave no trace."""
    with contextlib.suppress(NotFound), root.child(GONE) as folder:
        for number in _numbers(folder):
            folder.unlink(_name(number))
        folder.sync()


def _joined(
    folder: Folder,
    numbers: Iterable[int],
    blocks: Mapping[bytes, Reason],
    sessions: Mapping[str, Reason],
) -> tuple[Gone, list[int]]:
    """The record to write, and the numbers of those it replaces."""
    newest = next(iter(numbers), None)
    kept = dict(list(blocks.items())[-_MAX_BLOCKS:])
    if newest is not None:
        try:
            gone = Gone.decode(folder.read(_name(newest), MAX_NBYTES), folder.path)
        except TqStoreError:
            return _record(kept, sessions), [newest]
        gone.add(kept, sessions)
        if len(gone.blocks) <= _MAX_BLOCKS and len(gone.sessions) <= _MAX_SESSIONS:
            return gone, [newest]
    return _record(kept, sessions), []


def _record(blocks: Mapping[bytes, Reason], sessions: Mapping[str, Reason]) -> Gone:
    gone = Gone()
    gone.add(blocks, sessions)
    return gone
