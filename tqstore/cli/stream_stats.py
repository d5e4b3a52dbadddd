"""What the streams of a page hold, counted: statistics of numbers, codes unpacked and counted.

Owns the arithmetic, in numpy alone.  What a code stands for is the quantizers' and not needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tqstore.format.page import Records, bfloat16_to_float32, stream_arrays
from tqstore.spec import PageSpec, StreamSpec

NUM_BINS = 32


@dataclass(frozen=True)
class StreamStats:
    """One stream of one page.

    `bits` is the width of a code, None for a stream of numbers.  Minimum to std are of the finite
    elements, None if there are none.  `entropy` is in bits a code.  `counts[i]` counts code i, or
    the finite numbers of the i-th of NUM_BINS equal bins from minimum to maximum.
    """

    stream: StreamSpec
    bits: int | None
    num_elements: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    num_zeros: int
    num_nan: int
    num_infinite: int
    entropy: float | None
    counts: tuple[int, ...]

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.stream.name,
            "dtype": self.stream.dtype,
            "shape": self.stream.shape,
            "offset": self.stream.offset,
            "nbytes": self.stream.nbytes,
            "code_bits": self.bits,
            "elements": self.num_elements,
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.mean,
            "std": self.std,
            "zeros": self.num_zeros,
            "nan": self.num_nan,
            "infinite": self.num_infinite,
            "entropy_bits": self.entropy,
            "histogram": self.counts,
        }


def page_stats(record: Records, spec: PageSpec) -> list[StreamStats]:
    """Statistics of every stream of one page record, uint8 [page_nbytes]."""
    arrays = stream_arrays(record, spec)
    return [_stream_stats(stream, arrays[stream.name], spec) for stream in spec.streams]


def code_layout(stream: StreamSpec, spec: PageSpec) -> tuple[int, int] | None:
    """(bits, codes a vector) of a stream of packed codes, None for one of numbers."""
    role, _, what = stream.name.partition("_")
    codec, dim = (spec.keys, spec.key_dim) if role == "key" else (spec.values, spec.value_dim)
    return codec.code_layout(what, dim)


def unpack_codes(packed: npt.NDArray[np.generic], bits: int, dim: int) -> npt.NDArray[np.uint8]:
    """uint8 [.., dim] codes of LSB-first bit streams uint8 [.., ceil(dim * bits / 8)]."""
    if bits == 8:
        return np.asarray(packed, np.uint8)
    stream = np.unpackbits(np.asarray(packed, np.uint8), axis=-1, bitorder="little")
    codes = stream[..., : dim * bits].reshape(*packed.shape[:-1], dim, bits)
    return np.packbits(codes, axis=-1, bitorder="little")[..., 0]


def rebinned(counts: tuple[int, ...], num_bins: int) -> list[int]:
    """Neighbouring counts added up so that at most `num_bins` remain."""
    width = -(-len(counts) // num_bins)
    return [sum(counts[i : i + width]) for i in range(0, len(counts), width)]


def _stream_stats(
    stream: StreamSpec, array: npt.NDArray[np.generic], spec: PageSpec
) -> StreamStats:
    layout = code_layout(stream, spec)
    if layout is not None:
        return _of_codes(stream, unpack_codes(array, *layout), layout[0])
    if stream.dtype == "bfloat16":
        array = bfloat16_to_float32(array)
    return _of_numbers(stream, array.astype(np.float64).reshape(-1))


def _of_codes(stream: StreamSpec, codes: npt.NDArray[np.uint8], bits: int) -> StreamStats:
    counts = np.bincount(codes.reshape(-1), minlength=1 << bits)
    shares = counts[counts > 0] / codes.size
    return StreamStats(
        stream=stream,
        bits=bits,
        num_elements=codes.size,
        minimum=float(codes.min()),
        maximum=float(codes.max()),
        mean=float(codes.mean()),
        std=float(codes.std()),
        num_zeros=int(counts[0]),
        num_nan=0,
        num_infinite=0,
        entropy=abs(float((shares * np.log2(shares)).sum())),
        counts=tuple(counts.tolist()),
    )


def _of_numbers(stream: StreamSpec, numbers: npt.NDArray[np.float64]) -> StreamStats:
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    return StreamStats(
        stream=stream,
        bits=None,
        num_elements=numbers.size,
        minimum=low,
        maximum=high,
        mean=float(finite.mean()) if finite.size else None,
        std=float(finite.std()) if finite.size else None,
        num_zeros=int((numbers == 0).sum()),
        num_nan=int(np.isnan(numbers).sum()),
        num_infinite=int(np.isinf(numbers).sum()),
        entropy=None,
        counts=_histogram(finite, low, high),
    )


def _histogram(
    finite: npt.NDArray[np.float64], low: float | None, high: float | None
) -> tuple[int, ...]:
    if low is None or high is None:
        return ()
    # Numbers that differ by less than a bin can resolve share one.
    if high - low <= NUM_BINS * np.spacing(max(abs(low), abs(high))):
        return (finite.size,)
    return tuple(np.histogram(finite, NUM_BINS, (low, high))[0].tolist())
