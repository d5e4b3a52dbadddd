"""The slots of one layer: page records in MLX memory, reference counts, generations.

Owns slots and who holds them.  Knows no budget (hot_pool) and moves nothing to or from disk
(pager).
A slot handed out again gets a new generation, so that an old `ref` to it is known to be stale.
A slot is a page's name here and its `row` the place in memory: to give memory back pages move to
other rows, and nobody who holds a slot or a ref needs to know.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.paging.block_chain import Block
from tqstore.paging.page_table import Refs
from tqstore.paging.segments import MAX_SEGMENT_PAGES, Segments
from tqstore.spec import PageSpec

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_PER_SLOT = (
    "num_references",
    "num_pins",
    "generation",
    "is_durable",
    "last_used",
    "block_idx",
    "row_of",
)

Slots = npt.NDArray[np.int64]


class Arena:
    """The slots of one layer.

    Invariant: a slot is used (at least one reference), free (in the heap, no references) or bare
    (no references, and its row was given back), one of the three.
    """

    def __init__(self, spec: PageSpec) -> None:
        self.spec = spec
        self.segments = Segments(spec)
        self.num_references = np.zeros(0, np.int32)
        self.generation = np.zeros(0, np.int64)
        self.num_pins = np.zeros(0, np.int32)
        self.is_durable = np.zeros(0, np.bool_)
        self.last_used = np.zeros(0, np.int64)
        self.block_idx = np.zeros(0, np.int64)  # where in its sequences the page stands
        self.hash_of: dict[int, bytes] = {}  # durable slots only
        self.slot_of: dict[bytes, int] = {}  # its inverse: pages any sequence may share
        self.block_of: dict[int, Block] = {}  # slots not yet durable: whose page it is
        self.row_of = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._bare: list[int] = []
        self._generations = 0

    @property
    def num_slots(self) -> int:
        return len(self.num_references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_rows(self) -> int:
        return self.num_slots - len(self._bare)

    @property
    def num_used(self) -> int:
        return self.num_rows - self.num_free

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.spec.page_nbytes

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

    def compact(self) -> None:
        """Gives back the memory of all free slots; pages in rows beyond what is needed move."""
        self._close_up(self.num_used)
        self.segments.truncate(self.num_used)
        self._bare += self._free
        heapq.heapify(self._bare)
        self._free = []

    def _close_up(self, num_rows: int) -> None:
        """Moves the pages in rows from `num_rows` on into free rows before them."""
        used = np.flatnonzero(self.num_references > 0)
        used = used[np.argsort(self.row_of[used])]
        first = int(np.searchsorted(self.row_of[used], num_rows))
        holes = np.setdiff1d(np.arange(num_rows), self.row_of[used[:first]])
        moved = used[first:]
        for start in range(0, len(moved), self.segments.pages):  # bounds what is copied at a time
            part = moved[start : start + self.segments.pages]
            records = mx.concatenate(self.views(part))
            self.row_of[part] = holes[start : start + len(part)]
            self.write(part, records)

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
        """records uint32 [len(slots), page_words] into their slots."""
        self.segments.write(self.row_of[slots], records)

    def views(self, slots: Slots) -> list[mx.array]:
        """Records of `slots` in order, uint32 [n, page_words], in as few views as can be."""
        return self.segments.views(self.row_of[slots])

    def by_segment(self, slots: Slots) -> list[Slots]:
        """`slots` cut wherever the segment changes."""
        if len(slots) == 0:
            return []
        segments = self.row_of[slots] // self.segments.pages
        return np.split(slots, np.flatnonzero(np.diff(segments)) + 1)

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
        first = self.num_rows
        added = self.segments.grow(missing, spare_pages)
        slots = self._slots_for_rows(added)
        self.row_of[slots] = np.arange(first, first + added)
        for slot in slots.tolist():
            heapq.heappush(self._free, slot)

    def _slots_for_rows(self, count: int) -> Slots:
        """Bare slots, the lowest first, then new ones."""
        bare = [heapq.heappop(self._bare) for _ in range(min(count, len(self._bare)))]
        first = self.num_slots
        last = first + count - len(bare)
        self._resize(last)
        self.generation[first:] = self._next_generation()
        return np.array([*bare, *range(first, last)], np.int64)

    def _resize(self, num_slots: int) -> None:
        for name in _PER_SLOT:
            old = getattr(self, name)[:num_slots]
            setattr(self, name, np.concatenate([old, np.zeros(num_slots - len(old), old.dtype)]))

    def _next_generation(self) -> int:
        """Never the same twice, so that a ref to a slot given back and grown anew is stale too."""
        self._generations += 1
        return self._generations
