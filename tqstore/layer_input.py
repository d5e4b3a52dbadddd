"""What a layer is given: arrays are checked before anything changes.

Raises InvalidInput, with the layer, what was given and what is wanted.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.errors import InvalidInput
from tqstore.paging.page_records import MLX_DTYPES
from tqstore.spec import PageSpec
from tqstore.tail import Tail


def checked_tokens(layer: int, spec: PageSpec, keys: mx.array, values: mx.array) -> Tail:
    """New tokens [kv_heads, n >= 1, dim] of keys and values, in the dtype of the cache."""
    _require_mlx("keys", keys, doing="appending")
    _require_mlx("values", values, doing="appending")
    num_new = keys.shape[1] if keys.ndim == 3 else 0
    wanted = {
        "keys": (keys, (spec.kv_heads, num_new, spec.key_dim)),
        "values": (values, (spec.kv_heads, num_new, spec.value_dim)),
    }
    for name, (array, shape) in wanted.items():
        if tuple(array.shape) != shape or num_new == 0:
            raise InvalidInput(
                f"layer {layer}: {name} have shape {tuple(array.shape)}, not "
                f"[{shape[0]}, n >= 1, {shape[2]}] with equal n for keys and values",
                doing="appending",
            )
        if array.dtype != MLX_DTYPES[spec.dtype]:
            raise InvalidInput(
                f"layer {layer}: {name} are {array.dtype}, the cache holds {spec.dtype}",
                doing="appending",
                remedy=f"Cast them, or make the cache with dtype={str(array.dtype)[9:]!r}",
            )
    return Tail(keys, values)


def check_queries(layer: int, spec: PageSpec, queries: mx.array, num_tokens: int) -> None:
    """Queries [query_heads, n, key_dim] of the last n of `num_tokens` tokens."""
    _require_mlx("queries", queries, doing="attending")
    shape = tuple(queries.shape)
    if len(shape) != 3 or shape[2] != spec.key_dim or shape[0] % spec.kv_heads or not shape[0]:
        raise InvalidInput(
            f"layer {layer}: queries have shape {shape}, not [a multiple of "
            f"{spec.kv_heads}, n, {spec.key_dim}]",
            doing="attending",
        )
    if not 1 <= shape[1] <= num_tokens:
        raise InvalidInput(
            f"layer {layer}: {shape[1]} queries for {num_tokens} tokens",
            doing="attending",
            remedy="Append the keys and values of the queries' tokens first",
        )


def _require_mlx(name: str, array: object, *, doing: str) -> None:
    if not isinstance(array, mx.array):
        kind = type(array)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise InvalidInput(
            f"{name} must be an mlx array, not {module}{kind.__qualname__}",
            doing=doing,
            remedy="Convert it: mlx.core.array(...)",
        )
