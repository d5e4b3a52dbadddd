"""Attention over packed pages and the exact tail, with online softmax over runs of pages.

Runs come in the order of the sequence, so that results do not depend on where pages are.  Queries
are rotated once, values are summed in rotated space and un-rotated once; scores, weights and sums
are float32 (docs/quantization.md).  Owns no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.paging.page_records import stream_views
from tqstore.paging.pager import Run
from tqstore.quant.registry import Codec
from tqstore.spec import PageSpec

# Far below any score, yet finite: a row that is masked in one run must not become NaN.
MASKED = -1e30
# Bytes of scores and weights that one run may take.
SCORES_NBYTES = 64 << 20


@dataclass(frozen=True)
class View:
    """What the queries of one call may see.

    The `num_queries` queries stand at the sequence's last positions.  A query at position p sees
    keys at positions <= p and, with a window, > p - window or < sink_tokens.
    """

    num_tokens: int
    num_queries: int
    window: int | None = None
    sink_tokens: int = 0

    @property
    def first_query(self) -> int:
        return self.num_tokens - self.num_queries

    @property
    def window_start(self) -> int:
        """First position that the window of the first query reaches."""
        return 0 if self.window is None else max(0, self.first_query - self.window + 1)

    def sees_all(self, first: int, last: int) -> bool:
        """Whether every query sees every position of first..last-1."""
        below = last - 1 <= self.first_query
        if self.window is None:
            return below
        return below and (last <= self.sink_tokens or first > self.num_tokens - 1 - self.window)

    def mask(self, positions: npt.NDArray[np.int64]) -> mx.array:
        """positions [...] -> bool [num_queries, ...]: what each query sees."""
        keys = mx.array(positions.astype(np.int32))[None]
        queries = mx.arange(self.first_query, self.num_tokens, dtype=mx.int32)
        queries = queries.reshape(-1, *([1] * positions.ndim))
        visible = keys <= queries
        if self.window is not None:
            visible &= (keys > queries - self.window) | (keys < self.sink_tokens)
        return visible


def visible_blocks(view: View, num_blocks: int, page_tokens: int) -> npt.NDArray[np.int64]:
    """Indices of the blocks of which some query sees some token."""
    blocks = np.arange(num_blocks, dtype=np.int64)
    if view.window is None:
        return blocks
    reached = (blocks + 1) * page_tokens > view.window_start
    return blocks[reached | (blocks * page_tokens < view.sink_tokens)]


def pages_per_run(num_rows: int, heads: int, page_tokens: int) -> int:
    """How many pages a run may have so that its scores stay within SCORES_NBYTES."""
    return max(1, SCORES_NBYTES // (4 * heads * num_rows * page_tokens))


@dataclass
class _Sums:
    """Online softmax state of [heads, rows]: maximum, weight, and sums in both value spaces."""

    maximum: mx.array
    weight: mx.array
    exact: mx.array | None = None
    packed: mx.array | None = None

    def rescale(self, maximum: mx.array) -> None:
        factor = mx.exp(self.maximum - maximum)
        self.weight = self.weight * factor
        if self.exact is not None:
            self.exact = self.exact * factor[..., None]
        if self.packed is not None:
            self.packed = self.packed * factor[..., None]
        self.maximum = maximum


def attend(
    spec: PageSpec,
    key_codec: Codec,
    value_codec: Codec,
    runs: Iterable[Run],
    tail_keys: mx.array,
    tail_values: mx.array,
    tail_start: int,
    queries: mx.array,
    view: View,
    scale: float,
) -> mx.array:
    """queries [query_heads, n, key_dim] -> float32 [query_heads, n, value_dim].

    tail_keys, tail_values: [kv_heads, tail, dim] at positions tail_start on.  A streamed run is
    evaluated before the next is taken, which bounds memory; otherwise all stays lazy.
    """
    query_heads, num_queries, _ = queries.shape
    heads = spec.kv_heads
    rows = queries.astype(mx.float32).reshape(heads, -1, spec.key_dim)  # [kv_heads, rows, dim]
    sums = _Sums(
        maximum=mx.full(rows.shape[:2], MASKED, dtype=mx.float32),
        weight=mx.zeros(rows.shape[:2], dtype=mx.float32),
    )
    if tail_keys.shape[1]:
        _add_tail(sums, rows, tail_keys, tail_values, tail_start, view, scale)
    prepared = None
    for run in runs:
        prepared = key_codec.prepare(rows) if prepared is None else prepared
        scores = key_codec.scores(prepared, stream_views(spec, "key", run.records)) * scale
        weights = _add_scores(sums, _masked(scores, run, spec.page_tokens, view), (0, 3))
        part = value_codec.weighted_sum(weights, stream_views(spec, "value", run.records))
        sums.packed = part if sums.packed is None else sums.packed + part
        if run.is_streamed:
            mx.eval(sums.packed, sums.weight, sums.maximum)
    total = mx.zeros((*rows.shape[:2], spec.value_dim)) if sums.exact is None else sums.exact
    if sums.packed is not None:
        total = total + value_codec.finish(sums.packed)
    return (total / sums.weight[..., None]).reshape(query_heads, num_queries, spec.value_dim)


def _masked(scores: mx.array, run: Run, page_tokens: int, view: View) -> mx.array:
    """scores [pages, heads, rows, tokens] with what is not visible at MASKED."""
    first, last = int(run.blocks.min()), int(run.blocks.max()) + 1
    if view.sees_all(first * page_tokens, last * page_tokens):
        return scores
    positions = run.blocks[:, None] * page_tokens + np.arange(page_tokens)
    visible = view.mask(positions)  # [queries, pages, tokens]
    pages, heads, num_rows, tokens = scores.shape
    by_query = scores.reshape(pages, heads, -1, view.num_queries, tokens)
    by_query = mx.where(visible.transpose(1, 0, 2)[:, None, None], by_query, MASKED)
    return by_query.reshape(pages, heads, num_rows, tokens)


def _add_scores(sums: _Sums, scores: mx.array, axes: tuple[int, ...]) -> mx.array:
    """Rescales `sums` for new scores (heads and rows are the axes kept) and returns weights."""
    maximum = mx.maximum(sums.maximum, scores.max(axis=axes))
    sums.rescale(maximum)
    weights = mx.exp(scores - maximum[..., None])
    sums.weight = sums.weight + weights.sum(axis=axes)
    return weights


def _add_tail(
    sums: _Sums,
    rows: mx.array,
    keys: mx.array,
    values: mx.array,
    start: int,
    view: View,
    scale: float,
) -> None:
    scores = (rows @ keys.astype(mx.float32).swapaxes(1, 2)) * scale  # [heads, rows, tail]
    positions = np.arange(start, start + keys.shape[1])
    if not view.sees_all(start, start + keys.shape[1]):
        heads, num_rows, tail = scores.shape
        by_query = scores.reshape(heads, -1, view.num_queries, tail)
        scores = mx.where(view.mask(positions), by_query, MASKED).reshape(heads, num_rows, tail)
    weights = _add_scores(sums, scores, (2,))
    sums.exact = weights @ values.astype(mx.float32)
