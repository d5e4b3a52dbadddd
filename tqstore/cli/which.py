"""Which namespace somebody means."""

from __future__ import annotations

from tqstore.errors import InvalidInput, NotFound
from tqstore.store.page_store import PageStore


def find_namespace(store: PageStore, prefix: str) -> bytes:
    """The id of the one namespace whose hex begins so; NotFound, or InvalidInput if several do."""
    found = [i for i in store.namespace_ids() if i.hex().startswith(prefix.lower())]
    if not found or not prefix:
        raise NotFound(
            f"no namespace begins with {prefix!r}", remedy="`tqstore stats` lists the namespaces"
        )
    if len(found) > 1:
        raise InvalidInput(f"{len(found)} namespaces begin with {prefix!r}", remedy="Give more")
    return found[0]
