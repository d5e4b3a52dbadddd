"""What gc sees of the packs of one page spec: their pages, when they were used, what is needed.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqstore.errors import NotFound, TqStoreError
from tqstore.format.block_hash import HASH_NBYTES
from tqstore.format.pack import PackHeader
from tqstore.store.names import pack_name
from tqstore.store.pack_index import PackIndex
from tqstore.store.references import Masks


@dataclass
class PackCensus:
    """A pack as gc sees it."""

    number: int
    nbytes: int
    used_ns: int
    stride: int
    blocks: Masks
    parents: set[bytes]
    needed: int = 0  # pages that a checkpoint needs
    kept: int = 0  # pages that are needed and whose one kept copy is here

    @property
    def num_pages(self) -> int:
        return sum(mask.bit_count() for mask in self.blocks.values())


def take_census(index: PackIndex, problems: list[str]) -> Iterator[PackCensus]:
    """Every pack that is there now, oldest first; damaged ones are told in `problems`."""
    index.refresh(is_forced=True)
    try:
        folder = index.folder()
    except NotFound:
        return
    for number in sorted(index.numbers):
        status = folder.status_of(pack_name(number))
        try:
            header = index.header(number)
        except TqStoreError as error:
            problems.append(str(error))
            continue
        if status is None or header is None:
            continue
        yield PackCensus(
            number,
            status.st_size,
            status.st_mtime_ns,
            index.layout.stride,
            masks_of(header),
            outer_parents(header),
        )


def masks_of(header: PackHeader) -> Masks:
    """Layers of each block that a pack has pages of."""
    hashes = header.block_hashes
    masks: Masks = {}
    for block, layer in header.page_refs:
        masks[hashes[block]] = masks.get(hashes[block], 0) | 1 << layer
    return masks


def outer_parents(header: PackHeader) -> set[bytes]:
    """Blocks before the pack's own that are not in the pack themselves."""
    raw = header.parents
    parents = {raw[at : at + HASH_NBYTES] for at in range(0, len(raw), HASH_NBYTES)}
    return parents - set(header.block_hashes)


def count_kept(packs: list[PackCensus], needs: Masks) -> None:
    """Decides which copy of each needed page is kept: that of the pack with most needed ones."""

    def needed(pack: PackCensus) -> int:
        return sum((mask & needs.get(b, 0)).bit_count() for b, mask in pack.blocks.items())

    counts = {pack.number: needed(pack) for pack in packs}
    taken: Masks = {}
    for pack in sorted(packs, key=lambda pack: (-counts[pack.number], pack.number)):
        pack.needed = counts[pack.number]
        for block, mask in pack.blocks.items():
            mine = mask & needs.get(block, 0) & ~taken.get(block, 0)
            if mine:
                taken[block] = taken.get(block, 0) | mine
                pack.kept += mine.bit_count()
