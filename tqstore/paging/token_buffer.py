"""A sequence's tokens, told one by one or all at once: a buffer that grows in place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_TOKENS = 256


class TokenBuffer:
    """int64 tokens; writing n of them at the end costs O(n), whatever is before them.

    A fork shares the memory until one of the two writes, and then has its own.
    """

    def __init__(self) -> None:
        self._room = np.zeros(0, np.int64)
        self._length = 0
        self._is_shared = False

    def __len__(self) -> int:
        return self._length

    def part(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Tokens first..last-1, as far as there are any: a view, valid until the next write."""
        return self._room[first : min(last, self._length)]

    def write(self, start: int, tokens: npt.NDArray[np.int64]) -> None:
        """Replaces everything from `start` <= len(self) on by `tokens`."""
        length = start + len(tokens)
        if self._is_shared or length > len(self._room):
            # Doubled, so that growing token by token copies each one a bounded number of times.
            room = np.empty(max(length, 2 * start, _FIRST_TOKENS), np.int64)
            room[:start] = self._room[:start]
            self._room, self._is_shared = room, False
        self._room[start:length] = tokens
        self._length = length

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def fork(self) -> TokenBuffer:
        twin = TokenBuffer()
        twin._room, twin._length = self._room, self._length
        twin._is_shared = self._is_shared = True
        return twin
