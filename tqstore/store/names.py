"""Names inside a store: session names, and the file names that stand for things.

Checked when written and again when listed; nothing a user types becomes a path as it is.
"""

from __future__ import annotations

import hashlib
import re

from tqstore.errors import InvalidInput

_SESSION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._ -]{0,127}")
_FOLDER = re.compile(r"[a-z0-9_-]{1,40}-[0-9a-f]{16}")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"c\.(0|[1-9][0-9]{0,15})\.0")
_CHECKPOINT = re.compile(r"([0-9]{12})\.ckpt")
MAX_SEQUENCE = 10**12 - 1


def check_session_name(name: str) -> str:
    """`name` if it may name a session, else InvalidInput."""
    if not isinstance(name, str) or not _SESSION.fullmatch(name) or name.endswith(" "):
        raise InvalidInput(
            f"{name!r} cannot name a session",
            remedy="Use 1 to 128 letters, digits, '.', '_', '-' or spaces; no '.' first and no "
            "space at either end",
        )
    return name


def session_folder(name: str) -> str:
    """Folder of a session: readable, and distinct where file systems ignore case."""
    check_session_name(name)
    readable = re.sub(r"[^a-z0-9_-]", "-", name.lower())[:40]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def is_session_folder(folder: str) -> bool:
    return _FOLDER.fullmatch(folder) is not None


def is_namespace_folder(folder: str) -> bool:
    return _NAMESPACE.fullmatch(folder) is not None


def pack_name(number: int) -> str:
    return f"c.{number}.0"


def pack_number(name: str) -> int | None:
    match = _PACK.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_name(sequence: int) -> str:
    return f"{sequence:012d}.ckpt"


def checkpoint_sequence(name: str) -> int | None:
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) or None if match else None
