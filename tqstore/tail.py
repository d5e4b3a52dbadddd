"""Dense keys and values of some tokens, in the model's dtype: the tail, and whatever is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from tqstore.paging.page_records import MLX_DTYPES
from tqstore.spec import DTYPE_NBYTES, PageSpec

# Bytes up to which parts are joined lazily, in one go, with all of them in memory at once.
LAZY_NBYTES = 16 << 20


@dataclass(frozen=True)
class Tail:
    """Keys [kv_heads, n, key_dim] and values [.., value_dim] of n consecutive tokens."""

    keys: mx.array
    values: mx.array

    @classmethod
    def empty(cls, spec: PageSpec) -> Tail:
        return cls(*_room(spec, 0))

    @classmethod
    def joined(cls, spec: PageSpec, num_tokens: int, parts: Iterable[Tail]) -> Tail:
        """Consecutive parts of `num_tokens` tokens in all.

        A large result is filled part by part, so that only one part is in memory beside it.
        """
        per_token = spec.kv_heads * (spec.key_dim + spec.value_dim) * DTYPE_NBYTES[spec.dtype]
        if num_tokens * per_token <= LAZY_NBYTES:
            return _concatenated(spec, [part for part in parts if len(part)])
        keys, values = _room(spec, num_tokens)
        position = 0
        for part in parts:
            last = position + len(part)
            keys[:, position:last] = part.keys
            values[:, position:last] = part.values
            mx.eval(keys, values)
            position = last
        return cls(keys, values)

    def __len__(self) -> int:
        return int(self.keys.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def slice(self, first: int, last: int | None = None) -> Tail:
        return Tail(self.keys[:, first:last], self.values[:, first:last])

    def copy(self) -> Tail:
        """Memory of its own, so that a slice does not keep a whole prompt's arrays alive."""
        twin = Tail(mx.contiguous(self.keys), mx.contiguous(self.values))
        mx.eval(twin.keys, twin.values)
        return twin

    def is_finite(self) -> mx.array:
        return mx.isfinite(self.keys).all() & mx.isfinite(self.values).all()


def _room(spec: PageSpec, num_tokens: int) -> tuple[mx.array, mx.array]:
    dtype = MLX_DTYPES[spec.dtype]
    return (
        mx.zeros((spec.kv_heads, num_tokens, spec.key_dim), dtype=dtype),
        mx.zeros((spec.kv_heads, num_tokens, spec.value_dim), dtype=dtype),
    )


def _concatenated(spec: PageSpec, parts: list[Tail]) -> Tail:
    if len(parts) < 2:
        return parts[0] if parts else Tail.empty(spec)
    return Tail(
        mx.concatenate([part.keys for part in parts], axis=1),
        mx.concatenate([part.values for part in parts], axis=1),
    )
