"""What a store holds, gathered for `ls`: sessions with their shares of the bytes, and packs.

Owns who needs which page; reads checkpoint summaries and pack headers, never a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tqstore.cli.opening import opened_root
from tqstore.errors import TqStoreError
from tqstore.format.namespace import Namespace
from tqstore.spec import PageSpec
from tqstore.store.names import pack_name, session_folder
from tqstore.store.page_store import PageStore
from tqstore.store.records import NamespaceInfo, SessionInfo
from tqstore.store.references import Masks, masks_nbytes, needed_masks
from tqstore.store.root import NAMESPACES, PAGES, SESSIONS
from tqstore.store.sessions import read_summary
from tqstore.store.usage import folder_nbytes


@dataclass(frozen=True)
class ListedSession:
    """A session of `ls`.  `own_nbytes`: its checkpoint and the pages no other session needs;
    `shared_nbytes`: the pages that others need too.  Pages count with their padding."""

    info: SessionInfo
    namespace: Namespace | None
    own_nbytes: int = 0
    shared_nbytes: int = 0


@dataclass(frozen=True)
class ListedPack:
    """A pack of `ls --packs`; `problem` if its header cannot be read, numbers are 0 then."""

    path: str
    namespace_id: bytes
    spec: PageSpec
    num_pages: int = 0
    nbytes: int = 0
    created_ns: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Catalog:
    nbytes: int
    sessions: list[ListedSession]
    namespaces: list[NamespaceInfo]


def read_catalog(store: PageStore) -> Catalog:
    namespaces = store.namespaces()
    by_id = {info.id: info.namespace for info in namespaces}
    sessions = store.sessions()
    needs = _all_needs(store, sessions)
    shared = _shared(list(needs.values()))
    with opened_root(store) as root:
        nbytes = folder_nbytes(root)
    listed = [
        _listed(info, by_id.get(info.namespace_id), needs.get(info.name), shared)
        for info in sessions
    ]
    return Catalog(nbytes, listed, namespaces)


def codecs_of(specs: Sequence[PageSpec]) -> str:
    """`prod4/int8`, or with the number of layers where they differ: `exact/exact x2, ...`."""
    counts = Counter(f"{spec.keys}/{spec.values}" for spec in specs)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{codecs} x{count}" for codecs, count in counts.items())


def _all_needs(store: PageStore, sessions: Sequence[SessionInfo]) -> dict[str, Masks]:
    needs: dict[str, Masks] = {}
    with opened_root(store) as root, root.child(SESSIONS) as parent:
        for info in sessions:
            if info.problem is not None:
                continue
            try:
                with parent.child(session_folder(info.name)) as folder:
                    needs[info.name] = needed_masks(read_summary(folder, info.sequence)[0])
            except TqStoreError:
                continue  # removed or pruned since it was listed
    return needs


def _shared(needs: Sequence[Masks]) -> Masks:
    """The pages that at least two sessions need."""
    once: Masks = {}
    twice: Masks = {}
    for masks in needs:
        for block, mask in masks.items():
            before = once.get(block, 0)
            if before & mask:
                twice[block] = twice.get(block, 0) | before & mask
            once[block] = before | mask
    return twice


def _listed(
    info: SessionInfo, namespace: Namespace | None, needs: Masks | None, shared: Masks
) -> ListedSession:
    if namespace is None or needs is None:
        return ListedSession(info, namespace, own_nbytes=info.nbytes)
    common = {block: mask & shared.get(block, 0) for block, mask in needs.items()}
    shared_nbytes = masks_nbytes(namespace, common)
    own_nbytes = info.nbytes + masks_nbytes(namespace, needs) - shared_nbytes
    return ListedSession(info, namespace, own_nbytes, shared_nbytes)


def read_packs(store: PageStore) -> Iterator[ListedPack]:
    """Every pack of every readable namespace, oldest first in each folder."""
    for info in store.namespaces():
        if info.namespace is None:
            continue
        ns = store.namespace(info.namespace)
        for index in ns.indexes:
            index.refresh()
            folder = PurePath(NAMESPACES, ns.folder_name, PAGES, index.spec.name)
            for number in sorted(index.numbers):
                entry = index.entry(number)
                if entry is None:
                    continue
                layout = index.layout
                nbytes = entry.first_slot + entry.num_pages * layout.stride + layout.index_nbytes
                path = str(folder / pack_name(number))
                yield ListedPack(path, ns.id, index.spec, entry.num_pages, nbytes, number * 1000)
            for name, error in sorted(index.faults.items()):
                yield ListedPack(str(folder / name), ns.id, index.spec, problem=str(error))
