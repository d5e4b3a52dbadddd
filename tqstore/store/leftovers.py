"""What writers that died have left: temporary files and empty folders, found without a lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqstore.errors import Corrupt, NotFound
from tqstore.store.folder import TMP_PREFIX, Folder
from tqstore.store.names import is_namespace_folder, is_session_folder
from tqstore.store.root import NAMESPACES, QUARANTINE, SESSIONS
from tqstore.store.tombstones import GONE

IsFresh = Callable[[int], bool]  # of a time of last change, in nanoseconds since 1970


@dataclass(frozen=True)
class Leftover:
    """A file or empty folder to remove; `path` from the store's folder on."""

    path: tuple[str, ...]
    nbytes: int
    why: str
    is_folder: bool = False


def find_leftovers(
    root: Folder, is_fresh: IsFresh, *, with_quarantine: bool = False
) -> Iterator[Leftover]:
    """All of a store, the deepest first; with `with_quarantine` also what repair has set aside."""
    yield from _temporaries(root, (), is_fresh)
    with contextlib.suppress(NotFound), root.child(GONE) as folder:
        yield from _temporaries(folder, (GONE,), is_fresh)
    for top in (NAMESPACES, SESSIONS):
        with contextlib.suppress(NotFound), root.child(top) as folder:
            yield from _below(folder, (top,))
    if with_quarantine:
        with contextlib.suppress(NotFound), root.child(QUARANTINE) as folder:
            for name in folder.names():
                status = folder.status_of(name)
                if status is not None:
                    yield Leftover((QUARANTINE, name), status.st_size, "set aside by repair")


def _below(folder: Folder, path: tuple[str, ...]) -> Iterator[Leftover]:
    """Only commits write here, so that under the exclusive lock every temporary is dead."""
    yield from _temporaries(folder, path, lambda _time_ns: False)
    if path[0] == SESSIONS and len(path) > 1:
        return
    for name in folder.names():
        is_ours = is_session_folder(name) or is_namespace_folder(name) or len(path) > 1
        if not is_ours or name.startswith(TMP_PREFIX) or len(path) > 3:
            continue
        try:
            with folder.child(name) as child:
                found = list(_below(child, (*path, name)))
                yield from found
                gone = {item.path[-1] for item in found if len(item.path) == len(path) + 2}
                if not set(child.names()) - gone:
                    yield Leftover((*path, name), 0, "is empty", is_folder=True)
        except (NotFound, Corrupt):
            continue


def _temporaries(folder: Folder, path: tuple[str, ...], is_fresh: IsFresh) -> Iterator[Leftover]:
    for name in folder.names():
        if name.startswith(TMP_PREFIX):
            status = folder.status_of(name)
            if status is not None and not is_fresh(status.st_mtime_ns):
                yield Leftover((*path, name), status.st_size, "its writer died")
