"""What it costs to keep pages of windowed layers that left the window.

Reads checkpoint summaries and pack headers only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqstore.errors import TqStoreError
from tqstore.store.namespace_store import NamespaceStore
from tqstore.store.references import Masks, References, masks_nbytes

if TYPE_CHECKING:
    from tqstore.store.page_store import PageStore


def history_nbytes(store: PageStore) -> int:
    """Bytes in packs of pages that some session's past needs and no session's resume does.

    Each page once, padding included.  Raises Incompatible if a checkpoint is of a newer format.
    """
    with_history = References(store.root, keeps_history=True)
    without = References(store.root, keeps_history=False)
    total = 0
    for namespace_id in store.namespace_ids():
        needed = without.needs(namespace_id)
        history = {
            block: rest
            for block, mask in with_history.needs(namespace_id).items()
            if (rest := mask & ~needed.get(block, 0))
        }
        if not history:
            continue
        try:
            ns = store.namespace(store.stored_namespace(namespace_id))
        except TqStoreError:
            continue  # unreadable: stats tells of it
        total += _stored_nbytes(ns, history)
    return total


def _stored_nbytes(ns: NamespaceStore, masks: Masks) -> int:
    """Bytes that those pages of `masks` take which are in packs."""
    stored: Masks = {}
    for index in ns.indexes:
        index.refresh()
        for block, mask in masks.items():
            stored[block] = stored.get(block, 0) | mask & index.layers_of(block)
    return masks_nbytes(ns.namespace, stored)
