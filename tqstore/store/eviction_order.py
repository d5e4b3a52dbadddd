"""The order in which packs that nobody needs are given up: least recently used, leaves first.

A pack whose blocks others continue is of use to them, so it goes only after those.  Owns the order
alone; what may go at all is `gc_plan`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Evictable:
    """A pack by its number, when it was last used, its blocks and their parents."""

    number: int
    used_ns: int
    blocks: Collection[bytes]
    parents: Collection[bytes]


def eviction_order(packs: Sequence[Evictable]) -> list[int]:
    """Numbers of `packs` in the order to delete them.

    Where packs continue each other in a circle, the least recently used goes first.
    """
    by_number = {pack.number: pack for pack in packs}
    holders: dict[bytes, list[int]] = {}
    for pack in packs:
        for block in pack.blocks:
            holders.setdefault(block, []).append(pack.number)
    continues: dict[int, set[int]] = {}  # pack -> packs with the blocks before its own
    num_children = dict.fromkeys(by_number, 0)
    for pack in packs:
        before = {number for parent in pack.parents for number in holders.get(parent, ())}
        continues[pack.number] = before - {pack.number}
        for number in continues[pack.number]:
            num_children[number] += 1
    rest = sorted((pack.used_ns, pack.number) for pack in packs)
    leaves = [entry for entry in rest if not num_children[entry[1]]]
    heapq.heapify(leaves)
    order: dict[int, None] = {}
    at = 0
    while len(order) < len(packs):
        if leaves:
            number = heapq.heappop(leaves)[1]
        else:
            while rest[at][1] in order:
                at += 1
            number = rest[at][1]
        if number in order:
            continue
        order[number] = None
        for before_number in continues[number]:
            num_children[before_number] -= 1
            if not num_children[before_number]:
                heapq.heappush(leaves, (by_number[before_number].used_ns, before_number))
    return list(order)
