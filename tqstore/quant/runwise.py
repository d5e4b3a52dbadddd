"""Any codec, worked through in runs of pages whose float32 form stays in the processor's cache.

Owns the run length and nothing of the mathematics: results are those of the whole at once.  On a
CPU a pass over a 32 MB temporary costs as much in page faults as several passes over 2 MB
(docs/quantization.md has the figures).  A GPU wants the whole at once, within a bound on memory.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import mlx.core as mx

from tqstore.quant.codec import Codec, Prepared, Streams

CPU_RUN_NBYTES = 2 << 20
GPU_RUN_NBYTES = 256 << 20


class RunwiseCodec:
    """`codec` for vectors of `dim`, run by run."""

    def __init__(self, codec: Codec, dim: int) -> None:
        self._codec = codec
        self._dim = dim

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        runs = [self._codec.encode(x[run]) for run in self._runs(x)]
        return {name: _join([run[name] for run in runs]) for name in runs[0]}

    def decode(self, streams: Streams) -> mx.array:
        return _join([self._codec.decode(run) for run in self._stream_runs(streams)])

    def prepare(self, queries: mx.array) -> Prepared:
        return self._codec.prepare(queries)

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        return _join([self._codec.scores(prepared, run) for run in self._stream_runs(streams)])

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        partial_sums, first = [], 0
        for run in self._stream_runs(streams):
            last = first + len(run["exact" if "exact" in run else "scales"])
            partial_sums.append(self._codec.weighted_sum(weights[first:last], run))
            first = last
        return reduce(add, partial_sums)

    def finish(self, accumulated: mx.array) -> mx.array:
        return self._codec.finish(accumulated)

    def _stream_runs(self, streams: Streams) -> list[Streams]:
        per_token = streams["exact"] if "exact" in streams else streams["scales"]
        runs = self._runs(per_token)
        if len(runs) == 1:
            return [streams]
        return [{name: stream[run] for name, stream in streams.items()} for run in runs]

    def _runs(self, array: mx.array) -> list[slice]:
        """Slices of the page axis of an array [pages, heads, tokens, ...]."""
        pages, heads, tokens = array.shape[:3]
        limit = CPU_RUN_NBYTES if mx.default_device() == mx.Device(mx.cpu) else GPU_RUN_NBYTES
        length = max(1, limit // (4 * heads * tokens * self._dim))
        return [slice(start, start + length) for start in range(0, pages, length)]


def _join(runs: list[mx.array]) -> mx.array:
    return runs[0] if len(runs) == 1 else mx.concatenate(runs)
