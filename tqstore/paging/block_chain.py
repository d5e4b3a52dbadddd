"""The blocks of one sequence: their tokens and chained hashes, as far as they are known.

A cache learns tokens later than it learns keys and values, or only when it is saved; until then
a block has no name and its pages cannot leave the process.  Forks share the blocks they have in
common, so that what one of them learns the others know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tqstore.errors import InvalidInput
from tqstore.format.block_hash import BlockRecord, Tokens, as_tokens, chain_blocks
from tqstore.paging.token_buffer import TokenBuffer


class Block:
    """One token block: its hash and, when its tokens were told, its whole record."""

    __slots__ = ("hash", "record")

    def __init__(self, block_hash: bytes | None = None, record: BlockRecord | None = None) -> None:
        self.hash = block_hash
        self.record = record


class BlockChain:
    """Blocks 0.. of a sequence under one namespace, named front to back."""

    def __init__(self, root: bytes, page_tokens: int, blocks: Sequence[Block] = ()) -> None:
        self.root = root  # namespace id: the hash before the first block's
        self.page_tokens = page_tokens
        self._blocks = list(blocks)
        self._told = TokenBuffer()

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, block_idx: int) -> Block:
        return self._blocks[block_idx]

    @property
    def num_named(self) -> int:
        """Blocks whose hash is known: always a prefix."""
        low, high = 0, len(self._blocks)
        while low < high:
            middle = (low + high) // 2
            if self._blocks[middle].hash is None:
                high = middle
            else:
                low = middle + 1
        return low

    def hashes_of(self, blocks: npt.NDArray[np.int64]) -> list[bytes]:
        """Hashes of the named blocks of those indices."""
        found = [self._blocks[block].hash for block in blocks.tolist()]
        assert None not in found, "only named blocks have hashes"
        return [block_hash for block_hash in found if block_hash is not None]

    def adopt(self, blocks: Sequence[Block]) -> None:
        """Replaces the blocks by those of a stored sequence."""
        self._blocks = list(blocks)

    @property
    def num_told(self) -> int:
        """Tokens told from the start; may run ahead of what the cache holds."""
        return len(self._told)

    def tell(self, tokens: Tokens, start: int = 0) -> None:
        """Tells the sequence's tokens from position `start` on and names the blocks they fill.

        What was told beyond is forgotten.  Costs by what is told, not by what is known.
        Raises InvalidInput, with nothing changed, where the tokens contradict a block that has its
        name, or leave a gap.
        """
        if not 0 <= start <= len(self._told):
            raise InvalidInput(
                f"tokens from position {start} on, but only {len(self._told)} are known",
                doing="telling tokens",
                remedy="Tell all tokens from the start",
            )
        new = as_tokens(tokens)
        first = start // self.page_tokens
        begun = self._told.part(first * self.page_tokens, start)
        self._name(first, np.concatenate([begun, new]))
        self._told.write(start, new)

    def confirm(self, tokens: Tokens) -> None:
        """Tells all tokens from the start; what was told beyond them stays if they agree."""
        told = as_tokens(tokens)
        if not np.array_equal(self._told.part(0, len(told)), told):
            self.tell(told)

    def blocks(self, first: int, last: int) -> list[Block]:
        return self._blocks[first:last]

    def grow(self, num_blocks: int) -> None:
        """Room for `num_blocks` blocks; new ones are named if their tokens were told."""
        if num_blocks <= len(self._blocks):
            return
        first = self.num_named
        self._blocks += [Block() for _ in range(num_blocks - len(self._blocks))]
        told = self._told.part(first * self.page_tokens, num_blocks * self.page_tokens)
        self._name(first, told)

    def truncate(self, num_blocks: int, num_tokens: int | None = None) -> None:
        """Forgets blocks and, if given, told tokens from there on."""
        del self._blocks[num_blocks:]
        if num_tokens is not None:
            self._told.truncate(num_tokens)

    def fork(self) -> BlockChain:
        twin = BlockChain(self.root, self.page_tokens, self._blocks)
        twin._told = self._told.fork()
        return twin

    def _name(self, first: int, tokens: npt.NDArray[np.int64]) -> None:
        """Names blocks from `first` on as far as `tokens`, which begin there, fill them.

        Blocks before it have their names.  InvalidInput before any change.
        """
        last = min(len(self._blocks), first + len(tokens) // self.page_tokens)
        if first >= last:
            return
        parent = self.root if first == 0 else self._blocks[first - 1].hash
        assert parent is not None, "blocks are named front to back"
        part = tokens[: (last - first) * self.page_tokens]
        records = chain_blocks(parent, part, self.page_tokens)
        for block, record in zip(self._blocks[first:last], records, strict=True):
            if block.hash not in (None, record.hash):
                raise InvalidInput(
                    "the tokens given differ from the cache's own at or before position "
                    f"{last * self.page_tokens - 1}",
                    doing="naming blocks",
                    remedy="Give the very tokens whose keys and values were appended",
                )
        for block, record in zip(self._blocks[first:last], records, strict=True):
            block.hash, block.record = record.hash, record
