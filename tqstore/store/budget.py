"""One budget for everything a store holds: packs, checkpoints, temporaries, what was set aside.

Owns the check before each write, and making writers that share a budget take turns between check
and write, so that together they don't exceed it.  What is deleted to make room is `eviction`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tqstore.errors import StoreFull
from tqstore.spec import check_int
from tqstore.store.files import failure
from tqstore.store.folder import Folder
from tqstore.store.root import NAMESPACES, SESSIONS
from tqstore.store.usage import Usage

# After a store was full it is emptied to this share, so that not every write has to evict.
LOW_WATERMARK = 0.9


class Budget:
    """`max_bytes` of the store and `namespace_max_bytes` of each namespace; None for no limit."""

    def __init__(
        self, root: Folder, max_bytes: int | None, namespace_max_bytes: int | None
    ) -> None:
        for name, limit in (
            ("max_bytes", max_bytes),
            ("namespace_max_bytes", namespace_max_bytes),
        ):
            if limit is not None:
                check_int(name, limit, 1)
        self.max_bytes = max_bytes
        self.namespace_max_bytes = namespace_max_bytes
        self.usage = Usage(root)
        self._root = root

    @property
    def is_limited(self) -> bool:
        return self.max_bytes is not None or self.namespace_max_bytes is not None

    def excess(self, nbytes: int, namespace: str = "") -> int:
        """Bytes that must go before `nbytes` more fit; 0 if they do.  `namespace`: its folder."""
        if not self.is_limited:
            return 0
        over = 0
        nbytes = self._root.files.stored_nbytes(nbytes) if nbytes else 0
        used = self.usage.total()
        if self.max_bytes is not None:
            over = used + nbytes - self.max_bytes
        if self.namespace_max_bytes is not None and namespace:
            own = self.usage.below(NAMESPACES, namespace)
            over = max(over, own + nbytes - self.namespace_max_bytes)
        return max(0, over)

    def to_free(self, nbytes: int, namespace: str = "") -> int:
        """Bytes to free so that `nbytes` fit: down to the low watermark."""
        excess = self.excess(nbytes, namespace)
        if not excess or self.max_bytes is None:
            return excess
        target = min(self.max_bytes - nbytes, int(self.max_bytes * LOW_WATERMARK))
        return max(excess, self.usage.total() - max(0, target))

    @contextlib.contextmanager
    def reserving(self, nbytes: int, doing: str, namespace: str = "") -> Iterator[None]:
        """Inside, `nbytes` may be written.  StoreFull if they would exceed the budget."""
        if not self.is_limited:
            yield
            return
        with self._turn():
            if self.excess(nbytes, namespace):
                raise self._full(nbytes, doing, namespace)
            yield

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """An own description of sessions/, locked: nothing else locks it."""
        with self._root.child(SESSIONS) as turn:
            try:
                turn.files.lock_exclusive(turn.fd, wait=True)
            except OSError as error:
                raise failure(error, "waiting for other writers", turn.path) from error
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    turn.files.unlock(turn.fd)

    def _full(self, nbytes: int, doing: str, namespace: str) -> StoreFull:
        if self.max_bytes is not None and self.usage.total() + nbytes > self.max_bytes:
            whose, used, limit = "the store's", self.usage.total(), self.max_bytes
        else:
            whose, used = "the namespace's", self.usage.below(NAMESPACES, namespace)
            limit = self.namespace_max_bytes or 0
        return StoreFull(
            f"{nbytes} bytes more would exceed {whose} budget: {used} of {limit} are used, "
            "and nothing of it may be evicted",
            doing=doing,
            remedy="Remove sessions (`tqstore rm`), give them a ttl, or raise max_bytes; nothing "
            "was published",
        )
