"""Key codecs of the seed's configuration, put together from tqstore.quant's parts.

Owns two compositions that page specs have no name for: a sign sketch of any number of rows, and the
outlier channels as a stream of their own.  Owns no quantizer.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tqstore.quant.codec import Codec, Prepared, Streams
from tqstore.quant.int8 import Int8Codec
from tqstore.quant.lloyd_max import LloydMaxQuantizer
from tqstore.quant.outliers import PREFIX
from tqstore.quant.registry import key_codec
from tqstore.quant.rotation import Rotation, rotation
from tqstore.quant.runwise import RunwiseCodec
from tqstore.quant.sign_sketch import SignSketchCodec, sketch_gain
from tqstore.spec import CodecSpec, PageSpec


def vector_codec(
    kind: str, bits: int, dim: int, seed: int, sketch_rows: int | None, *, is_unbiased: bool
) -> Codec:
    """`mse` or `prod` of vectors of `dim`; the sign sketch of `prod` has `dim` rows if None."""
    if kind == "prod":
        rows = sketch_rows or dim
        return RunwiseCodec(_sketched(bits, dim, seed, rows, is_unbiased=is_unbiased), dim)
    codec = CodecSpec(kind, bits)
    page = PageSpec(1, dim, dim, 1, keys=codec, values=CodecSpec("int8", 8), dtype="float32")
    return key_codec(page, seed)


def _sketched(bits: int, dim: int, seed: int, rows: int, *, is_unbiased: bool) -> Codec:
    gain = sketch_gain(dim, "orthogonal") * dim / rows  # every row's estimate is unbiased alone
    return SignSketchCodec(
        rotation("auto", dim, seed, "key rotation"),
        OrthogonalRows(dim, rows, seed),
        LloydMaxQuantizer(dim, bits - 1) if bits > 1 else None,
        gain if is_unbiased else gain * least_error_factor(dim, rows),
        rows,
        mx.float32,
    )


def least_error_factor(dim: int, rows: int) -> float:
    """The multiple of the unbiased gain whose squared error is least: 2/pi at dim rows.

    The residual's product z with a query has mean 0 and variance 1 over rotations (in units of
    |q|^2 |r|^2 / dim) and its unbiased estimate an error of variance v: 1 / (1 + v) is the best
    multiple.  Of n <= dim orthogonal rows v = pi/2 dim/n - 1, whatever else is exact at large dim;
    stacked rotations are independent, each with the weight of its rows.
    """
    parts = [min(dim, rows - start) for start in range(0, rows, dim)]
    per_row = sketch_gain(dim, "orthogonal") ** 2 * dim  # pi/2 at large dim
    return 1 / (1 + sum((part / rows) ** 2 * (per_row * dim / part - 1) for part in parts))


class OrthogonalRows(Rotation):
    """The first `rows` of as many stacked rotations as it takes: [..., dim] -> [..., rows].

    `inverse` is the transpose.  Rows of one rotation are orthogonal, which spreads them better than
    independent ones; every row alone is a uniform direction.
    """

    def __init__(self, dim: int, rows: int, seed: int) -> None:
        self._dim, self._rows = dim, rows
        self._parts: list[Rotation] = [
            rotation("auto", dim, seed, f"key sketch {part}") for part in range(-(-rows // dim))
        ]

    def apply(self, x: mx.array) -> mx.array:
        return mx.concatenate([part.apply(x) for part in self._parts], axis=-1)[..., : self._rows]

    def inverse(self, x: mx.array) -> mx.array:
        missing = len(self._parts) * self._dim - self._rows
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        parts = mx.split(x, len(self._parts), axis=-1)
        return mx.stack(
            [rotated.inverse(part) for rotated, part in zip(self._parts, parts, strict=True)]
        ).sum(0)


class TwoStreamCodec:
    """A cache's chosen channels at int8 with a scale of their own; `rest` codes the others alone.

    quant.outliers has pages that choose for themselves.  Here one choice is for good: it costs no
    bytes a page, which is a token here, and queries are split once.  Streams: those of `rest`, and
    those of int8 with the prefix `outlier_`.  Keys only.
    """

    def __init__(self, rest: Codec, channels: np.ndarray, dim: int) -> None:
        self._rest = rest
        self._outliers: Codec = RunwiseCodec(Int8Codec(len(channels), mx.float32), len(channels))
        others = np.setdiff1d(np.arange(dim), channels)
        self.channels = mx.array(channels.astype(np.uint16))  # [outliers], kept with the codes
        self._others = mx.array(others.astype(np.uint16))
        self._back = mx.array(np.argsort(np.concatenate([others, channels])).astype(np.uint16))

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        outliers = self._outliers.encode(x[..., self.channels])
        rest = self._rest.encode(x[..., self._others])
        return rest | {f"{PREFIX}{name}": stream for name, stream in outliers.items()}

    def decode(self, streams: Streams) -> mx.array:
        rest, outliers = _split(streams)
        both = [self._rest.decode(rest), self._outliers.decode(outliers)]
        return mx.concatenate(both, axis=-1)[..., self._back]

    def prepare(self, queries: mx.array) -> Prepared:
        """The channels' own queries wait beside the rotated ones, in `queries`' last columns."""
        rest = self._rest.prepare(queries[..., self._others])
        outliers = queries[..., self.channels].astype(mx.float32)
        return rest._replace(queries=mx.concatenate([rest.queries, outliers], axis=-1))

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        rest, outliers = _split(streams)
        at = prepared.queries.shape[-1] - len(self.channels)
        inner = prepared._replace(queries=prepared.queries[..., :at])
        outer = Prepared(prepared.queries[..., at:])
        return self._rest.scores(inner, rest) + self._outliers.scores(outer, outliers)

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        raise NotImplementedError("outlier channels are for keys")

    def finish(self, accumulated: mx.array) -> mx.array:
        raise NotImplementedError("outlier channels are for keys")


def _split(streams: Streams) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """(streams of the rest, streams of the outliers without their prefix)."""
    outliers = {n.removeprefix(PREFIX): s for n, s in streams.items() if n.startswith(PREFIX)}
    return {n: s for n, s in streams.items() if not n.startswith(PREFIX)}, outliers
