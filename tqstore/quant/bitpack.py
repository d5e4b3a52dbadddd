"""Index codes <-> LSB-first bit streams, one stream a row.

Owns the bit order and nothing else: code `i` of a row takes bits `i*bits .. (i+1)*bits - 1` of its
stream, bit `k` of a stream being bit `k % 8` of byte `k // 8`.  For 1, 2, 3, 4, 5, 6 and 8 bits
this is MLX's own packing, so a stream of whole 32-bit words goes into `mx.quantized_matmul` as is.

Eight codes are one 64-bit word in memory (little-endian) before packing and `bits` bytes after it;
three shift-and-mask steps bring them together or apart, whatever `bits` is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx

CODES_A_WORD = 8


def row_nbytes(dim: int, bits: int) -> int:
    """Bytes of the stream of one row of `dim` codes."""
    return -(-dim * bits // 8)


def pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes [..., dim], each below 2^bits -> uint8 [..., row_nbytes(dim, bits)]."""
    if bits == 8:
        return codes
    *batch, dim = codes.shape
    codes = _pad_last(codes, -dim % CODES_A_WORD)
    words = _gather(bits)(mx.view(codes, mx.uint64))  # [..., words]
    packed = mx.view(words, mx.uint8).reshape(*batch, -1, 8)[..., :bits]
    return packed.reshape(*batch, -1)[..., : row_nbytes(dim, bits)]


def unpack(stream: mx.array, bits: int, dim: int) -> mx.array:
    """Inverse of `pack`; `stream` is uint8 [..., row_nbytes] or the same bytes as uint32 words."""
    if bits == 8:
        return as_bytes(stream)
    words = _words_of(stream, bits, -(-dim // CODES_A_WORD))
    return mx.view(_scatter(bits)(words), mx.uint8)[..., :dim]


def _words_of(stream: mx.array, bits: int, num_words: int) -> mx.array:
    """uint64 [..., num_words]: the `bits` bytes of eight codes each, and zeros above them."""
    whole = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}.get(bits)
    row = stream.shape[-1] * stream.itemsize
    if whole is not None and row == num_words * bits:
        return mx.view(stream, whole).astype(mx.uint64)
    stream = _pad_last(as_bytes(stream), num_words * bits - row)
    eights = stream.reshape(*stream.shape[:-1], num_words, bits)
    if bits == 3:
        return _three_bytes(*(eights[..., byte] for byte in range(3)))
    return mx.view(_pad_last(eights, 8 - bits), mx.uint64).squeeze(-1)


@mx.compile
def _three_bytes(low: mx.array, middle: mx.array, high: mx.array) -> mx.array:
    low, middle, high = (byte.astype(mx.uint64) for byte in (low, middle, high))
    return low | (middle << 8) | (high << 16)


def as_bytes(stream: mx.array) -> mx.array:
    """The same stream as uint8, from uint8 or uint32 words."""
    return stream if stream.dtype == mx.uint8 else mx.view(stream, mx.uint8)


def as_words(stream: mx.array) -> mx.array | None:
    """The same stream as uint32 words, or None where a row is not a whole number of words."""
    if stream.dtype == mx.uint32:
        return stream
    return mx.view(stream, mx.uint32) if stream.shape[-1] % 4 == 0 else None


def _pad_last(array: mx.array, count: int) -> mx.array:
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, count)]) if count else array


def _fields(width: int, period: int, start: int = 0) -> mx.array:
    """64 bits with `width` of every `period` set, from bit `start` of each period."""
    value = sum(((1 << width) - 1) << at for at in range(start, 64, period))
    return mx.array(value, mx.uint64)


def _gather_steps(words: mx.array, bits: int) -> mx.array:
    """Fields of `bits` in every 8 bits -> 2 * bits in every 16 -> 4 * bits in 32 -> 8 * bits."""
    for size in (1, 2, 4):
        width, period = size * bits, 16 * size
        low = words & _fields(width, period)
        high = (words >> (8 * size - width)) & _fields(width, period, start=width)
        words = low | high
    return words


def _scatter_steps(words: mx.array, bits: int) -> mx.array:
    for size in (4, 2, 1):
        width, period = size * bits, 16 * size
        low = words & _fields(width, period)
        high = (words & _fields(width, period, start=width)) << (8 * size - width)
        words = low | high
    return words


@cache
def _gather(bits: int) -> Callable[[mx.array], mx.array]:
    return mx.compile(partial(_gather_steps, bits=bits), shapeless=True)


@cache
def _scatter(bits: int) -> Callable[[mx.array], mx.array]:
    return mx.compile(partial(_scatter_steps, bits=bits), shapeless=True)
