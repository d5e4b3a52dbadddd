"""The packed vectors of one side of one cache, a row a token, in buffers that grow.

Owns where rows lie, the ring, and the bytes.  Owns no quantizer (it is given a codec of
tqstore.quant) and knows nothing of attention.  Each token is encoded as a page of its own, so that
what is stored does not depend on how appends were split; its unit, a power of two, is kept as the
one byte of its exponent.
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx

from tqstore.quant.codec import Codec, Streams

BLOCK_TOKENS = 256
# Slots grow by a quarter: four copies a byte in all, a fifth of them free at most.
GROWTH = 4
_MANTISSA_BITS = 23
_UNITS = "units"
_SCALES = "scales"


class TokenStreams:
    """Vectors [heads, tokens, dim] as a codec's streams, `capacity` of them at most.

    With a capacity the newest token takes the oldest one's slot.  One thread at a time.  A deep
    copy shares the codec and, until either is appended to, the memory.
    """

    def __init__(self, codec: Codec, heads: int, capacity: int | None = None) -> None:
        self.codec = codec
        self.num_appended = 0
        self._heads = heads
        self._capacity = capacity
        self._buffers: dict[str, mx.array] = {}  # each [slots, heads, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
        if self._capacity is None:
            return self.num_appended
        return min(self.num_appended, self._capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are held."""
        return self.num_tokens * self._token_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """The same with the slots that are not taken yet."""
        return self._num_slots * self._token_nbytes

    def append(self, vectors: mx.array) -> None:
        """Finite vectors [heads, n, dim], encoded and written before this returns."""
        num_new = vectors.shape[1]
        num_kept = num_new if self._capacity is None else min(num_new, self._capacity)
        rows = self._encode(vectors[:, num_new - num_kept :])
        total = self.num_appended + num_new
        self._grow(rows, total)
        self._write(rows, total - num_kept)
        mx.eval(self._buffers)
        self.num_appended = total

    def streams(self) -> Streams:
        """What the codec reads: [blocks, heads, BLOCK_TOKENS, ...], in slot order.

        Slots of the last block beyond `num_tokens` hold nothing: see `visible`.
        """
        blocks = -(-self.num_tokens // BLOCK_TOKENS)
        views = {name: self._blocks(buffer, blocks) for name, buffer in self._buffers.items()}
        for name in [name for name in views if name.endswith(_UNITS)]:
            scales = f"{name.removesuffix(_UNITS)}{_SCALES}"
            units = mx.view(views[name].astype(mx.int32) << _MANTISSA_BITS, mx.float32)
            views[scales] = views[scales].astype(mx.float32) * units
            views[name] = mx.ones((blocks, self._heads))
        return views

    def visible(self) -> mx.array:
        """bool [blocks, BLOCK_TOKENS]: which slots of `streams` hold a token."""
        blocks = -(-self.num_tokens // BLOCK_TOKENS)
        slots = mx.arange(blocks * BLOCK_TOKENS).reshape(blocks, BLOCK_TOKENS)
        return slots < self.num_tokens

    def decode(self) -> mx.array:
        """[heads, num_tokens, dim], the oldest token first."""
        decoded = self.codec.decode(self.streams())  # [blocks, heads, BLOCK_TOKENS, dim]
        rows = decoded.swapaxes(0, 1).flatten(1, 2)[:, : self.num_tokens]
        if self.num_appended == self.num_tokens:
            return rows
        return mx.roll(rows, -(self.num_appended % self.num_tokens), 1)

    def clear(self) -> None:
        """Forgets every token and frees the buffers."""
        self._buffers, self.num_appended = {}, 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> TokenStreams:
        copied = TokenStreams(self.codec, self._heads, self._capacity)
        copied.num_appended = self.num_appended
        copied._buffers = {name: mx.array(buffer) for name, buffer in self._buffers.items()}
        return copied

    @property
    def _num_slots(self) -> int:
        return next((len(buffer) for buffer in self._buffers.values()), 0)

    @property
    def _token_nbytes(self) -> int:
        return sum(prod(buffer.shape[1:]) * buffer.dtype.size for buffer in self._buffers.values())

    def _encode(self, vectors: mx.array) -> dict[str, mx.array]:
        """[heads, n, dim] -> rows [n, heads, ...] of each stream."""
        streams = self.codec.encode(vectors.swapaxes(0, 1)[:, :, None])  # pages of one token
        return {
            name: _exponents(rows) if name.endswith(_UNITS) else rows.squeeze(2)
            for name, rows in streams.items()
        }

    def _grow(self, rows: dict[str, mx.array], total: int) -> None:
        """Makes room for `total` tokens, or for as many as the ring has."""
        needed = total if self._capacity is None else min(total, self._capacity)
        slots = self._num_slots
        if needed <= slots:
            return
        wanted = max(needed, slots + slots // GROWTH)
        if self._capacity is not None:
            wanted = min(wanted, self._capacity)
        wanted = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
        for name, row in rows.items():
            added = mx.zeros((wanted - slots, *row.shape[1:]), dtype=row.dtype)
            held = self._buffers.get(name)
            self._buffers[name] = added if held is None else mx.concatenate([held, added])

    def _write(self, rows: dict[str, mx.array], first: int) -> None:
        """Rows of the tokens `first` on into their slots: at the ring's end in two pieces."""
        count = len(next(iter(rows.values())))
        slot = first if self._capacity is None else first % self._capacity
        split = count if self._capacity is None else min(count, self._capacity - slot)
        for name, row in rows.items():
            buffer = self._buffers[name]
            buffer[slot : slot + split] = row[:split]
            if split < count:
                buffer[: count - split] = row[split:]

    def _blocks(self, buffer: mx.array, blocks: int) -> mx.array:
        rows = buffer[: blocks * BLOCK_TOKENS]
        return rows.reshape(blocks, BLOCK_TOKENS, *buffer.shape[1:]).swapaxes(1, 2)


def _exponents(units: mx.array) -> mx.array:
    """Positive float32 powers of two -> the biased exponent that is all of them, uint8."""
    return (mx.view(units, mx.int32) >> _MANTISSA_BITS).astype(mx.uint8)
