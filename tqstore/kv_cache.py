"""The paged, packed KV cache of one sequence.

Owns the layers and keeps them in step; knows the sequence's tokens as far as it was told.  Saving
and resuming is the session's; an mlx-lm model talks to it through tqstore.mlx_lm.
"""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from tqstore.errors import InvalidInput
from tqstore.format.block_hash import Tokens
from tqstore.layer_cache import LayerCache
from tqstore.paging.block_chain import BlockChain
from tqstore.paging.holdings import Holding
from tqstore.paging.hot_pool import HotPool
from tqstore.paging.memory import default_budget, process_nbytes
from tqstore.paging.pager import Pager
from tqstore.spec import CacheSpec, LayerSpec

if TYPE_CHECKING:
    from tqstore.store.page_store import Commit, NamespaceStore

_ROOT_OF_UNSTORED = b"\0" * 32


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds and what it did.  Bytes are true: what is held, side data included.

    The pool's figures are of all caches that share it: `hot_nbytes` of memory, `used_nbytes` of it
    pages in use, within `budget_nbytes`.  `process_nbytes` and `mlx_nbytes` are measured.
    `history_nbytes` are pages of this cache that left their layer's window and are kept, so that
    it can go back to any block; `hot_history_nbytes` of them are still in memory.
    """

    num_tokens: int
    num_blocks: int
    hot_nbytes: int
    used_nbytes: int
    budget_nbytes: int
    tail_nbytes: int
    table_nbytes: int
    dense_nbytes: int
    history_nbytes: int
    hot_history_nbytes: int
    process_nbytes: int
    mlx_nbytes: int
    paging: dict[str, int]

    @property
    def nbytes(self) -> int:
        return self.hot_nbytes + self.tail_nbytes + self.table_nbytes


class KVCache:
    """Keys and values of all paged layers of one sequence.

    Arrays are [heads, tokens, head_dim].  State is a function of what was appended, whatever the
    split into calls.  One thread at a time; forks share pages and must stay on the same thread.

    >>> import mlx.core as mx
    >>> from tqstore import CacheSpec, KVCache, LayerSpec
    >>> cache = KVCache(CacheSpec([LayerSpec(kv_heads=2, head_dim=64)]))
    >>> keys = mx.random.normal((2, 200, 64)).astype(mx.float16)
    >>> cache.append(0, keys, keys)
    >>> cache.attend(0, mx.random.normal((4, 1, 64))).shape
    (4, 1, 64)
    """

    def __init__(
        self,
        spec: CacheSpec,
        store: NamespaceStore | None = None,
        memory_budget: int | None = None,
        *,
        pager: Pager | None = None,
        chain: BlockChain | None = None,
        check_finite: bool = True,
    ) -> None:
        """`memory_budget` bounds the bytes of hot pages; None is half of the available memory.

        `check_finite` looks for inf and NaN on every append, which waits for the arrays; without
        it they are found when their block is sealed or saved.
        """
        self.spec = spec
        self.check_finite = check_finite
        self.pager = pager or Pager(new_pool(spec, memory_budget), store)
        root = _ROOT_OF_UNSTORED if self.pager.pages is None else self.pager.pages.id
        self.chain = chain or BlockChain(root, spec.page_tokens)
        self.layers = [
            LayerCache(
                index,
                layer,
                page_spec,
                self.pager,
                self.chain,
                recent_tokens=spec.recent_tokens,
                seed=spec.seed,
                keep_history=spec.window_history and self.pager.pages is not None,
            )
            for index, (layer, page_spec) in enumerate(
                zip(spec.layers, spec.page_specs, strict=True)
            )
        ]
        self._release_when_gone()

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds."""
        return min(layer.num_tokens for layer in self.layers)

    @property
    def num_sealed_blocks(self) -> int:
        """Blocks that every layer has sealed."""
        return min(len(layer.table) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: hot pages (shared ones included), tails and tables."""
        return self.stats.nbytes

    @property
    def stats(self) -> CacheStats:
        pool = self.pager.pool
        history = [layer.history_nbytes() for layer in self.layers]
        return CacheStats(
            num_tokens=self.num_tokens,
            num_blocks=self.num_sealed_blocks,
            hot_nbytes=pool.allocated_nbytes,
            used_nbytes=pool.used_nbytes,
            budget_nbytes=pool.budget_nbytes,
            tail_nbytes=sum(layer.tail.nbytes for layer in self.layers),
            table_nbytes=sum(layer.table.nbytes for layer in self.layers),
            dense_nbytes=sum(
                page.dense_nbytes * layer.num_tokens // page.page_tokens
                for page, layer in zip(self.spec.page_specs, self.layers, strict=True)
            ),
            history_nbytes=sum(kept for kept, _ in history),
            hot_history_nbytes=sum(hot for _, hot in history),
            process_nbytes=process_nbytes(),
            mlx_nbytes=mx.get_active_memory(),
            paging=asdict(self.pager.stats),
        )

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Adds n tokens to one layer: keys [kv_heads, n, head_dim], values [.., value_dim].

        InvalidInput for wrong shapes, dtypes or non-finite numbers; nothing is changed then.
        """
        self._layer(layer).append(keys, values, check_finite=self.check_finite)

    def append_and_fetch(
        self, layer: int, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Appends and returns all keys and values that the new tokens' queries may see, dense.

        [kv_heads, visible, dim] in temporal order, the new ones exact.  Windowed layers return
        sinks and window only.
        """
        seen = self._layer(layer).append_and_fetch(keys, values)
        return seen.keys, seen.values

    def attend(
        self,
        layer: int,
        queries: mx.array,
        scale: float | None = None,
        sink_logits: mx.array | None = None,
    ) -> mx.array:
        """Attention of queries [query_heads, n, head_dim] at the last n positions.

        Causal among themselves; `scale` defaults to 1/sqrt(head_dim).  Query heads are grouped
        onto key heads in order.  `sink_logits` [query_heads], where a model has learned them, take
        a share of every query's weight.  Returns [query_heads, n, value_dim] in the queries' dtype.
        """
        return self._layer(layer).attend(queries, scale, sink_logits)

    def get_keys(self, layer: int) -> mx.array:
        """All keys of a layer, decoded, [kv_heads, tokens, head_dim] in the model's dtype."""
        return self._layer(layer).fetch().keys

    def get_values(self, layer: int) -> mx.array:
        """All values of a layer, decoded, [kv_heads, tokens, value_dim] in the model's dtype."""
        return self._layer(layer).fetch().values

    def can_trim(self, num_tokens: int) -> bool:
        """Whether the last `num_tokens` tokens can be taken back."""
        return 0 <= num_tokens <= self.num_tokens and all(
            layer.can_trim_to(self.num_tokens - num_tokens) for layer in self.layers
        )

    def trim(self, num_tokens: int) -> int:
        """Takes back the last `num_tokens` tokens of every layer and returns that number.

        A trim that ends inside a sealed page re-opens it as decoded values (counted in `stats`).
        Raises and changes nothing if a windowed layer no longer has the pages.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise InvalidInput(f"cannot trim {num_tokens} of {self.num_tokens} tokens")
        self.trim_to(self.num_tokens - num_tokens)
        return num_tokens

    def trim_to(self, length: int) -> None:
        """Keeps the first `length` tokens of every layer."""
        tails = [layer.reopened(length) for layer in self.layers]
        try:
            for layer, tail in zip(self.layers, tails, strict=True):
                layer.trim(length, tail)
        finally:  # names go with the pages, also of an interrupted trim
            self._truncate_chain()

    def trim_layer(self, layer: int, num_tokens: int) -> None:
        """Takes back tokens of one layer; the caller does the same for the others."""
        target = self._layer(layer)
        if not 0 <= num_tokens <= target.num_tokens:
            raise InvalidInput(f"cannot trim {num_tokens} of {target.num_tokens} tokens")
        length = target.num_tokens - num_tokens
        target.trim(length, target.reopened(length))
        self._truncate_chain()

    def _truncate_chain(self) -> None:
        self.chain.truncate(
            max(len(layer.table) for layer in self.layers),
            max(layer.num_tokens for layer in self.layers),
        )

    def tell(self, tokens: Tokens, start: int = 0) -> None:
        """Tells the sequence's tokens from position `start` on; they may run ahead of the cache.

        Only blocks whose tokens are known can be stored, hence dropped from memory under a budget
        before the cache is saved.  They are stored under these tokens' names: tell the truth.
        Raises InvalidInput where they contradict what is known, or leave a gap.
        """
        self.chain.tell(tokens, start)

    @property
    def num_told(self) -> int:
        """Tokens told from the start that still hold: a trim forgets those beyond it."""
        return self.chain.num_told

    def pin(self) -> None:
        """Keeps the hot pages of this sequence in memory until `unpin`, whatever the budget.

        Counted: pages pinned by several sequences stay until all have unpinned them, or are gone.
        """
        self.restore()
        for layer in self.layers:
            layer.pin()

    def unpin(self) -> None:
        """Undoes one `pin`."""
        for layer in self.layers:
            layer.unpin()

    def flush(self) -> None:
        """Waits until no page is being written.  Raises what made a background write fail."""
        self.pager.spilling.drain()
        if (error := self.pager.spilling.take_error()) is not None:
            raise error

    def spill(self, commit: Commit) -> None:
        """Writes every sealed page that is not durable yet; all sealed blocks must be named."""
        num_blocks = self.num_sealed_blocks
        assert self.chain.num_named >= num_blocks, "blocks are named before they are written"
        tables = [layer.table for layer in self.layers]
        self.pager.spilling.write_all(commit, tables, num_blocks)

    def mark_lost(self) -> bool:
        """Counts hot pages that the store has lost as unsaved again; True if there were any."""
        tables = [layer.table for layer in self.layers]
        blocks = self.chain.blocks(0, len(self.chain))
        return self.pager.spilling.mark_lost(tables, blocks)

    def expire(self) -> None:
        """Drops pages that left their layers' windows and may be dropped."""
        for layer in self.layers:
            layer.expire()

    def is_readable(self) -> bool:
        """Whether all pages that the next token sees are in memory or known to the store.

        False after a page turned out damaged or gone.  Reads none.
        """
        return all(layer.is_readable() for layer in self.layers)

    @property
    def is_torn(self) -> bool:
        """Whether a layer was interrupted while it changed: what it holds means nothing then."""
        return any(layer.is_torn for layer in self.layers)

    def restore(self) -> None:
        """Brings the pages that the next token needs into memory, as far as the budget allows."""
        for layer in self.layers:
            layer.restore()

    def fork(self) -> KVCache:
        """A second sequence that shares all sealed pages and continues on its own."""
        twin = KVCache(
            self.spec,
            pager=self.pager,
            chain=self.chain.fork(),
            check_finite=self.check_finite,
        )
        twin.layers = [layer.fork(twin.chain) for layer in self.layers]
        twin._release_when_gone()
        return twin

    def check(self) -> None:
        """Raises AssertionError where an invariant of the pool or the tables does not hold."""
        self.pager.pool.check()
        self.pager.holdings.check(self.pager.pool)
        for layer in self.layers:
            refs = layer.table.refs()
            slots = self.pager.pool.arenas[layer.layer].resolve(refs)
            named = np.arange(len(refs)) < self.chain.num_named
            assert (named | (slots >= 0) | (refs < -1)).all(), "a page is in neither tier"

    def _layer(self, layer: int) -> LayerCache:
        if not 0 <= layer < len(self.layers):
            raise InvalidInput(f"layer {layer} is not one of the cache's {len(self.layers)}")
        return self.layers[layer]

    def _release_when_gone(self) -> None:
        """Slots and pins go back when a layer is gone (the pager takes them at its next step)."""
        for layer in self.layers:
            holding = Holding(layer.layer, layer.table, layer.pins)
            self.pager.holdings.add(holding)
            weakref.finalize(layer, self.pager.holdings.bury, holding)


def new_pool(spec: CacheSpec, memory_budget: int | None) -> HotPool:
    """A pool for caches of `spec`; InvalidInput if the budget has no room for a page."""
    budget = default_budget() if memory_budget is None else memory_budget
    largest = max(page.page_nbytes for page in spec.page_specs)
    if budget < largest:
        raise InvalidInput(
            f"memory_budget of {budget} bytes is less than one page of {largest}",
            remedy="Give at least a few pages a layer, or None for half of the available memory",
        )
    return HotPool(
        spec.page_specs,
        budget,
        [_most_pages(layer, spec) for layer in spec.layers],
        [layer.sink_blocks(spec.page_tokens) for layer in spec.layers],
    )


def _most_pages(layer: LayerSpec, spec: CacheSpec) -> int | None:
    """Pages that attention of a layer can touch at most, and one for sealing ahead."""
    if layer.window is None:
        return None
    seen = layer.window + layer.sink_tokens + spec.recent_tokens
    return -(-seen // spec.page_tokens) + 3
