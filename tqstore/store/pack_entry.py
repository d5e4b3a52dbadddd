"""One pack in the index: which slot holds which page, in as little memory as that takes."""

from __future__ import annotations

import struct

from tqstore.format.framing import FRAME_NBYTES
from tqstore.format.pack import PackHeader, PackLayout


class PackEntry:
    """One pack as the index knows it; tables are made from the header when first asked for."""

    __slots__ = ("_masks", "_pages", "_slots", "first_slot", "head", "num_pages", "number")

    def __init__(self, number: int, header: PackHeader, encoded: bytes, layout: PackLayout) -> None:
        self.number = number
        self.head = encoded[:FRAME_NBYTES]  # its checksums tell this pack from any other
        self.first_slot = layout.first_slot(len(encoded))
        self.num_pages = header.num_pages
        self._pages = header.pages
        self._slots: dict[int, int] | None = None
        self._masks: dict[int, int] | None = None

    def slot(self, block: int, layer: int) -> int | None:
        """Slot of the page of the header's `block`-th block and `layer`."""
        if self._slots is None:
            # A page reference is u16 block, u16 layer: read as one u32, block | layer << 16.
            refs = struct.unpack(f"<{self.num_pages}I", self._pages)
            self._slots = dict(zip(refs, range(self.num_pages), strict=True))
        return self._slots.get(block | layer << 16)

    def layers_of(self, block: int) -> int:
        """Bit l is set if the pack has the page of layer l of the header's `block`-th block."""
        if self._masks is None:
            masks: dict[int, int] = {}
            for index, layer in struct.iter_unpack("<HH", self._pages):
                masks[index] = masks.get(index, 0) | 1 << layer
            self._masks = masks
        return self._masks.get(block, 0)


# A block's entries as a linked list: (pack, the block's index in its header, next).
Node = tuple[PackEntry, int, "Node | None"]


def without_packs(node: Node | None, gone: set[int]) -> Node | None:
    """The linked list without entries of `gone`; the same object if it has none.

    Not by recursion: as many packs as one likes may claim to have the block.
    """
    kept: list[tuple[PackEntry, int]] = []
    length = 0
    rest = node
    while rest is not None:
        entry, index, rest = rest
        length += 1
        if entry.number not in gone:
            kept.append((entry, index))
    if len(kept) == length:
        return node
    result: Node | None = None
    for entry, index in reversed(kept):
        result = (entry, index, result)
    return result
