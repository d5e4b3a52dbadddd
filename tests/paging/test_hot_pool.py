from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqstore.errors import PoolExhausted
from tqstore.paging.arena import Arena
from tqstore.paging.block_chain import Block
from tqstore.paging.eviction import Candidates, choose_victims
from tqstore.paging.hot_pool import HotPool
from tqstore.paging.page_records import page_words
from tqstore.paging.segments import contiguous_runs
from tqstore.spec import CodecSpec, PageSpec

SPEC = PageSpec(1, 8, 8, 4, CodecSpec.parse("int8"), CodecSpec.parse("int8"), "float16")


def record(number: int, count: int = 1) -> mx.array:
    return mx.full((count, page_words(SPEC)), number, dtype=mx.uint32)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_slots_are_handed_out_lowest_first_and_reused_lowest_first() -> None:
    arena = Arena(SPEC)
    assert arena.allocate(5).tolist() == [0, 1, 2, 3, 4]
    arena.release(slots(1, 3))
    assert arena.allocate(3).tolist() == [1, 3, 5]


def test_a_ref_is_stale_once_its_slot_was_evicted_and_reused() -> None:
    arena = Arena(SPEC)
    held = arena.allocate(2)
    refs = arena.refs(held)
    arena.mark_durable(held[:1], [b"a" * 16])
    arena.evict(held[:1])
    assert arena.resolve(refs).tolist() == [-1, 1]
    assert arena.allocate(1).tolist() == [0]
    assert arena.resolve(refs).tolist() == [-1, 1]
    assert arena.slot_of == {}


def test_only_durable_pages_can_be_evicted() -> None:
    arena = Arena(SPEC)
    with pytest.raises(AssertionError, match="durable"):
        arena.evict(arena.allocate(1))


def test_records_stay_in_their_slots_while_the_arena_grows() -> None:
    arena = Arena(SPEC)
    arena.segments.pages = 16
    expected = {}
    for number in range(50):
        slot = arena.allocate(1)
        arena.write(slot, record(number))
        expected[int(slot[0])] = number
    assert [segment.shape[0] for segment in arena.segments.arrays[:-1]] == [16, 16, 16]
    for slot, number in expected.items():
        assert int(arena.views(slots(slot))[0][0, 0]) == number


def test_a_write_reaches_scattered_slots_and_no_others() -> None:
    arena = Arena(SPEC)
    arena.write(arena.allocate(20), record(0, 20))
    rows = mx.concatenate([record(n) for n in (1, 2, 3, 4)])
    arena.write(slots(2, 3, 9, 17), rows)
    values = [int(arena.views(slots(slot))[0][0, 0]) for slot in range(20)]
    assert values == [0, 0, 1, 2, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0]


def test_a_view_taken_before_a_write_keeps_the_old_bytes() -> None:
    arena = Arena(SPEC)
    slot = arena.allocate(1)
    arena.write(slot, record(1))
    view = arena.views(slots(0))[0] + 0
    arena.write(slot, record(2))
    assert int(view[0, 0]) == 1
    assert int(arena.views(slots(0))[0][0, 0]) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "retain"]), st.integers(0, 40)),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None)
def test_every_slot_is_free_or_referenced_never_both(steps: list[tuple[str, int]]) -> None:
    pool = HotPool([SPEC], 1 << 30)
    arena = pool.arenas[0]
    references: list[int] = []
    for action, number in steps:
        if action == "allocate":
            slots_ = arena.allocate(number % 7 + 1).tolist()
            arena.block_of.update((slot, Block()) for slot in slots_)
            references += slots_
        elif references:
            slot = references[number % len(references)]
            if action == "retain":
                arena.retain(slots(slot))
                references.append(slot)
            else:
                references.remove(slot)
                arena.release(slots(slot))
        pool.check()
        assert arena.num_used == len(set(references))
        for slot in set(references):
            assert arena.num_references[slot] == references.count(slot)


def test_a_budget_smaller_than_what_is_asked_says_so() -> None:
    pool = HotPool([SPEC], budget_nbytes=SPEC.page_nbytes)
    pool.require(SPEC.page_nbytes)
    with pytest.raises(PoolExhausted, match="memory budget"):
        pool.require(SPEC.page_nbytes + 1)


def test_runs_break_at_gaps_and_at_segment_borders() -> None:
    assert contiguous_runs(slots(), 8) == []
    assert contiguous_runs(slots(6, 7, 8, 9, 12), 8) == [(0, 2), (2, 4), (4, 5)]
    assert contiguous_runs(slots(3, 2, 1), 8) == [(0, 1), (1, 2), (2, 3)]


def candidates(
    layer: int,
    slots_: list[int],
    last_used: list[int],
    shared: set[int] = frozenset(),
    sinks: set[int] = frozenset(),
) -> Candidates:
    references = np.array([2 if slot in shared else 1 for slot in slots_], np.int32)
    is_sink = np.array([slot in sinks for slot in slots_], np.bool_)
    return Candidates(layer, np.array(slots_), np.array(last_used), references, is_sink, 100)


def test_victims_are_the_longest_unused_of_all_layers_and_shared_pages_come_last() -> None:
    layers = [candidates(0, [10, 11, 12], [5, 1, 9], {11}), candidates(1, [3, 4], [2, 7])]

    def chosen(nbytes: int) -> dict[int, list[int]]:
        return {layer: victims.tolist() for layer, victims in choose_victims(layers, nbytes)}

    assert chosen(1) == {1: [3]}
    assert chosen(200) == {0: [10], 1: [3]}
    assert chosen(400) == {0: [10, 12], 1: [3, 4]}
    assert chosen(10**6) == {0: [10, 11, 12], 1: [3, 4]}


def test_pages_of_sinks_go_last_as_shared_ones_do_the_longest_unused_of_them_first() -> None:
    layers = [
        candidates(0, [0, 1, 2, 3], [7, 7, 7, 7], sinks={0, 1}),
        candidates(1, [5, 6], [1, 9], shared={5}),
    ]
    order = []
    for pages in range(1, 7):
        for layer, victims in choose_victims(layers, pages * 100):
            order += [(layer, slot) for slot in victims.tolist() if (layer, slot) not in order]
    assert order == [(0, 2), (0, 3), (1, 6), (1, 5), (0, 0), (0, 1)]
    spared = {
        layer: found.tolist() for layer, found in choose_victims(layers, 600, spares_last=True)
    }
    assert spared == {0: [2, 3], 1: [6]}
    assert list(choose_victims([], 100)) == []


def test_a_compacted_arena_has_memory_for_its_pages_only_and_every_ref_finds_its_page() -> None:
    arena = Arena(SPEC)
    arena.segments.pages = 16
    held = arena.allocate(60)
    arena.write(held, mx.concatenate([record(number) for number in range(60)]))
    refs = arena.refs(held)
    kept = slots(0, 5, 17, 18, 40, 59)
    arena.release(np.setdiff1d(held, kept))
    arena.compact()
    assert arena.nbytes == 6 * SPEC.page_nbytes
    assert sum(array.nbytes for array in arena.segments.arrays) == arena.nbytes
    assert arena.resolve(refs[kept]).tolist() == kept.tolist()
    assert [int(row[0]) for view in arena.views(kept) for row in view] == kept.tolist()
    more = arena.allocate(40)
    assert more.tolist() == [slot for slot in range(60) if slot not in kept][:40]
    arena.write(more, record(99, 40))
    assert [int(row[0]) for view in arena.views(kept) for row in view] == kept.tolist()
    assert (arena.resolve(np.delete(refs, kept)) == -1).all()
    assert arena.num_used == arena.num_rows == 46


def test_a_slice_that_stays_does_not_keep_the_rest_in_memory() -> None:
    arena = Arena(
        PageSpec(4, 64, 64, 64, CodecSpec.parse("int8"), CodecSpec.parse("int8"), "float16")
    )
    held = arena.allocate(200)
    arena.write(held, mx.ones((200, page_words(arena.spec)), dtype=mx.uint32))
    before = mx.get_active_memory()
    arena.release(held[1:])
    arena.compact()
    mx.clear_cache()
    assert before - mx.get_active_memory() >= 198 * arena.spec.page_nbytes


def test_memory_that_other_layers_have_left_is_given_back_when_one_needs_it() -> None:
    pool = HotPool([SPEC] * 4, 64 * SPEC.page_nbytes)
    for layer, arena in enumerate(pool.arenas):
        room = pool.room_nbytes // SPEC.page_nbytes
        held = pool.allocate(layer, room)
        arena.block_of.update((slot, Block()) for slot in held.tolist())
        arena.write(held, record(layer, room))
        arena.release(held[:-1])
        pool.check()
    assert pool.used_nbytes == 4 * SPEC.page_nbytes
    for layer, arena in enumerate(pool.arenas):
        used = np.flatnonzero(arena.num_references)
        assert [int(view[0, 0]) for view in arena.views(used)] == [layer]


def test_pinned_pages_are_not_evictable_until_all_pins_are_gone() -> None:
    arena = Arena(SPEC)
    held = arena.allocate(2)
    arena.mark_durable(held, [b"a" * 16, b"b" * 16])
    arena.pin(held)
    arena.pin(held[:1])
    arena.unpin(held)
    assert arena.evictable.tolist() == [1]
    arena.unpin(held[:1])
    assert arena.evictable.tolist() == [0, 1]
