"""Repair: mending a damaged store without losing anything that is still good.

What cannot be mended is moved to quarantine/ (a link, then an unlink), never deleted.  Good pages
of a bad pack are first written again, durably.  Owns quarantine/; gc empties it when told to.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tqstore.errors import BackendFailed, Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.block_hash import BlockRecord, block_hash
from tqstore.format.framing import FRAME_NBYTES
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes
from tqstore.format.page import PageKey
from tqstore.format.zarr_metadata import zarr_metadata
from tqstore.spec import PageSpec
from tqstore.store import sessions, tombstones
from tqstore.store.files import FILE_MODE, FOLDER_MODE, failure, is_regular
from tqstore.store.folder import Folder
from tqstore.store.gc_plan import GcOptions, GcPlan, plan_gc
from tqstore.store.gc_sweep import sound_copy, sweep
from tqstore.store.lock import exclusive_lock
from tqstore.store.names import checkpoint_name, is_session_folder, pack_number
from tqstore.store.pack_writing import ensure_file
from tqstore.store.root import (
    NAMESPACE_FILE,
    NAMESPACES,
    PAGES,
    QUARANTINE,
    SESSIONS,
    ZARR_FILE,
)
from tqstore.store.verify import verify
from tqstore.store.verify_pack import page_fault, verify_pack

if TYPE_CHECKING:
    from tqstore.store.namespace_store import NamespaceStore
    from tqstore.store.page_store import PageStore

_MAX_ZARR_NBYTES = 1 << 20


@dataclass(frozen=True)
class Repair:
    """One thing done: `path` from the store's folder on, `what` was done with it."""

    path: str
    what: str


def repair(store: PageStore) -> list[Repair]:
    """Everything that can be done; run `verify` again for what is left."""
    if store.mode == "r":
        raise InvalidInput(
            f"the store at {store.path} was opened with mode='r'",
            doing="repairing",
            remedy="Open it with mode='a'",
        )
    return list(_repairs(store))


def _repairs(store: PageStore) -> Iterator[Repair]:
    yield from _close_access(store.root)
    for namespace_id in store.namespace_ids():
        try:
            namespace = store.stored_namespace(namespace_id)
        except (Corrupt, NotFound) as error:
            yield from _set_aside_namespace(store.root, namespace_id.hex(), error)
            continue
        except TqStoreError:
            continue  # of a newer release
        ns = store.namespace(namespace)
        for spec in namespace.page_specs:
            yield from _mend_folder(store, ns, spec)
    yield from _set_aside_checkpoints(store.root)
    leftovers = plan_gc(store, GcOptions(grace_seconds=0)).leftovers
    if leftovers:
        report = sweep(store, GcPlan(GcOptions(), leftovers=leftovers))
        yield Repair(".", f"{report.leftovers_deleted} leftovers of dead writers deleted")


# Access


def _close_access(root: Folder) -> Iterator[Repair]:
    """What others may access becomes private again."""
    for finding in list(verify(root)):
        if finding.kind == "access":
            with _parent(root, finding.path) as (parent, name):
                _make_private(parent, name)
            yield Repair(finding.path, "made private again")


@contextlib.contextmanager
def _parent(root: Folder, path: str) -> Iterator[tuple[Folder, str]]:
    *above, name = path.split("/")
    with root.descend(*above) if above else root.duplicate() as parent:
        yield parent, name


def _make_private(parent: Folder, name: str) -> None:
    status = parent.status_of(name)
    if status is None:
        return
    is_folder = stat.S_ISDIR(status.st_mode)
    open_it: Callable[[int, str], int] = (
        parent.files.open_folder if is_folder else parent.files.open_file
    )
    try:
        fd = open_it(parent.fd, name)
        try:
            parent.files.chmod(fd, FOLDER_MODE if is_folder else FILE_MODE)
        finally:
            parent.files.close(fd)
    except OSError as error:
        raise failure(error, "making private", parent.path_of(name)) from error


# Setting aside


def _set_aside(root: Folder, path: tuple[str, ...], why: str) -> Repair:
    """Moves a file to quarantine/, both folders durable; under the exclusive lock."""
    flat = "+".join(path)
    with root.make_child(QUARANTINE) as aside, root.descend(*path[:-1]) as folder:
        for attempt in range(1000):
            target = flat if not attempt else f"{flat}+{attempt}"
            try:
                folder.files.link_to(folder.fd, path[-1], aside.fd, target)
            except FileExistsError:
                continue
            except OSError as error:
                raise failure(error, "setting aside", folder.path_of(path[-1])) from error
            aside.sync()
            folder.unlink(path[-1])
            folder.sync()
            return Repair("/".join(path), f"set aside as {QUARANTINE}/{target}: {why}")
    raise BackendFailed(f"no name is free for {flat} in {QUARANTINE}", doing="setting aside")


def _is_file(folder: Folder, name: str) -> bool:
    status = folder.status_of(name)
    return status is not None and is_regular(status)


def _set_aside_namespace(root: Folder, name: str, error: TqStoreError) -> Iterator[Repair]:
    """Only its description: the next save with the same settings writes the same again."""
    with exclusive_lock(root) as lock:
        lock.raise_generation()
        with root.descend(NAMESPACES, name) as own:
            is_there = own.status_of(NAMESPACE_FILE) is not None
        if is_there:
            yield _set_aside(root, (NAMESPACES, name, NAMESPACE_FILE), str(error))


def _set_aside_checkpoints(root: Folder) -> Iterator[Repair]:
    with root.child(SESSIONS) as parent:
        names = sorted(name for name in parent.names() if is_session_folder(name))
    for name in names:
        with contextlib.suppress(NotFound), root.descend(SESSIONS, name) as folder:
            for sequence in sessions.sequences(folder):
                if not _is_file(folder, checkpoint_name(sequence)):
                    continue  # a link: not for us to follow or move
                try:
                    sessions.read_checkpoint(folder, sequence)
                except Corrupt as error:
                    with exclusive_lock(root):
                        path = (SESSIONS, name, checkpoint_name(sequence))
                        yield _set_aside(root, path, error.what)
                except TqStoreError:
                    continue


# Packs


def _mend_folder(store: PageStore, ns: NamespaceStore, spec: PageSpec) -> Iterator[Repair]:
    path = (NAMESPACES, ns.folder_name, PAGES, spec.name)
    try:
        folder = store.root.descend(*path)
    except (NotFound, Corrupt):
        return
    with folder:
        names = [n for n in sorted(folder.names()) if pack_number(n) is not None]
        names = [name for name in names if _is_file(folder, name)]
        if names:
            yield from _mend_zarr(store.root, folder, path, spec)
        for name in names:
            fault = _fault_of(folder, name, ns, spec)
            if fault is not None:
                yield from _mend_pack(store, ns, spec, (*path, name), fault)


def _mend_zarr(
    root: Folder, folder: Folder, path: tuple[str, ...], spec: PageSpec
) -> Iterator[Repair]:
    """zarr.json follows from the page spec."""
    try:
        raw: bytes | None = folder.read(ZARR_FILE, _MAX_ZARR_NBYTES)
    except NotFound:
        raw = None
    except Corrupt:
        raw = b""
    if raw == zarr_metadata(spec):
        return
    with exclusive_lock(root):
        if raw is not None:
            yield _set_aside(root, (*path, ZARR_FILE), "does not describe these packs")
        ensure_file(folder, ZARR_FILE, zarr_metadata(spec), _MAX_ZARR_NBYTES)
    yield Repair("/".join((*path, ZARR_FILE)), "written anew")


def _fault_of(folder: Folder, name: str, ns: NamespaceStore, spec: PageSpec) -> str | None:
    try:
        for finding in verify_pack(folder, name, spec, ns.namespace, set()):
            if finding.severity == "error":
                return finding.what
    except Corrupt as error:
        return error.what
    except TqStoreError:
        return None  # gone, or of a newer release
    return None


def _mend_pack(
    store: PageStore, ns: NamespaceStore, spec: PageSpec, path: tuple[str, ...], fault: str
) -> Iterator[Repair]:
    number = pack_number(path[-1])
    assert number is not None, "a pack's name"
    index = ns.index(spec)
    with store.commit() as commit:
        index.refresh(is_forced=True)
        rescued = _sound_pages(store.root, path, ns, spec)
        keys = [k for k in rescued.records if sound_copy(ns, index, k, {number}) is None]
        if keys:
            rows = np.stack([rescued.records[key] for key in keys])
            commit.rewrite_pages(ns, spec, rescued.blocks, keys, rows)
    with exclusive_lock(store.root) as lock:
        lock.raise_generation()
        yield _set_aside(store.root, path, fault)
    index.forget([number])
    index.faults.pop(path[-1], None)
    lost = [k for k in rescued.lost if sound_copy(ns, index, k, set()) is None]
    if lost:
        blocks: dict[bytes, tombstones.Reason] = {block: "corrupt" for _, block in lost}
        tombstones.write_gone(store.root, blocks, {})
    yield Repair("/".join(path), f"{len(keys)} good pages of it written into a new pack")


@dataclass(frozen=True)
class _Rescued:
    blocks: list[BlockRecord]
    records: dict[PageKey, npt.NDArray[np.uint8]]
    lost: list[PageKey]


def _sound_pages(
    root: Folder, path: tuple[str, ...], ns: NamespaceStore, spec: PageSpec
) -> _Rescued:
    """The pages of a damaged pack that can be used, as far as its header can be read."""
    layout, name = PackLayout.of(spec), path[-1]
    with root.descend(*path[:-1]) as folder, folder.reading(name) as (fd, file_nbytes):
        try:
            head = folder.read_range(name, fd, 0, min(FRAME_NBYTES, file_nbytes))
            nbytes = min(pack_header_nbytes(head, spec, name), file_nbytes)
            header = PackHeader.decode(folder.read_range(name, fd, 0, nbytes), spec, name)
        except TqStoreError:
            return _Rescued([], {}, [])
        blocks = [header.block(i, ns.id) for i in range(header.num_blocks)]
        genuine = {b.hash for b in blocks if block_hash(b.parent, b.token_bytes) == b.hash}
        rescued = _Rescued([b for b in blocks if b.hash in genuine], {}, [])
        for slot, (layer, block) in enumerate(header.page_keys):
            record = b""
            at = layout.first_slot(nbytes) + slot * layout.stride
            if at + layout.page_nbytes + 4 <= file_nbytes:
                # One by one: a chunk of an encrypted file that is damaged costs only its pages.
                with contextlib.suppress(Corrupt):
                    record = folder.read_range(name, fd, at, layout.page_nbytes + 4)
            if block in genuine and _is_sound(record, ns, spec, layout, (layer, block)):
                rescued.records[layer, block] = np.frombuffer(record, np.uint8, layout.page_nbytes)
            else:
                rescued.lost.append((layer, block))
    return rescued


def _is_sound(
    record: bytes, ns: NamespaceStore, spec: PageSpec, layout: PackLayout, key: PageKey
) -> bool:
    layers = ns.namespace.layers
    if len(record) != layout.page_nbytes + 4 or key[0] >= len(layers) or layers[key[0]] != spec:
        return False
    return page_fault(record, spec, layout, key) is None
