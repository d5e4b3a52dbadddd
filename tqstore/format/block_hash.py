"""Token blocks: the chained hash that addresses them, and which of them a layer still needs.

h_0 = the namespace id (32 bytes); h_i = sha256(h_{i-1} || tokens)[:16], tokens as little-endian
int64.
A hash therefore stands for the model, the settings and every token up to the block's end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tqstore.errors import InvalidInput

HASH_NBYTES = 16
NAMESPACE_ID_NBYTES = 32
Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class BlockRecord:
    """A block's hash, what was hashed before its tokens, and its tokens.

    `parent` is the parent's hash, or the 32-byte namespace id for a chain's first block.
    `tokens` int64 [page_tokens]: vision tokens are negative.
    """

    hash: bytes
    parent: bytes
    tokens: npt.NDArray[np.int64]

    @property
    def is_first(self) -> bool:
        return len(self.parent) == NAMESPACE_ID_NBYTES

    @property
    def token_bytes(self) -> bytes:
        """Little-endian int64, 8 * page_tokens bytes: what is hashed and stored."""
        return self.tokens.astype("<i8", copy=False).tobytes()


def as_tokens(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Tokens as int64 [n]; InvalidInput unless they are a flat run of 64-bit integers."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"tokens are not a flat sequence of integers: {error}") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput(
            f"tokens must be a flat sequence of 64-bit integers, not {array.ndim}-D {array.dtype}"
        )
    if array.dtype == np.uint64 and int(array.max()) >= 1 << 63:
        raise InvalidInput("a token does not fit a signed 64-bit integer")
    return array.astype(np.int64)


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a block with little-endian int64 `tokens` after `parent` (namespace id first)."""
    return hashlib.sha256(parent + tokens).digest()[:HASH_NBYTES]


def extend_chain(parent: bytes, rows: npt.NDArray[np.int64]) -> list[bytes]:
    """Hashes of the blocks whose tokens are the rows of int64 [blocks, page_tokens]."""
    raw = np.ascontiguousarray(rows, "<i8")
    hashes = []
    for row in raw:
        parent = block_hash(parent, row.tobytes())
        hashes.append(parent)
    return hashes


def chain_blocks(parent: bytes, tokens: Tokens, page_tokens: int) -> list[BlockRecord]:
    """The whole blocks of `tokens` chained after `parent`; a rest shorter than a block is left."""
    flat = as_tokens(tokens)
    whole = len(flat) // page_tokens
    rows = flat[: whole * page_tokens].reshape(whole, page_tokens)
    hashes = extend_chain(parent, rows)
    parents = [parent, *hashes][:whole]
    return [BlockRecord(*block) for block in zip(hashes, parents, rows, strict=True)]


def needed_blocks(
    num_blocks: int, page_tokens: int, window: int | None, sink_tokens: int = 0
) -> tuple[int, int]:
    """(sinks, first): resuming at `num_blocks` needs blocks [0, sinks) and [first, num_blocks).

    A layer that sees `window` tokens needs the last ceil(window / page_tokens) + 1 blocks: as many
    as the window can touch wherever in a block it starts.  `sinks` never exceeds `first`.
    """
    if window is None:
        return 0, 0
    first = max(0, num_blocks - (-(-window // page_tokens) + 1))
    return min(first, -(-sink_tokens // page_tokens)), first
