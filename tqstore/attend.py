"""Attention over packed pages and the exact tail, with online softmax over parts of a sequence.

A part is as many pages as decode within the processor's cache; parts are computed side by side
(lanes.py) and merged in the order of the sequence.  Where parts begin and end depends on the
sequence alone, so results do not depend on where pages are.  Queries are rotated once, values are
summed in rotated space and un-rotated once; scores, weights and sums are float32
(docs/quantization.md).  Owns no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import e, log2
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.device import is_cpu
from tqstore.lanes import has_many, lane
from tqstore.paging.page_records import stream_views
from tqstore.paging.pager import Run
from tqstore.paging.segments import power_of_two
from tqstore.quant.codec import Codec, Prepared
from tqstore.quant.runwise import pages_at_a_time
from tqstore.spec import PageSpec
from tqstore.visibility import View

# Below any score, yet finite: a row that is masked in one part must not become NaN.
MASKED = float(np.finfo(np.float32).min)
# Bytes that the scores of a part may take, and the sums of all parts until they are merged.
CPU_TRANSIENT_NBYTES = 16 << 20
GPU_TRANSIENT_NBYTES = 512 << 20
# More queries than parts of so many pages have room for are attended to in several calls.
_PAGES_FOR_QUERIES = 8
# Packed bytes of a run: what a streamed sequence reads at a time.
RUN_NBYTES = 4 << 20


class Sums(NamedTuple):
    """Softmax over some of the keys, for every head and row.

    The greatest score and the sum of the weights relative to it, [heads, rows]; the weighted sum
    of the values [heads, rows, inner].  Scores are in bits, logits times log2(e): on a CPU MLX
    takes powers of two thrice as fast as of e.
    """

    maximum: mx.array
    weight: mx.array
    values: mx.array


@dataclass(frozen=True)
class PackedAttention:
    """One call's queries, [query_heads, n, key_dim], and how to attend to pages of `spec`."""

    spec: PageSpec
    key_codec: Codec
    value_codec: Codec
    view: View
    queries: mx.array
    scale: float
    sink_logits: mx.array | None = None  # [query_heads]

    def __call__(
        self, runs: Iterable[Run], tail_keys: mx.array, tail_values: mx.array, tail_start: int
    ) -> mx.array:
        """Runs of at most `run_pages` and the tail -> float32 [query_heads, n, value_dim].

        tail_keys, tail_values: [kv_heads, tail, dim] at positions `tail_start` on.
        """
        parts = []
        paged = self._over_runs(runs)
        if paged is not None:
            parts.append(paged._replace(values=self.value_codec.finish(paged.values)))
        if tail_keys.shape[1]:
            parts.append(self._over_tail(tail_keys, tail_values, tail_start))
        if self.sink_logits is not None:
            parts.append(self._over_sinks(self.sink_logits))
        total = merged(parts)
        out = total.values / total.weight[..., None]
        return out.reshape(*self.queries.shape[:2], self.spec.value_dim)

    @cached_property
    def _rows(self) -> mx.array:
        """float32 [kv_heads, rows, key_dim]: query heads of one key head, and positions."""
        spec = self.spec
        return self.queries.astype(mx.float32).reshape(spec.kv_heads, -1, spec.key_dim)

    @property
    def _num_rows(self) -> int:
        heads, count, _ = self.queries.shape
        return int(heads // self.spec.kv_heads * count)

    @property
    def _scale(self) -> float:
        return self.scale * log2(e)

    def part_pages(self) -> int:
        """Pages of a part."""
        spec = self.spec
        dim = max(spec.key_dim, spec.value_dim)
        decoded = pages_at_a_time(spec.kv_heads, spec.page_tokens, dim)
        per_page = _scores_nbytes(spec, self.queries.shape[0]) * self.queries.shape[1]
        return power_of_two(min(decoded, _transient_nbytes() // per_page))

    def run_pages(self) -> int:
        """Pages of a run: whole parts."""
        return max(self.part_pages(), power_of_two(RUN_NBYTES // self.spec.page_nbytes))

    def _max_parts(self) -> int:
        """Parts whose sums may be in memory before they are merged."""
        sums = 8 * self.spec.kv_heads * self._num_rows * self.spec.value_dim
        return max(2, _transient_nbytes() // sums)

    def _over_runs(self, runs: Iterable[Run]) -> Sums | None:
        """Sums over all runs, values in the codec's own space.

        Work on a part begins while later ones are still being read or put together.  Of what was
        streamed at most two runs are in memory at a time.
        """
        prepared = self.key_codec.prepare(self._rows)
        step = self.part_pages()
        parts: list[Sums] = []
        index = 0
        for run in runs:
            before = list(parts)  # what runs before this one have come to
            for first in range(0, len(run.blocks), step):
                with lane(index):
                    part = self._over_part(prepared, run, slice(first, first + step))
                parts.append(part)
                index += 1
                if len(parts) >= self._max_parts():
                    parts = [merged(parts)]
                if has_many() or run.is_streamed:
                    _begin(parts[-1])
            if run.is_streamed:
                mx.eval([part.values for part in before])
        return merged(parts) if parts else None

    def _over_tail(self, keys: mx.array, values: mx.array, start: int) -> Sums:
        """Sums over exact keys and values [kv_heads, n, dim] at positions `start` on."""
        scores = (self._rows @ keys.astype(mx.float32).swapaxes(1, 2)) * self._scale
        scores = self._masked(scores[None], np.arange(start, start + keys.shape[1])[None])[0]
        maximum = scores.max(axis=-1)
        weights = mx.power(2.0, scores - maximum[..., None])
        return Sums(maximum, weights.sum(axis=-1), weights @ values.astype(mx.float32))

    def _over_sinks(self, logits: mx.array) -> Sums:
        """What learned sinks take: a weight, and no value."""
        spec, heads = self.spec, self.spec.kv_heads
        bits = logits.astype(mx.float32).reshape(heads, -1, 1) * log2(e)
        maximum = mx.broadcast_to(bits, (*bits.shape[:2], self.view.num_queries))
        maximum = maximum.reshape(heads, -1)
        nothing = mx.zeros((*maximum.shape, spec.value_dim), dtype=mx.float32)
        return Sums(maximum, mx.ones_like(maximum), nothing)

    def _over_part(self, prepared: Prepared, run: Run, part: slice) -> Sums:
        spec, records = self.spec, run.records[part]
        scores = self.key_codec.scores(prepared, stream_views(spec, "key", records)) * self._scale
        offsets = np.arange(spec.page_tokens)
        scores = self._masked(scores, run.blocks[part, None] * spec.page_tokens + offsets)
        maximum = scores.max(axis=(0, 3))
        weights = mx.power(2.0, scores - maximum[..., None])
        values = self.value_codec.weighted_sum(weights, stream_views(spec, "value", records))
        return Sums(maximum, weights.sum(axis=(0, 3)), values)

    def _masked(self, scores: mx.array, positions: npt.NDArray[np.int64]) -> mx.array:
        """scores [n, heads, rows, tokens] of keys at positions [n, tokens], MASKED if unseen."""
        if self.view.sees_all(int(positions[0, 0]), int(positions[-1, -1]) + 1):
            return scores
        visible = self.view.mask(positions).transpose(1, 0, 2)  # [n, queries, tokens]
        count, heads, num_rows, tokens = scores.shape
        by_query = scores.reshape(count, heads, -1, self.view.num_queries, tokens)
        by_query = mx.where(visible[:, None, None], by_query, MASKED)
        return by_query.reshape(count, heads, num_rows, tokens)


def max_queries(spec: PageSpec, query_heads: int) -> int:
    """Queries that one call should have at most for its parts to stay within bounds."""
    return max(1, _transient_nbytes() // (_PAGES_FOR_QUERIES * _scores_nbytes(spec, query_heads)))


def _scores_nbytes(spec: PageSpec, query_heads: int) -> int:
    """Bytes of a query's scores against a page, and of its weighted sums of the page's values."""
    return 4 * query_heads * (spec.page_tokens + spec.value_dim)


def _transient_nbytes() -> int:
    return CPU_TRANSIENT_NBYTES if is_cpu() else GPU_TRANSIENT_NBYTES


def _begin(sums: Sums) -> None:
    """Begins to compute, unless inside mx.grad, mx.compile and the like."""
    with suppress(ValueError):
        mx.async_eval(*sums)  # type: ignore[no-untyped-call]


def merged(parts: list[Sums]) -> Sums:
    """The sums over all the keys of `parts`."""
    if len(parts) == 1:
        return parts[0]
    maxima = mx.stack([part.maximum for part in parts])
    maximum = maxima.max(axis=0)
    factors = mx.power(2.0, maxima - maximum)
    weights = mx.stack([part.weight for part in parts]) * factors
    values = mx.stack([part.values for part in parts]) * factors[..., None]
    return Sums(maximum, weights.sum(axis=0), values.sum(axis=0))
