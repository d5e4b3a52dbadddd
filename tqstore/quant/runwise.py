"""Any codec, encoding and decoding in runs of pages whose float32 form stays in the cache.

Owns the run length and nothing of the mathematics: results are those of the whole at once.  On a
CPU a pass over a 32 MB temporary costs as much in page faults as several passes over 2 MB
(docs/quantization.md has the figures), and runs use all cores (lanes.py).  A GPU wants the whole at
once, within a bound on memory.  Products are left to attention, which has parts of its own.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.device import is_cpu
from tqstore.lanes import lane
from tqstore.quant.codec import Codec, Prepared, Streams

CPU_RUN_NBYTES = 2 << 20
GPU_RUN_NBYTES = 256 << 20


def pages_at_a_time(heads: int, tokens: int, dim: int) -> int:
    """How many pages to work on at a time: those that decode into a run's bytes, at least one."""
    limit = CPU_RUN_NBYTES if is_cpu() else GPU_RUN_NBYTES
    return max(1, limit // (4 * heads * tokens * dim))


class RunwiseCodec:
    """`codec` for vectors of `dim`, run by run."""

    def __init__(self, codec: Codec, dim: int) -> None:
        self._codec = codec
        self._dim = dim

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        runs = []
        for index, run in enumerate(self._runs(x)):
            with lane(index):
                runs.append(self._codec.encode(x[run]))
        return {name: _join([run[name] for run in runs]) for name in runs[0]}

    def decode(self, streams: Streams) -> mx.array:
        per_token = streams["exact"] if "exact" in streams else streams["scales"]
        decoded = []
        for index, run in enumerate(self._runs(per_token)):
            with lane(index):
                part = {name: stream[run] for name, stream in streams.items()}
                decoded.append(self._codec.decode(part))
        return _join(decoded)

    def prepare(self, queries: mx.array) -> Prepared:
        return self._codec.prepare(queries)

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        return self._codec.scores(prepared, streams)

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        return self._codec.weighted_sum(weights, streams)

    def finish(self, accumulated: mx.array) -> mx.array:
        return self._codec.finish(accumulated)

    def _runs(self, array: mx.array) -> list[slice]:
        """Slices of the page axis of an array [pages, heads, tokens, ...]."""
        pages, heads, tokens = array.shape[:3]
        length = pages_at_a_time(heads, tokens, self._dim)
        return [slice(start, start + length) for start in range(0, pages, length)]


def _join(runs: list[mx.array]) -> mx.array:
    return runs[0] if len(runs) == 1 else mx.concatenate(runs)
