"""The key of an encrypted store: where it comes from, and what is derived from it.

A key is 32 random bytes; passphrases are not taken, since nothing here slows down guessing them.
Owns reading it from a file or the environment, and the two derivations of docs/format.md.
"""

from __future__ import annotations

import binascii
import hmac
import os
import stat
from pathlib import Path

from tqstore.errors import InvalidInput

KEY_NBYTES = 32
CHECK_NBYTES = 16
KEY_VARIABLE = "TQSTORE_KEY"
KEY_FILE_VARIABLE = "TQSTORE_KEY_FILE"
_MAKE = "Make one with `openssl rand -hex 32`"


def key_from_environment() -> bytes | None:
    """$TQSTORE_KEY (64 hex digits), or the content of the file $TQSTORE_KEY_FILE; None for none.

    InvalidInput for both at once, for what is no key, and for a file that others may read.
    """
    text, file = os.environ.get(KEY_VARIABLE), os.environ.get(KEY_FILE_VARIABLE)
    if text and file:
        raise InvalidInput(
            f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set", remedy="Unset one of them"
        )
    if text:
        return parse_key(text.encode(), f"${KEY_VARIABLE}")
    return read_key(Path(file).expanduser()) if file else None


def read_key(file: Path) -> bytes:
    """The key in a file: 32 raw bytes or 64 hex digits."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            raw = opened.read(4096)
    except OSError as error:
        raise InvalidInput(
            f"{file}: {error.strerror}", doing="reading the key", remedy=_MAKE
        ) from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise InvalidInput(
            f"others may read {file}: its mode is {mode & 0o777:04o}",
            doing="reading the key",
            remedy=f"chmod 600 {file}",
        )
    return parse_key(raw, str(file))


def parse_key(raw: bytes, where: str) -> bytes:
    """`raw` is 32 bytes, or 64 hex digits with or without white space around them."""
    if len(raw) == KEY_NBYTES:
        return raw
    try:
        key = binascii.unhexlify(raw.strip())
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_NBYTES:
        raise InvalidInput(f"{where} holds no key of 32 bytes or 64 hex digits", remedy=_MAKE)
    return key


def check_key(key: bytes) -> bytes:
    """`key` if it may be one."""
    if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
        raise InvalidInput(f"a key is {KEY_NBYTES} bytes", remedy=_MAKE)
    return key


def key_check(key: bytes, uuid: bytes) -> bytes:
    """16 bytes that tell whether a key is a store's, and nothing else about it."""
    return hmac.digest(key, b"tqstore key check\0" + uuid, "sha256")[:CHECK_NBYTES]


def file_key(key: bytes, uuid: bytes, salt: bytes, place: str) -> bytes:
    """The key of one file: no two files have the same, since `salt` is 32 random bytes.

    `place` is the file's folder, from the store's on: it binds the file to its namespace or
    session.
    """
    return hmac.digest(key, b"tqstore file key\0" + uuid + salt + place.encode(), "sha256")
