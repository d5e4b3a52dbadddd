"""Verify: everything a store must satisfy, checked from the files alone.

Yields every finding instead of stopping at the first; writes nothing and takes no lock, so that
what a running writer has just begun may show as a leftover.  What gc deletes meanwhile is not a
finding, and a page is missing only if it is not in a pack that came meanwhile either.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tqstore.errors import Corrupt, NotFound, TqStoreError
from tqstore.format.checkpoint import CheckpointSummary
from tqstore.format.namespace import MAX_NBYTES as MAX_NAMESPACE_NBYTES
from tqstore.format.namespace import Namespace
from tqstore.format.zarr_metadata import zarr_metadata
from tqstore.spec import PageSpec
from tqstore.store import sessions
from tqstore.store.files import FILE_MODE, FOLDER_MODE
from tqstore.store.folder import TMP_PREFIX, Folder
from tqstore.store.names import (
    checkpoint_name,
    checkpoint_sequence,
    is_namespace_folder,
    is_session_folder,
    pack_number,
)
from tqstore.store.root import (
    FORMAT,
    LOCK,
    NAMESPACE_FILE,
    NAMESPACES,
    PAGES,
    QUARANTINE,
    SESSIONS,
    ZARR_FILE,
    read_format,
)
from tqstore.store.tombstones import GONE, Gone, record_number
from tqstore.store.tombstones import MAX_NBYTES as MAX_GONE_NBYTES
from tqstore.store.verify_pack import Finding, Pages, verify_pack

__all__ = ["Finding", "verify"]

_MAX_ZARR_NBYTES = 1 << 20


@dataclass
class _Found:
    """What checkpoints are resolved against."""

    root: Folder
    namespaces: dict[bytes, Namespace]
    pages: dict[bytes, Pages]
    seen: set[str] = field(default_factory=set)  # paths of packs and namespaces looked at


def verify(root: Folder) -> Iterator[Finding]:
    """Every finding of the store at `root`."""
    found = _Found(root, {}, {})
    for finding in _verify(root, found):
        relative = os.path.relpath(finding.path, root.path)
        yield Finding(finding.kind, relative, finding.what, finding.severity)


def _verify(root: Folder, found: _Found) -> Iterator[Finding]:
    try:
        read_format(root)
    except TqStoreError as error:
        yield Finding("format", root.path_of(FORMAT), str(error))
    names = root.names()
    folders = {NAMESPACES, SESSIONS, GONE, QUARANTINE}
    yield from _check_entries(root, names, {FORMAT, LOCK}, folders)
    if LOCK not in names:
        yield Finding("format", root.path_of(LOCK), "is missing")
    yield from _each_folder(root, NAMESPACES, is_namespace_folder, _namespace, found)
    yield from _each_folder(root, SESSIONS, is_session_folder, _session, found)
    yield from _gone(root)
    with contextlib.suppress(NotFound), root.child(QUARANTINE) as folder:
        names = folder.names()
        yield from _check_entries(folder, names, set(names), set())


def _each_folder(
    root: Folder,
    name: str,
    is_valid: Callable[[str], bool],
    check: Callable[[Folder, str, _Found], Iterator[Finding]],
    found: _Found,
) -> Iterator[Finding]:
    """`check` of every validly named folder in root/`name`."""
    try:
        with root.child(name) as parent:
            names = sorted(parent.names())
            valid = {child for child in names if is_valid(child)}
            yield from _check_entries(parent, names, set(), valid)
            for child in sorted(valid):
                try:
                    with parent.child(child) as folder:
                        yield from check(folder, child, found)
                except NotFound:
                    continue  # deleted meanwhile
                except TqStoreError as error:
                    yield Finding("folder", parent.path_of(child), str(error))
    except TqStoreError as error:
        yield Finding("folder", root.path_of(name), str(error))


def _gone(root: Folder) -> Iterator[Finding]:
    """Records of what gc took away: nothing is lost with one that cannot be read."""
    with contextlib.suppress(NotFound), root.child(GONE) as folder:
        names = folder.names()
        records = {name for name in names if record_number(name) is not None}
        yield from _check_entries(folder, names, records, set())
        for name in sorted(records):
            try:
                Gone.decode(folder.read(name, MAX_GONE_NBYTES), folder.path_of(name))
            except TqStoreError as error:
                yield Finding("gone", folder.path_of(name), str(error), "warning")


def _check_entries(
    folder: Folder, names: Iterable[str], files: set[str], folders: set[str]
) -> Iterator[Finding]:
    """Findings for names that don't belong, leftovers, links, and access that others have.

    `names` is the listing that `files` and `folders` were chosen from: what others add meanwhile is
    no stranger.
    """
    for name in sorted(names):
        path = folder.path_of(name)
        status = folder.status_of(name)
        if status is None:
            continue
        mode = status.st_mode
        if name.startswith(TMP_PREFIX):
            yield Finding("leftover", path, "a writer left its temporary file", "warning")
        elif stat.S_ISLNK(mode):
            yield Finding("link", path, "is a symbolic link; the store follows none")
        elif name in files and stat.S_ISREG(mode):
            yield from _check_access(path, mode, FILE_MODE)
        elif name in folders and stat.S_ISDIR(mode):
            yield from _check_access(path, mode, FOLDER_MODE)
        else:
            yield Finding("stranger", path, "is nothing of this store", "warning")


def _check_access(path: str, mode: int, wanted: int) -> Iterator[Finding]:
    if mode & 0o077:
        what = f"others may access it: mode {mode & 0o777:04o}, not {wanted:04o}"
        yield Finding("access", path, what, "warning")


def _namespace(folder: Folder, name: str, found: _Found) -> Iterator[Finding]:
    found.seen.add(folder.path)
    names = folder.names()
    yield from _check_entries(folder, names, {NAMESPACE_FILE}, {PAGES})
    path = folder.path_of(NAMESPACE_FILE)
    if not {NAMESPACE_FILE, PAGES} & set(folder.names()):
        yield Finding("leftover", folder.path, "is empty: its writer was interrupted", "warning")
        return
    try:
        namespace = Namespace.decode(folder.read(NAMESPACE_FILE, MAX_NAMESPACE_NBYTES), path)
        if namespace.id.hex() != name:
            raise Corrupt(path, "is another namespace's")
    except TqStoreError as error:
        if folder.status().st_nlink:  # else gc has deleted it meanwhile
            yield Finding("namespace", path, str(error))
        return
    found.namespaces[namespace.id] = namespace
    found.pages.setdefault(namespace.id, set())
    try:
        with folder.child(PAGES) as parent:
            specs = {spec.name: spec for spec in namespace.page_specs}
            listed = parent.names()
            yield from _check_entries(parent, listed, set(), set(specs))
            for child in sorted(specs.keys() & set(listed)):
                with parent.child(child) as packs:
                    yield from _spec_folder(packs, specs[child], namespace, found)
    except NotFound:
        return  # no page has been stored yet


def _spec_folder(
    folder: Folder, spec: PageSpec, namespace: Namespace, found: _Found
) -> Iterator[Finding]:
    listed = folder.names()
    names = {name for name in listed if pack_number(name) is not None}
    yield from _check_entries(folder, listed, {ZARR_FILE, *names}, set())
    if not names and ZARR_FILE not in folder.names():
        yield Finding("leftover", folder.path, "is empty: its writer was interrupted", "warning")
        return
    try:
        if folder.read(ZARR_FILE, _MAX_ZARR_NBYTES) != zarr_metadata(spec):
            yield Finding("zarr", folder.path_of(ZARR_FILE), "does not describe these packs")
    except TqStoreError as error:
        yield Finding("zarr", folder.path_of(ZARR_FILE), str(error))
    yield from _packs(folder, names, spec, namespace, found)


def _packs(
    folder: Folder, names: set[str], spec: PageSpec, namespace: Namespace, found: _Found
) -> Iterator[Finding]:
    """Findings of the packs `names` that were not looked at yet."""
    for name in sorted(names):
        path = folder.path_of(name)
        if path in found.seen:
            continue
        found.seen.add(path)
        try:
            yield from verify_pack(folder, name, spec, namespace, found.pages[namespace.id])
        except NotFound:
            continue  # gc was there; a reference to it would be missed
        except TqStoreError as error:
            yield Finding("pack", path, str(error))


def _new_packs(namespace: Namespace, found: _Found) -> Iterator[Finding]:
    """Findings of packs that came since their folder was listed."""
    for spec in namespace.page_specs:
        with contextlib.suppress(NotFound, Corrupt):
            where = (NAMESPACES, namespace.id.hex(), PAGES, spec.name)
            with found.root.descend(*where) as folder:
                names = {name for name in folder.names() if pack_number(name) is not None}
                yield from _packs(folder, names, spec, namespace, found)


def _session(folder: Folder, _name: str, found: _Found) -> Iterator[Finding]:
    listed = folder.names()
    names = {file for file in listed if checkpoint_sequence(file) is not None}
    yield from _check_entries(folder, listed, names, set())
    if not names:
        yield Finding("leftover", folder.path, "has no checkpoint", "warning")
    for sequence in sessions.sequences(folder):
        path = folder.path_of(checkpoint_name(sequence))
        try:
            summary, _ = sessions.read_checkpoint(folder, sequence)
        except NotFound:
            continue
        except TqStoreError as error:
            yield Finding("checkpoint", path, str(error))
            continue
        yield from _new_namespace(summary.namespace_id, found)
        namespace = found.namespaces.get(summary.namespace_id)
        if namespace is None:
            problems = [Finding("checkpoint", path, "its namespace is not in the store")]
        elif len(namespace.layers) != len(summary.reach):
            problems = [Finding("checkpoint", path, "has not the layers of its namespace")]
        else:
            problems = list(_resolve(summary, namespace, found, path))
        if folder.status_of(checkpoint_name(sequence)) is not None:  # else pruned meanwhile
            yield from problems


def _new_namespace(namespace_id: bytes, found: _Found) -> Iterator[Finding]:
    """Findings of a namespace that came since they were listed."""
    if namespace_id not in found.namespaces:
        name = namespace_id.hex()
        with (
            contextlib.suppress(NotFound, Corrupt),
            found.root.descend(NAMESPACES, name) as own,
        ):
            if NAMESPACE_FILE in own.names() and own.path not in found.seen:
                yield from _namespace(own, name, found)


def _resolve(
    summary: CheckpointSummary, namespace: Namespace, found: _Found, path: str
) -> Iterator[Finding]:
    """Findings for pages that are nowhere, not even in packs that came since."""
    pages = found.pages[namespace.id]
    if any(missing for _, missing in _missing(summary, pages)):
        yield from _new_packs(namespace, found)
    for layer, missing in _missing(summary, pages):
        if missing:
            what = (
                f"layer {layer}: {len(missing)} pages are missing, block {missing[-1].hex()} first"
            )
            yield Finding("reference", path, what)


def _missing(summary: CheckpointSummary, pages: Pages) -> list[tuple[int, list[bytes]]]:
    """(layer, blocks whose page is missing) for each layer."""
    return [
        (layer, [block for block in summary.needed_blocks(layer) if (layer, block) not in pages])
        for layer in range(len(summary.reach))
    ]
