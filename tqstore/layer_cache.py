"""One layer of one sequence: its page table and its exact tail.

Owns append, seal, fetch, attend and trim of a layer.  Moving pages between tiers is the pager's;
naming blocks and keeping layers in step is the cache's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain as concatenated

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.attend import PackedAttention, max_queries
from tqstore.errors import InvalidInput, NotFound
from tqstore.format.block_hash import needed_blocks
from tqstore.layer_input import check_queries, checked_tokens
from tqstore.paging.block_chain import BlockChain
from tqstore.paging.page_records import MLX_DTYPES, assemble, stream_views
from tqstore.paging.page_table import EXPIRED, PageTable, Refs
from tqstore.paging.pager import Pager
from tqstore.quant.registry import key_codec, value_codec
from tqstore.spec import LayerSpec, PageSpec
from tqstore.tail import Tail
from tqstore.visibility import View, visible_blocks

# float32 bytes of keys and values encoded or decoded at a time: bounds the transient memory.
TRANSIENT_NBYTES = 16 << 20


class LayerCache:
    """Invariant: blocks 0..len(table)-1 are sealed, and the tail begins right after them.

    A block is sealed once `recent_tokens` more than it are in the tail, so state depends on the
    tokens appended, not on how they were split into calls.  One writer; not thread-safe.
    """

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        page_spec: PageSpec,
        pager: Pager,
        chain: BlockChain,
        *,
        recent_tokens: int,
        seed: int,
        keep_history: bool,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.page_spec = page_spec
        self.pager = pager
        self.chain = chain
        self.recent_tokens = recent_tokens
        self.seed = seed
        self.keep_history = keep_history
        self.key_codec = key_codec(page_spec, seed)
        self.value_codec = value_codec(page_spec, seed)
        self.table = PageTable()
        self.tail = Tail.empty(page_spec)
        self.pins: list[Refs] = []
        self.is_torn = False  # while tail and table change together: true for good if interrupted
        self._first_kept = spec.sink_blocks(page_spec.page_tokens)

    @property
    def page_tokens(self) -> int:
        return self.page_spec.page_tokens

    @property
    def tail_start(self) -> int:
        return len(self.table) * self.page_tokens

    @property
    def num_tokens(self) -> int:
        return self.tail_start + len(self.tail)

    def append(self, keys: mx.array, values: mx.array, *, check_finite: bool) -> None:
        """Adds n >= 1 tokens: keys [kv_heads, n, key_dim], values [kv_heads, n, value_dim].

        InvalidInput, with nothing changed, for wrong shapes or dtypes and, if `check_finite`, for
        inf and NaN (else these are found when their block is sealed).
        """
        new = checked_tokens(self.layer, self.page_spec, keys, values)
        if check_finite and not bool(new.is_finite()):
            raise InvalidInput(
                f"layer {self.layer}: keys or values are not finite",
                doing="appending",
                remedy="The model produced inf or NaN; nothing was appended",
            )
        self.expire()  # before adding: queries of the new tokens may still come for their window
        self._add(new)

    def append_and_fetch(self, keys: mx.array, values: mx.array) -> Tail:
        """Appends n tokens and returns, dense, all that their queries may see, in temporal order.

        The n new tokens come back exactly as given.  Windowed layers return their sinks, then
        the window of the first new token, then the rest.
        """
        new = checked_tokens(self.layer, self.page_spec, keys, values)
        seen = self._seen(len(new), [new])
        if self._num_due(len(self.tail) + len(new)):
            # Sealing writes into the pool in place; a pending view of it would force a copy.
            mx.eval(seen.keys, seen.values)
        self._add(new)
        self.expire()
        return seen

    def fetch_seen(self, num_queries: int) -> Tail:
        """Dense, in temporal order, what queries of the last tokens see: sinks, window, rest."""
        return self._seen(num_queries, [])

    def num_seen(self, num_queries: int) -> int:
        """How many tokens `fetch_seen` returns."""
        sinks, start = self._seen_by(num_queries, self.num_tokens)
        return sinks + self.num_tokens - start

    def _seen(self, num_queries: int, new: Sequence[Tail]) -> Tail:
        """What the last queries see once `new` is appended."""
        end = self.num_tokens + sum(map(len, new))
        sinks, start = self._seen_by(num_queries, end)
        parts = concatenated(self._parts(0, sinks), self._parts(start, self.num_tokens), new)
        return Tail.joined(self.page_spec, sinks + end - start, parts)

    def _seen_by(self, num_queries: int, num_tokens: int) -> tuple[int, int]:
        """(sink tokens before the window, the window's start) for the last queries of so many."""
        view = View(num_tokens, num_queries, self.spec.window, self.spec.sink_tokens)
        return min(self.spec.sink_tokens, view.window_start), view.window_start

    def fetch(self, first: int = 0, last: int | None = None) -> Tail:
        """Dense keys and values of positions first..last-1 in the model's dtype."""
        last = self.num_tokens if last is None else last
        return Tail.joined(self.page_spec, last - first, self._parts(first, last))

    def _parts(self, first: int, last: int) -> Iterator[Tail]:
        """Positions first..last-1 in pieces: decoded runs of pages, then the tail's."""
        yield from self._decoded(first, min(last, self.tail_start))
        if last > self.tail_start:
            yield self.tail.slice(max(0, first - self.tail_start), last - self.tail_start)

    def attend(
        self, queries: mx.array, scale: float | None, sink_logits: mx.array | None = None
    ) -> mx.array:
        """queries [query_heads, n, key_dim] at the last n positions -> [.., n, value_dim].

        `sink_logits` [query_heads] take a share of every query's weight and have no value.
        """
        check_queries(self.layer, self.page_spec, queries, self.num_tokens)
        query_heads, count, _ = queries.shape
        first_query = self.num_tokens - count
        step = max_queries(self.page_spec, query_heads)
        outs = []
        for first in range(0, count, step):
            some = queries[:, first : first + step]
            last = first_query + first + some.shape[1]
            view = View(last, some.shape[1], self.spec.window, self.spec.sink_tokens)
            outs.append(self._attend(some, view, scale, sink_logits))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)

    def _attend(
        self, queries: mx.array, view: View, scale: float | None, sink_logits: mx.array | None
    ) -> mx.array:
        spec = self.page_spec
        blocks = visible_blocks(view, len(self.table), self.page_tokens)
        self._require_kept(blocks)
        attention = PackedAttention(
            spec,
            self.key_codec,
            self.value_codec,
            view,
            queries,
            spec.key_dim**-0.5 if scale is None else scale,
            sink_logits,
        )
        tail = self.tail.slice(0, max(0, view.num_tokens - self.tail_start))
        runs = self.pager.runs(
            self.layer, self.table, self.chain, blocks, max_pages=attention.run_pages()
        )
        with closing(runs):
            out = attention(runs, tail.keys, tail.values, self.tail_start)
        return out.astype(queries.dtype)

    def reopened(self, length: int) -> Tail:
        """The tail this layer would have if trimmed to `length` tokens; changes nothing.

        Ends inside a page: that page's decoded values.  NotFound if pages that the shorter
        sequence, or a checkpoint of it, would need have left the window and are not stored.
        """
        self._require_reachable(length)
        if length >= self.tail_start:
            return self.tail.slice(0, length - self.tail_start)
        block = length // self.page_tokens
        return self.fetch(block * self.page_tokens, length).copy()

    def can_trim_to(self, length: int) -> bool:
        """Whether `reopened(length)` would find its pages; reads none."""
        try:
            self._require_reachable(length)
        except NotFound:
            return False
        return True

    def trim(self, length: int, tail: Tail) -> None:
        """Applies a trim whose tail `reopened` has returned."""
        num_blocks = length // self.page_tokens
        if num_blocks >= len(self.table):
            self.tail = tail
            return
        self.is_torn = True
        gone = self.table.truncate(num_blocks)
        self.tail = tail
        self.is_torn = False
        self.pager.release(self.layer, gone)
        if len(tail):
            self.pager.stats.reopened_pages += 1
        self._first_kept = self.spec.sink_blocks(self.page_tokens)

    def is_readable(self) -> bool:
        """Whether the pages that the next token may see are hot or known to the store."""
        return self.pager.is_readable(self.layer, self.table, self.chain, self._next_seen())

    def restore(self) -> None:
        """Reads the pages that the next token may see, as far as the pool has room."""
        blocks = self._next_seen()
        self.pager.restore(self.layer, self.table, self.chain, blocks)

    def pin(self) -> None:
        """Pins the pages that are hot now."""
        self.pins.append(self.table.refs())
        self.pager.pin(self.layer, self.pins[-1])

    def unpin(self) -> None:
        if self.pins:
            self.pager.unpin(self.layer, self.pins.pop())

    def fork(self, chain: BlockChain) -> LayerCache:
        """A copy that shares this one's pages."""
        twin = LayerCache(
            self.layer,
            self.spec,
            self.page_spec,
            self.pager,
            chain,
            recent_tokens=self.recent_tokens,
            seed=self.seed,
            keep_history=self.keep_history,
        )
        twin.table = self.table.copy()
        twin.tail = self.tail
        twin._first_kept = self._first_kept
        self.pager.retain(self.layer, twin.table.refs())
        return twin

    def _next_seen(self) -> npt.NDArray[np.int64]:
        """Blocks that the next token may see."""
        view = View(self.num_tokens + 1, 1, self.spec.window, self.spec.sink_tokens)
        return visible_blocks(view, len(self.table), self.page_tokens)

    def history_nbytes(self) -> tuple[int, int]:
        """Bytes of pages that left the window and are kept, and of those that are in memory."""
        refs = self.table.refs()
        is_history = refs != EXPIRED
        is_history[self._next_seen()] = False
        arena = self.pager.pool.arenas[self.layer]
        hot = arena.resolve(refs[is_history]) >= 0
        page_nbytes = self.page_spec.page_nbytes
        return int(is_history.sum()) * page_nbytes, int(hot.sum()) * page_nbytes

    def _add(self, new: Tail) -> None:
        tail = Tail.joined(self.page_spec, len(self.tail) + len(new), [self.tail, new])
        num_due = self._num_due(len(tail))
        if num_due:
            self._seal(tail, num_due)
        else:
            self.tail = tail

    @property
    def _grows_without_end(self) -> bool:
        """Whether pages are only ever dropped from memory once they are durable."""
        return self.spec.window is None or self.keep_history

    def _num_due(self, tail_tokens: int) -> int:
        return max(0, (tail_tokens - self.recent_tokens) // self.page_tokens)

    def _seal(self, tail: Tail, num_blocks: int) -> None:
        """Encodes the first blocks of `tail`; on failure nothing of this layer has changed."""
        sealed = self.page_tokens * num_blocks
        part = tail.slice(0, sealed)
        if not bool(part.is_finite()):
            raise InvalidInput(
                f"layer {self.layer}: keys or values at positions {self.tail_start} to "
                f"{self.tail_start + sealed - 1} are not finite",
                doing="sealing",
                remedy="The model produced inf or NaN; trim the cache to before them",
            )
        refs = self._seal_blocks(part, num_blocks)
        rest = tail.slice(sealed).copy()
        self.is_torn = True
        self.tail = rest
        self.table.extend(refs)
        self.is_torn = False

    def _seal_blocks(self, part: Tail, num_blocks: int) -> Refs:
        """Refs of `part`'s blocks in the pool; on failure pool and chain are as before."""
        step = min(self._pages_per_transient(), self.pager.max_sealed_pages(self.layer))
        start = len(self.table)
        chained = len(self.chain)
        self.chain.grow(start + num_blocks)
        refs: list[Refs] = []
        try:
            for first in range(0, num_blocks, step):
                last = min(first + step, num_blocks)
                tokens = part.slice(first * self.page_tokens, last * self.page_tokens)
                records = self._encode(tokens, last - first)
                mx.eval(records)
                blocks = self.chain.blocks(start + first, start + last)
                sealed = self.pager.seal(
                    self.layer,
                    records,
                    blocks,
                    first_block=start + first,
                    spill_ahead=self._grows_without_end,
                )
                refs.append(sealed)
        except Exception:
            for part_refs in refs:
                self.pager.release(self.layer, part_refs)
            self.chain.truncate(chained)
            raise
        return np.concatenate(refs)

    def _encode(self, part: Tail, num_pages: int) -> mx.array:
        def paged(array: mx.array) -> mx.array:  # [heads, n, dim] -> [pages, heads, tokens, dim]
            heads, _, dim = array.shape
            return array.reshape(heads, num_pages, self.page_tokens, dim).swapaxes(0, 1)

        return assemble(
            self.page_spec,
            self.key_codec.encode(paged(part.keys)),
            self.value_codec.encode(paged(part.values)),
        )

    def _decoded(self, first: int, last: int) -> Iterator[Tail]:
        """Sealed positions first..last-1, decoded, a run of pages at a time."""
        if last <= first:
            return
        first_block = first // self.page_tokens
        blocks = np.arange(first_block, -(-last // self.page_tokens), dtype=np.int64)
        self._require_kept(blocks)
        position = first_block * self.page_tokens
        runs = self.pager.runs(
            self.layer, self.table, self.chain, blocks, max_pages=self._pages_per_transient()
        )
        for run in runs:
            keys = self.key_codec.decode(stream_views(self.page_spec, "key", run.records))
            values = self.value_codec.decode(stream_views(self.page_spec, "value", run.records))
            part = Tail(self._in_order(keys), self._in_order(values))
            if run.is_streamed:
                mx.eval(part.keys, part.values)
            yield part.slice(max(0, first - position), last - position)
            position += len(part)

    def _in_order(self, decoded: mx.array) -> mx.array:
        """[pages, heads, tokens, dim] -> [heads, pages * tokens, dim] in the model's dtype."""
        pages, heads, tokens, dim = decoded.shape
        decoded = decoded.astype(MLX_DTYPES[self.page_spec.dtype])
        return decoded.swapaxes(0, 1).reshape(heads, pages * tokens, dim)

    def _pages_per_transient(self) -> int:
        spec = self.page_spec
        per_page = 4 * spec.kv_heads * spec.page_tokens * (spec.key_dim + spec.value_dim)
        return max(1, TRANSIENT_NBYTES // per_page)

    def _require_reachable(self, length: int) -> None:
        """What a checkpoint of `length` tokens would need, and the page that `length` ends in."""
        sinks, first = self._needed(length)
        last = min(len(self.table), -(-length // self.page_tokens))
        self._require_kept(np.r_[0:sinks, first:last])

    def _needed(self, length: int) -> tuple[int, int]:
        """(sinks, first): the blocks before the last that a trim to `length` must find."""
        num_blocks = min(len(self.table), length // self.page_tokens)
        return needed_blocks(num_blocks, self.page_tokens, self.spec.window, self.spec.sink_tokens)

    def _require_kept(self, blocks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        refs = self.table.refs()[blocks]
        if (refs == EXPIRED).any():
            block = int(blocks[int(np.argmax(refs == EXPIRED))])
            raise NotFound(
                f"layer {self.layer}: block {block} left the window of {self.spec.window} tokens "
                "and was not kept",
                remedy=self._how_to_keep(),
            )

    def _how_to_keep(self) -> str:
        if self.keep_history:
            return "Its page is no longer in the store: feed these tokens anew"
        if self.pager.pages is not None:
            return "Make the cache with window_history=True to be able to go back further"
        return "Make it with store.new_cache and save it to be able to go back further"

    def expire(self) -> None:
        """Drops pages that neither a token nor a checkpoint needs, even after a trim of
        `recent_tokens`."""
        _, last = self._needed(max(0, self.num_tokens - self.recent_tokens))
        if last > self._first_kept:
            blocks = np.arange(self._first_kept, last, dtype=np.int64)
            self._first_kept = self.pager.expire(
                self.layer, self.table, blocks, keep_unsaved=self.keep_history
            )
