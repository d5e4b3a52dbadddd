"""A namespace's folder as a whole: whether it is in use, and deleting it.

Only for gc, under the exclusive lock.
"""

from __future__ import annotations

import contextlib
import time

from tqstore.errors import NotFound
from tqstore.store.folder import Folder
from tqstore.store.gc_plan import GcOptions
from tqstore.store.names import pack_number
from tqstore.store.root import NAMESPACE_FILE, PAGES, ZARR_FILE


def has_fresh_packs(own: Folder, options: GcOptions) -> bool:
    """Whether a pack of the namespace's folder was used within the grace."""
    now = time.time_ns()
    with contextlib.suppress(NotFound), own.child(PAGES) as pages:
        for spec in pages.names():
            with pages.child(spec) as folder:
                for name in folder.names():
                    status = folder.status_of(name) if pack_number(name) is not None else None
                    if status and options.is_fresh(status.st_mtime_ns, now):
                        return True
    return False


def remove_tree(own: Folder) -> int:
    """Deletes what a namespace's folder holds; what is nothing of the store's stays.

    Each level is synced before the one above it goes.  Bytes freed.
    """
    freed = 0
    with contextlib.suppress(NotFound), own.child(PAGES) as pages:
        for spec in pages.names():
            with pages.child(spec) as folder:
                names = [name for name in folder.names() if pack_number(name) is not None]
                freed += sum([_unlink(folder, name) for name in names])
                folder.sync()
                freed += _unlink(folder, ZARR_FILE)
                folder.sync()
            pages.rmdir(spec)
        pages.sync()
        own.rmdir(PAGES)
    own.sync()
    if PAGES not in own.names():
        freed += _unlink(own, NAMESPACE_FILE)
    own.sync()
    return freed


def _unlink(folder: Folder, name: str) -> int:
    status = folder.status_of(name)
    if status is None:
        return 0
    folder.unlink(name)
    return status.st_size
