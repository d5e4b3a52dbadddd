"""The slots of one layer: page records in MLX memory, reference counts, generations.

Owns slots and who holds them.  Knows no budget (hot_pool) and moves nothing to or from disk
(pager).
A slot handed out again gets a new generation, so that an old `ref` to it is known to be stale.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.paging.block_chain import Block
from tqstore.paging.page_records import page_words
from tqstore.paging.page_table import Refs
from tqstore.spec import PageSpec

SEGMENT_NBYTES = 16 << 20
MIN_SEGMENT_PAGES = 8
MAX_SEGMENT_PAGES = 256
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_PER_SLOT = ("num_references", "num_pins", "generation", "is_durable", "last_used", "block_idx")

Slots = npt.NDArray[np.int64]


def segment_pages(spec: PageSpec) -> int:
    """Pages a segment: a power of two, about 16 MiB, so that growing copies a bounded amount."""
    fitting = max(1, SEGMENT_NBYTES // spec.page_nbytes)
    return min(MAX_SEGMENT_PAGES, max(MIN_SEGMENT_PAGES, 1 << (fitting.bit_length() - 1)))


class Arena:
    """The slots of one layer, in segments `uint32 [pages, page_words]`.

    All segments but the last are full-size; the last doubles until it is.  Invariant: a slot is
    free (in the heap, no references) or used (at least one reference), never both.
    """

    def __init__(self, spec: PageSpec) -> None:
        self.spec = spec
        self.segment_pages = segment_pages(spec)
        self.segments: list[mx.array] = []
        self.num_references = np.zeros(0, np.int32)
        self.generation = np.zeros(0, np.int64)
        self.num_pins = np.zeros(0, np.int32)
        self.is_durable = np.zeros(0, np.bool_)
        self.last_used = np.zeros(0, np.int64)
        self.block_idx = np.zeros(0, np.int64)  # where in its sequences the page stands
        self.hash_of: dict[int, bytes] = {}  # durable slots only
        self.slot_of: dict[bytes, int] = {}  # its inverse: pages any sequence may share
        self.block_of: dict[int, Block] = {}  # slots not yet durable: whose page it is
        self._free: list[int] = []
        self._generations = 0

    @property
    def num_slots(self) -> int:
        return len(self.num_references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - self.num_free

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.spec.page_nbytes

    @property
    def used_nbytes(self) -> int:
        return self.num_used * self.spec.page_nbytes

    @property
    def evictable(self) -> Slots:
        """Used slots whose page is durable and not pinned."""
        return np.flatnonzero((self.num_references > 0) & self.is_durable & (self.num_pins == 0))

    def allocate(self, count: int, spare_pages: int = MAX_SEGMENT_PAGES) -> Slots:
        """`count` slots with one reference each, lowest first so that runs stay contiguous.

        Growing may add up to `spare_pages` slots more than needed.
        """
        while len(self._free) < count:
            self._grow(count - len(self._free), max(0, spare_pages))
        slots = np.array([heapq.heappop(self._free) for _ in range(count)], np.int64)
        self.num_references[slots] = 1
        return slots

    def release(self, slots: Slots) -> None:
        """Takes one reference from each; slots left with none are free and get a new generation."""
        np.subtract.at(self.num_references, slots, 1)
        for slot in slots[self.num_references[slots] == 0].tolist():
            self._free_slot(slot)

    def evict(self, slots: Slots) -> None:
        """Frees durable slots whatever refers to them: those refs read as cold from now on."""
        assert bool(self.is_durable[slots].all()), "only durable pages may be evicted"
        self.num_references[slots] = 0
        for slot in slots.tolist():
            self._free_slot(slot)

    def retain(self, slots: Slots) -> None:
        np.add.at(self.num_references, slots, 1)

    def pin(self, slots: Slots) -> None:
        """Keeps pages from being evicted; counted."""
        np.add.at(self.num_pins, slots, 1)

    def unpin(self, slots: Slots) -> None:
        np.subtract.at(self.num_pins, slots, 1)

    def shrink(self) -> int:
        """Gives back trailing segments that hold no page; how many bytes that freed."""
        before = self.nbytes
        while self.segments:
            first = (len(self.segments) - 1) * self.segment_pages
            if (self.num_references[first:] > 0).any():
                break
            self.segments.pop()
            self._resize(first)
        self._free = [slot for slot in self._free if slot < self.num_slots]
        heapq.heapify(self._free)
        return before - self.nbytes

    def unsaved(self) -> Slots:
        """Slots whose page could be written out: not durable yet, its block's tokens known."""
        named = [slot for slot, block in self.block_of.items() if block.record is not None]
        return np.array(sorted(named), np.int64)

    def mark_durable(self, slots: Slots, hashes: Sequence[bytes]) -> None:
        self.is_durable[slots] = True
        for slot in slots.tolist():
            self.block_of.pop(slot, None)
        for slot, block_hash in zip(slots.tolist(), hashes, strict=True):
            self.hash_of[slot] = block_hash
            self.slot_of.setdefault(block_hash, slot)

    def mark_unsaved(self, slot: int, block: Block) -> None:
        """The inverse: the store has lost the page of `block` that this slot holds."""
        self.is_durable[slot] = False
        self.block_of[slot] = block
        self._forget_name(slot)

    def refs(self, slots: Slots) -> Refs:
        return (self.generation[slots] << _SLOT_BITS) | slots

    def resolve(self, refs: Refs) -> Slots:
        """refs -> slots, -1 where the entry is not a ref or its page was evicted."""
        slots = refs & _SLOT_MASK
        known = (refs >= 0) & (slots < self.num_slots)
        slots = np.where(known, slots, 0)
        if self.num_slots == 0:
            return np.full(len(refs), -1, np.int64)
        return np.where(known & (self.generation[slots] == refs >> _SLOT_BITS), slots, -1)

    def hot(self, refs: Refs) -> Slots:
        """Slots of those `refs` whose page is still here."""
        slots = self.resolve(refs)
        return slots[slots >= 0]

    def write(self, slots: Slots, records: mx.array) -> None:
        """records uint32 [len(slots), page_words] into their slots, in place.

        Evaluated at once: a pending write would keep the records alive beside their copy.
        """
        for first, last in contiguous_runs(slots, self.segment_pages):
            segment_idx, row = divmod(int(slots[first]), self.segment_pages)
            segment = self.segments[segment_idx]
            count = last - first
            whole = row == 0 and count == segment.shape[0]
            part = records[first:last]
            if whole:
                self.segments[segment_idx] = part
            else:
                segment[row : row + count] = part
            mx.eval(self.segments[segment_idx])

    def rows(self, slot: int, count: int) -> mx.array:
        """Records of `count` adjacent slots of one segment, a view."""
        segment_idx, row = divmod(slot, self.segment_pages)
        return self.segments[segment_idx][row : row + count]

    def _forget_name(self, slot: int) -> None:
        block_hash = self.hash_of.pop(slot, None)
        if block_hash is not None and self.slot_of.get(block_hash) == slot:
            del self.slot_of[block_hash]

    def _free_slot(self, slot: int) -> None:
        self.block_of.pop(slot, None)
        self._forget_name(slot)
        self.generation[slot] = self._next_generation()
        self.num_pins[slot] = 0
        self.is_durable[slot] = False
        heapq.heappush(self._free, slot)

    def _grow(self, missing: int, spare_pages: int) -> None:
        first = self.num_slots
        in_last = first % self.segment_pages
        words = page_words(self.spec)
        if in_last:
            # Doubling, so that growing page by page copies each page a bounded number of times.
            wanted = max(missing, min(in_last, missing + spare_pages))
            added = min(self.segment_pages - in_last, wanted)
            room = mx.zeros((added, words), dtype=mx.uint32)
            self.segments[-1] = mx.concatenate([self.segments[-1], room])
        else:
            wanted = max(missing, min(MIN_SEGMENT_PAGES, missing + spare_pages))
            added = min(self.segment_pages, wanted)
            self.segments.append(mx.zeros((added, words), dtype=mx.uint32))
        self._resize(first + added)
        self.generation[first:] = self._next_generation()
        for slot in range(first, first + added):
            heapq.heappush(self._free, slot)

    def _resize(self, num_slots: int) -> None:
        for name in (
            "num_references",
            "num_pins",
            "generation",
            "is_durable",
            "last_used",
            "block_idx",
        ):
            old = getattr(self, name)[:num_slots]
            setattr(self, name, np.concatenate([old, np.zeros(num_slots - len(old), old.dtype)]))

    def _next_generation(self) -> int:
        """Never the same twice, so that a ref to a slot given back and grown anew is stale too."""
        self._generations += 1
        return self._generations


def by_segment(slots: Slots, segment_pages: int) -> list[Slots]:
    """`slots` cut wherever the segment changes."""
    if len(slots) == 0:
        return []
    return np.split(slots, np.flatnonzero(np.diff(slots // segment_pages)) + 1)


def contiguous_runs(slots: Slots, segment_pages: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of `slots` that ascend by one within one segment."""
    if len(slots) == 0:
        return []
    breaks = (np.diff(slots) != 1) | (slots[1:] % segment_pages == 0)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
    return list(pairwise(edges))
