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
from tqstore.format.block_hash import BlockRecord, Tokens, chain_blocks


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

    def records_of(self, blocks: npt.NDArray[np.int64]) -> list[BlockRecord]:
        """Records of blocks whose tokens are known."""
        found = [self._blocks[block].record for block in blocks.tolist()]
        assert None not in found, "only blocks of known tokens have records"
        return [record for record in found if record is not None]

    def adopt(self, blocks: Sequence[Block]) -> None:
        """Replaces the blocks by those of a stored sequence."""
        self._blocks = list(blocks)

    def grow(self, num_blocks: int) -> None:
        """Room for `num_blocks` blocks; new ones are unnamed."""
        while len(self._blocks) < num_blocks:
            self._blocks.append(Block())

    def truncate(self, num_blocks: int) -> None:
        del self._blocks[num_blocks:]

    def name(self, tokens: Tokens) -> None:
        """Tells the sequence's tokens from its start: names every block they fill.

        Raises InvalidInput where they contradict what is known; nothing is named then.
        """
        told = chain_blocks(self.root, tokens, self.page_tokens)[: len(self._blocks)]
        for index, (block, record) in enumerate(zip(self._blocks, told, strict=False)):
            if block.hash not in (None, record.hash):
                last = (index + 1) * self.page_tokens - 1
                raise InvalidInput(
                    f"the tokens given differ from the cache's own at or before position {last}",
                    doing="naming blocks",
                    remedy="Give the very tokens whose keys and values were appended",
                )
        for block, record in zip(self._blocks, told, strict=False):
            block.hash, block.record = record.hash, record

    def fork(self) -> BlockChain:
        return BlockChain(self.root, self.page_tokens, self._blocks)
