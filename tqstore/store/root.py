"""The store's own folder: opening, creating, and refusing what isn't one.

Owns root/, FORMAT and LOCK.  A new store is complete the moment FORMAT is linked: everything else
is made before it, so an interrupted creation is simply finished by the next opener.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import time
import uuid
from pathlib import Path
from typing import Literal

from tqstore.errors import (
    BackendFailed,
    Corrupt,
    Incompatible,
    InvalidInput,
    NotFound,
    TqStoreError,
)
from tqstore.format.format_file import ENCRYPTION, MAX_NBYTES, FormatFile
from tqstore.store.encryption import SealedFiles, aes_gcm
from tqstore.store.encryption_key import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    check_key,
    key_check,
    key_from_environment,
)
from tqstore.store.files import FILE_MODE, FOLDER_MODE, Files, failure
from tqstore.store.folder import TMP_PREFIX, Folder
from tqstore.store.mounts import refuse_network

FORMAT = "FORMAT"
LOCK = "LOCK"
NAMESPACES = "ns"
PAGES = "pages"
SESSIONS = "sessions"
QUARANTINE = "quarantine"
NAMESPACE_FILE = "namespace.msgpack"
ZARR_FILE = "zarr.json"
Mode = Literal["a", "r"]
HOME_VARIABLE = "TQSTORE_HOME"
_OPENING = "opening a store"
_HOW_TO_MEND = "Put a copy of this file back: it is written once and never changes"


def default_path() -> Path:
    """$TQSTORE_HOME, or the user's data folder of this system."""
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home)
    import platformdirs

    return Path(platformdirs.user_data_dir("tqstore", appauthor=False))


def open_root(
    files: Files, path: Path, mode: Mode, key: bytes | None = None
) -> tuple[Folder, FormatFile]:
    """The root folder and its FORMAT; with mode "a" made if there is none.

    `key` None is that of the environment.  A store made while there is one is encrypted; then and
    for each that is, what is read and written below the folder goes through `SealedFiles`.
    """
    key = key_from_environment() if key is None else check_key(key)
    refuse_network(path)
    if mode == "a":
        _make_path(files, path)
    root = _open_existing(files, path)
    try:
        record = _read_or_make_format(root, mode, key)
        _check_key_fits(record, key, root.path)
        if key is not None:
            root.files = SealedFiles(files, root.fd, key, record.uuid)
        return root, record
    except BaseException:
        root.close()
        raise


def open_below(path: Path) -> Folder | None:
    """The folder at `path` if it lies in an encrypted store, whose key is the environment's.

    None if it doesn't, or nothing can be said of it: then its files are as they are.
    """
    for above in path.parents[:4]:
        if not (above / FORMAT).is_file():
            continue
        with contextlib.suppress(TqStoreError), _open_existing(Files(), above) as plain:
            if not read_format(plain).is_encrypted:
                return None
            break
    else:
        return None
    root, _ = open_root(Files(), above, "r")
    with root:
        return root.descend(*path.relative_to(above).parts)


def _check_key_fits(record: FormatFile, key: bytes | None, path: str) -> None:
    """Incompatible for a missing or wrong key, and for a key to a store that takes none."""
    doing = f"opening the store at {path}"
    if record.key_check is None:
        if key is not None:
            remedy = f"Unset {KEY_VARIABLE} and {KEY_FILE_VARIABLE}, or use another folder"
            raise Incompatible("encryption", "none", "a key", doing=doing, remedy=remedy)
        return
    if key is None:
        remedy = f"Set {KEY_FILE_VARIABLE} or {KEY_VARIABLE}"
        raise Incompatible("encryption", ENCRYPTION, "no key", doing=doing, remedy=remedy)
    given = key_check(key, record.uuid)
    if not hmac.compare_digest(given, record.key_check):
        remedy = f"Set {KEY_FILE_VARIABLE} or {KEY_VARIABLE} to the key the store was made with"
        raise Incompatible("key", record.key_check.hex(), given.hex(), doing=doing, remedy=remedy)
    aes_gcm(key)  # says so now if the package for it is missing


def _open_existing(files: Files, path: Path) -> Folder:
    try:
        return Folder(files, files.open_root(str(path)), str(path))
    except FileNotFoundError as error:
        raise NotFound(f"there is no store at {path}", doing=_OPENING) from error
    except NotADirectoryError as error:
        raise InvalidInput(_not_a_folder(path), doing=_OPENING) from error
    except OSError as error:
        raise failure(error, _OPENING, str(path)) from error


def _not_a_folder(path: Path) -> str:
    """Which part of `path` it is that is a file."""
    above = next((parent for parent in path.parents if parent.is_file()), None)
    if above is None:
        return f"{path} is a file, not a store"
    return f"{above} is a file, so that no store can be at {path}"


def _make_path(files: Files, path: Path) -> None:
    """Makes the folder and those above it, each one's name durable in its parent."""
    if path.is_dir() or path.is_file():
        return
    if path.parent == path:
        raise BackendFailed(f"{path} does not exist", doing="making a store")
    _make_path(files, path.parent)
    with _open_existing(files, path.parent) as parent:
        parent.make_child(path.name).close()


def _read_or_make_format(root: Folder, mode: Mode, key: bytes | None) -> FormatFile:
    try:
        record = _format_of(root)
        if mode == "a":
            _make_lock(root)  # copies of a store tend to lose empty files
        return record
    except NotFound:
        try:
            _check_may_become_store(root, mode)
        except (InvalidInput, Corrupt):
            if FORMAT in root.names():  # another opener has just finished it
                return _read_or_make_format(root, mode, key)
            raise
    _make_lock(root)
    for name in (NAMESPACES, SESSIONS):
        root.make_child(name).close()
    record = _new_format(key)
    try:
        root.files.chmod(root.fd, FOLDER_MODE)
    except OSError as error:
        raise failure(error, "making private", root.path) from error
    root.create([FORMAT], [record.encode()])
    root.sync()
    return _format_of(root)  # another process may have been first


def _new_format(key: bytes | None) -> FormatFile:
    own = uuid.uuid4().bytes
    if key is None:
        return FormatFile(own, time.time_ns())
    aes_gcm(key)
    return FormatFile(own, time.time_ns(), (ENCRYPTION,), key_check(key, own))


def _format_of(root: Folder) -> FormatFile:
    """As `read_format`, for somebody who opens the store."""
    try:
        return read_format(root)
    except Corrupt as error:
        raise Corrupt(error.file, error.what, doing=_OPENING, remedy=_HOW_TO_MEND) from error
    except Incompatible as error:
        raise Incompatible(
            error.field, error.stored, error.given, doing=_OPENING, remedy=error.remedy
        ) from error


def read_format(root: Folder) -> FormatFile:
    """NotFound, Corrupt, or Incompatible for a newer format."""
    return FormatFile.decode(root.read(FORMAT, MAX_NBYTES), root.path_of(FORMAT))


def _make_lock(root: Folder) -> None:
    """Makes LOCK if it isn't there."""
    try:
        if LOCK not in root.names():
            fd = root.files.create(root.fd, LOCK)
            try:
                root.files.chmod(fd, FILE_MODE)
            finally:
                root.files.close(fd)
    except FileExistsError:
        return  # another opener was first
    except OSError as error:
        raise failure(error, "making the lock", root.path_of(LOCK)) from error


def _check_may_become_store(root: Folder, mode: Mode) -> None:
    """A folder without FORMAT may become a store only if nothing else is in it."""
    names = root.names()
    strange = sorted(
        name
        for name in names
        if name not in (LOCK, NAMESPACES, SESSIONS) and not name.startswith(TMP_PREFIX)
    )
    if strange:
        raise InvalidInput(
            f"{root.path} is not a store: it has no FORMAT but holds {strange[0]!r}",
            doing=_OPENING,
            remedy="Give an empty or a new folder",
        )
    for name in (NAMESPACES, SESSIONS):
        if name in names:
            with root.child(name) as folder:
                if folder.names():
                    raise Corrupt(
                        root.path_of(FORMAT),
                        "is missing from a store that has data",
                        doing=_OPENING,
                        remedy=_HOW_TO_MEND,
                    )
    if mode == "r":
        raise NotFound(f"there is no store at {root.path}", doing=_OPENING)
