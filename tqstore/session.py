"""The store as callers see it: save a cache under a name, resume it, find stored prefixes.

Owns the joining of the durable half (store/) with caches in memory.  mlx is imported only where a
cache is made, so that listing and verifying work without it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tqstore.errors import BackendFailed, InvalidInput, NotFound, StoreFull, TqStoreError
from tqstore.format.block_hash import Tokens, as_tokens, chain_blocks
from tqstore.format.namespace import Namespace
from tqstore.spec import CacheSpec, check_int
from tqstore.store.page_store import NamespaceStore, PageStore

if TYPE_CHECKING:
    from tqstore.kv_cache import KVCache
    from tqstore.paging.pager import Pager
    from tqstore.resuming import Match, Resumed
    from tqstore.saved_state import NamedState
    from tqstore.store.gc_plan import GcOptions
    from tqstore.store.gc_sweep import GcReport
    from tqstore.store.misses import Miss
    from tqstore.store.page_store import SessionInfo
    from tqstore.store.purge import PurgeReport
    from tqstore.store.stats import StoreStats
    from tqstore.store.verify import Finding
    from tqstore.transcode import TranscodeReport

_MAX_TTL_SECONDS = 1e9  # some thirty years


@dataclass(frozen=True)
class SaveReport:
    """What a save did.  `nbytes_written` counts pages and the checkpoint."""

    sequence: int
    num_tokens: int
    new_pages: int
    nbytes_written: int


class Store:
    """Sessions and shared pages in one folder.  Several processes may use it at once.

    Caches it makes belong to the calling thread; those of one namespace share their hot pages.

    >>> import tempfile, tqstore
    >>> store = tqstore.Store.open(tempfile.mkdtemp() + "/store")
    >>> spec = tqstore.CacheSpec([tqstore.LayerSpec(kv_heads=1, head_dim=64)])
    >>> cache = store.new_cache(spec, model="0" * 64)
    >>> store.save("empty", cache, []).num_tokens
    0
    >>> [info.name for info in store.sessions()]
    ['empty']
    """

    def __init__(self, pages: PageStore) -> None:
        self.pages = pages
        self._pagers: weakref.WeakValueDictionary[tuple[object, ...], Pager] = (
            weakref.WeakValueDictionary()
        )

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        max_bytes: int | None = None,
        namespace_max_bytes: int | None = None,
        key: bytes | None = None,
        mode: Literal["a", "r"] = "a",
    ) -> Store:
        """Opens a store, and makes it with mode "a".

        `path` None is $TQSTORE_HOME or else the user's data folder.  `max_bytes` bounds everything
        in it, `namespace_max_bytes` what is stored for each model and spec: what may go is evicted
        (docs/concurrency.md), and what then still does not fit is refused with StoreFull.  `key`,
        32 bytes or else the environment's, is that of an encrypted store (docs/security.md).
        """
        opened = PageStore.open(
            path,
            mode=mode,
            max_bytes=max_bytes,
            namespace_max_bytes=namespace_max_bytes,
            key=key,
        )
        return cls(opened)

    def close(self) -> None:
        """Waits for pages that are being written, then closes every descriptor.

        Writes nothing of its own: sealed pages that no save or spill has written, and tails, are
        gone with their caches (`save` is the promise).  Raises StoreFull or BackendFailed, after
        all is closed, if pages that were to be written in the background are not; every
        checkpoint is whole then, too.
        """
        failed: list[tuple[Exception, int]] = []
        try:
            for pager in list(self._pagers.values()):
                pager.spilling.drain()
                pager.reap()
                error, num_unsaved = pager.spilling.take_error(), pager.spilling.num_unsaved
                if error is not None and num_unsaved:
                    failed.append((error, num_unsaved))
        finally:
            self.pages.close()
        if failed:
            raise _not_written(failed) from failed[0][0]

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except TqStoreError as problem:
            if error is None:
                raise
            error.add_note(str(problem))  # what ended the block is told, not what came of it

    @property
    def path(self) -> Path:
        return self.pages.path

    def sessions(self) -> list[SessionInfo]:
        return self.pages.sessions()

    def remove(self, name: str) -> None:
        """Forgets a session; its pages stay until they are collected."""
        self.pages.remove(name)

    def purge(self, name: str) -> PurgeReport:
        """Removes a session and, at once and for good, every page that no other session holds.

        Says which sessions still hold some of its blocks.  NotFound if there is no such session.
        """
        return self.pages.purge(name)

    def gc(self, options: GcOptions | None = None) -> GcReport:
        """Deletes what no session needs and sessions at their end, beside running processes."""
        return self.pages.gc(options)

    def stats(self) -> StoreStats:
        """What the store holds, what of it is garbage, and what this process did with it."""
        return self.pages.stats()

    def why_miss(
        self,
        tokens: Tokens,
        *,
        spec: CacheSpec,
        model: str,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
    ) -> Miss:
        """Why `match` finds no longer prefix of these tokens; its kind is "hit" if it finds all."""
        from tqstore.resuming import why

        pages = self.pages.namespace(self.namespace(spec, model, parts, tenant_salt))
        told = as_tokens(tokens)
        records = chain_blocks(pages.id, told[: max(0, len(told) - 1)], spec.page_tokens)
        return why(pages, spec, [record.hash for record in records], records[:1])

    def verify(self) -> Iterator[Finding]:
        """Every fault found, as it is found."""
        return self.pages.verify()

    def namespace(
        self,
        spec: CacheSpec,
        model: str,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
    ) -> Namespace:
        if not isinstance(spec, CacheSpec):
            raise InvalidInput(f"spec must be a CacheSpec, not {spec!r}")
        return Namespace.of(
            model, spec.page_specs, seed=spec.seed, parts=parts, tenant_salt=tenant_salt
        )

    def new_cache(
        self,
        spec: CacheSpec,
        *,
        model: str,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
        memory_budget: int | None = None,
        check_finite: bool = True,
    ) -> KVCache:
        """An empty cache whose pages may be shared with all of the same `model` and `spec`.

        `model` is its fingerprint in hex (tqstore.mlx_lm.fingerprint computes one); `parts` are
        readable digests of what went into it.
        """
        pages = self.pages.namespace(self.namespace(spec, model, parts, tenant_salt))
        return self._cache(spec, pages, memory_budget, check_finite)

    def save(
        self,
        name: str,
        cache: KVCache,
        tokens: Tokens,
        *,
        states: Sequence[NamedState] = (),
        metadata: Mapping[str, Any] | None = None,
        ttl: float | None = None,
    ) -> SaveReport:
        """Makes `cache`, which holds exactly `tokens`, the newest checkpoint of session `name`.

        The session stays until it is removed, or with `ttl` for so many seconds: from then on gc
        may take it.  Each save says anew.
        Returns once it is durable.  Only pages that are not stored yet are written.  On any error
        the session's previous checkpoint stands.  Raises InvalidInput for wrong tokens, numbers
        that are not finite or a cache of no store or another one, StoreFull, BackendFailed.
        """
        from tqstore.saved_state import require_in_step, to_checkpoint

        _check_cache(cache, name)
        if cache.pager.pages is None or cache.pager.pages.store is not self.pages:
            raise InvalidInput(
                "the cache does not belong to this store",
                doing=f"saving session {name!r}",
                remedy="Make it with store.new_cache, resume or match",
            )
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidInput(f"metadata must be a mapping, not {metadata!r}")
        _check_ttl(ttl)
        told = as_tokens(tokens)
        require_in_step(cache, told)
        cache.chain.confirm(told)
        cache.pager.spilling.drain()  # before the commit: what it waits for may wait for gc
        cache.expire()  # between steps no query is left for it: without history it is not written
        with self.pages.commit() as commit:
            cache.spill(commit)
            checkpoint = to_checkpoint(cache, told, states, metadata, ttl)
            try:
                sequence = commit.publish(name, checkpoint)
            except NotFound:
                # gc took pages that no session needed; those still in memory are written again.
                if not cache.mark_lost():
                    raise
                cache.spill(commit)
                sequence = commit.publish(name, checkpoint)
        cache.expire()
        return SaveReport(sequence, cache.num_tokens, commit.new_pages, commit.nbytes_written)

    def convert(
        self,
        name: str,
        *,
        keys: str | None = None,
        values: str | None = None,
        to: str | None = None,
        on_pages: Callable[[int, int], object] | None = None,
    ) -> TranscodeReport:
        """Session `name` in other codecs, as its newest checkpoint or as the new session `to`.

        `on_pages(done, total)` is called as pages are written.  See `tqstore.transcode.transcode`.
        """
        from tqstore.transcode import transcode

        return transcode(self.pages, name, keys=keys, values=values, to=to, on_pages=on_pages)

    def resume(
        self,
        name: str,
        *,
        spec: CacheSpec | None = None,
        model: str | None = None,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
        memory_budget: int | None = None,
        check_finite: bool = True,
    ) -> Resumed:
        """The session's newest valid checkpoint as a cache; its pages are read when first needed.

        Give `spec` and `model` to be sure that they are those it was saved with: Incompatible names
        the first field that differs.  Without them those it was saved with are taken.
        Raises NotFound if there is no such session.
        """
        from tqstore.resuming import spec_of, take_up

        checkpoint = self.pages.latest(name)
        stored = self.pages.stored_namespace(checkpoint.namespace_id)
        spec = spec_of(stored, checkpoint) if spec is None else spec
        if model is not None:
            given = self.namespace(spec, model, parts, tenant_salt)
        else:
            given = replace(stored, layers=spec.page_specs, seed=spec.seed)
        stored.check_same(given, doing=f"resuming session {name!r}")
        pages = self.pages.namespace(stored)
        cache = self._cache(spec, pages, memory_budget, check_finite)
        resumed = take_up(cache, checkpoint)
        pages.note_use(checkpoint.block_hashes)
        self.pages.note_use(name)
        return resumed

    def match(
        self,
        tokens: Tokens,
        *,
        spec: CacheSpec,
        model: str,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
        memory_budget: int | None = None,
        check_finite: bool = True,
    ) -> Match:
        """The longest prefix of `tokens`, in whole blocks, whose pages any session has stored.

        At least one token is left over for the model to be fed.
        """
        from tqstore.paging.block_chain import Block
        from tqstore.resuming import Match, longest, why
        from tqstore.saved_state import fill_cold

        pages = self.pages.namespace(self.namespace(spec, model, parts, tenant_salt))
        told = as_tokens(tokens)
        records = chain_blocks(pages.id, told[: max(0, len(told) - 1)], spec.page_tokens)
        hashes = [record.hash for record in records]
        num_blocks = longest(pages, spec, hashes)
        reason = ""
        if num_blocks < len(records) or not records:
            reason = str(why(pages, spec, hashes, records[:1]))
        if not num_blocks:
            return Match(0, None, reason)
        pages.note_use(hashes[:num_blocks])
        cache = self._cache(spec, pages, memory_budget, check_finite)
        fill_cold(cache, [Block(record.hash, record) for record in records[:num_blocks]])
        return Match(cache.num_tokens, cache, reason)

    def _cache(
        self,
        spec: CacheSpec,
        pages: NamespaceStore,
        memory_budget: int | None,
        check_finite: bool,
    ) -> KVCache:
        """A cache on the pager that this thread's caches of the namespace share."""
        from tqstore.kv_cache import KVCache, new_pool
        from tqstore.paging.pager import Pager

        if memory_budget is not None:
            check_int("memory_budget", memory_budget, 1)
        key = (pages.id, memory_budget, threading.get_ident())
        pager = self._pagers.get(key)
        if pager is None:
            pager = Pager(new_pool(spec, memory_budget), pages)
            self._pagers[key] = pager
        return KVCache(spec, pager=pager, check_finite=check_finite)


def _check_cache(cache: object, name: str) -> None:
    from tqstore.kv_cache import KVCache

    if isinstance(cache, KVCache):
        return
    remedy = "Give its .cache" if isinstance(getattr(cache, "cache", None), KVCache) else ""
    raise InvalidInput(
        f"cache must be a KVCache, not a {type(cache).__name__}",
        doing=f"saving session {name!r}",
        remedy=remedy,
    )


def _check_ttl(ttl: object) -> None:
    is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is not None and not (is_number and 0 < ttl < _MAX_TTL_SECONDS):  # type: ignore[operator]
        raise InvalidInput(f"ttl must be a positive number of seconds, not {ttl!r}")


def _not_written(failed: Sequence[tuple[Exception, int]]) -> TqStoreError:
    """One error for all pagers' failed spills: (the last error, pages only in memory) of each."""
    kind = StoreFull if isinstance(failed[0][0], StoreFull) else BackendFailed
    return kind(
        "pages could not be written in the background "
        f"({'; '.join(str(each) for each, _ in failed)}), and {sum(n for _, n in failed)} sealed "
        "pages were in memory only",
        doing="closing the store",
        remedy="It is closed, and what was saved is whole; what was appended since is not stored",
    )
