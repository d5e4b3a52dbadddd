"""How many bytes a store takes, and refusing what would exceed its budget."""

from __future__ import annotations

import stat

from tqstore.errors import NotFound, StoreFull
from tqstore.store.files import is_regular
from tqstore.store.folder import Folder

_MAX_DEPTH = 6


def folder_nbytes(folder: Folder, depth: int = 0) -> int:
    """Bytes of all files under `folder`; what vanishes meanwhile counts nothing."""
    total = 0
    for name in folder.names():
        status = folder.status_of(name)
        if status is None:
            continue
        if is_regular(status):
            total += status.st_size
        elif stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
            try:
                with folder.child(name) as child:
                    total += folder_nbytes(child, depth + 1)
            except NotFound:
                continue
    return total


def check_room(root: Folder, max_bytes: int | None, nbytes: int, doing: str) -> None:
    """StoreFull if `nbytes` more would exceed `max_bytes`."""
    if max_bytes is None:
        return
    used = folder_nbytes(root)
    if used + nbytes > max_bytes:
        raise StoreFull(
            f"{nbytes} bytes more would exceed the store's budget: {used} of {max_bytes} are used",
            doing=doing,
            remedy="Remove sessions, collect garbage, or raise max_bytes; nothing was changed",
        )
