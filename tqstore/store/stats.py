"""What a store holds, and how much of it is garbage: figures for people and for monitoring."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tqstore.errors import TqStoreError
from tqstore.store.gc_plan import GcOptions, NamespaceUse, plan_gc
from tqstore.store.history import history_nbytes
from tqstore.store.paging_figures import SessionPaging, of_sessions, summed
from tqstore.store.root import NAMESPACES, QUARANTINE, SESSIONS
from tqstore.store.tombstones import read_gone
from tqstore.store.usage import Usage

if TYPE_CHECKING:
    from tqstore.store.page_store import PageStore


@dataclass(frozen=True)
class StoreStats:
    """All in bytes but the counts.

    `garbage_nbytes` is what gc could free now with no grace, `collectable_nbytes` with the usual
    one.  `history_nbytes` are pages of windowed layers that no session needs to go on, kept so that
    it can go back to any block.  `counters` are those of this process since it opened the store.
    `sessions` has what each session's pool of hot pages did, as of the session's last save;
    `paging` are the sums over pools.
    """

    nbytes: int
    max_bytes: int | None
    pack_nbytes: int
    checkpoint_nbytes: int
    quarantine_nbytes: int
    garbage_nbytes: int
    collectable_nbytes: int
    history_nbytes: int
    num_sessions: int
    num_packs: int
    num_pages: int
    num_blocks_gone: int
    namespaces: tuple[NamespaceUse, ...]
    problems: tuple[str, ...]
    counters: dict[str, Any]
    paging: dict[str, int]
    sessions: tuple[SessionPaging, ...]


def read_stats(store: PageStore) -> StoreStats:
    """Raises Incompatible if a checkpoint is of a newer format."""
    usage = Usage(store.root)
    nbytes = usage.total()
    garbage = plan_gc(store, GcOptions(grace_seconds=0, drops_quarantine=True))
    collectable = plan_gc(store)
    listed = store.sessions()
    pools = of_sessions(listed)
    num_packs = num_pages = 0
    for namespace_id in store.namespace_ids():
        try:
            ns = store.namespace(store.stored_namespace(namespace_id))
        except TqStoreError:
            continue
        for index in ns.indexes:
            num_packs += len(index.numbers)
            num_pages += index.num_pages
    return StoreStats(
        nbytes=nbytes,
        max_bytes=store.budget.max_bytes,
        pack_nbytes=usage.below(NAMESPACES),
        checkpoint_nbytes=usage.below(SESSIONS),
        quarantine_nbytes=usage.below(QUARANTINE),
        garbage_nbytes=garbage.freed_nbytes,
        collectable_nbytes=collectable.freed_nbytes,
        history_nbytes=history_nbytes(store),
        num_sessions=len(listed),
        num_packs=num_packs,
        num_pages=num_pages,
        num_blocks_gone=len(read_gone(store.root).blocks),
        namespaces=collectable.namespaces,
        problems=collectable.problems,
        counters=asdict(store.counters),
        paging=summed(pools),
        sessions=pools,
    )
