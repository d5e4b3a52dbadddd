"""Naming blocks as tokens are told: at the cost of what is told, forks on their own."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqstore.errors import InvalidInput
from tqstore.paging.block_chain import BlockChain

ROOT = b"\7" * 32
PAGE_TOKENS = 4


def names_of(tokens: list[int]) -> list[bytes]:
    """By the words of docs/format.md, from the tokens alone."""
    names, parent = [], ROOT
    for first in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        block = b"".join(
            token.to_bytes(8, "little", signed=True)
            for token in tokens[first : first + PAGE_TOKENS]
        )
        parent = hashlib.sha256(parent + block).digest()[:16]
        names.append(parent)
    return names


def agree(chain: BlockChain, tokens: list[int]) -> None:
    """`chain` knows `tokens`: it names every block they fill, and records hold them."""
    assert chain.num_told == len(tokens)
    chain = chain.fork()
    chain.grow(len(tokens) // PAGE_TOKENS)
    blocks = chain.blocks(0, len(chain))
    assert [block.hash for block in blocks] == names_of(tokens)
    told = [int(token) for block in blocks for token in block.record.tokens]  # type: ignore[union-attr]
    assert told == tokens[: len(told)]


class Model:
    """A chain and, as a plain list, what it was told."""

    def __init__(self, chain: BlockChain, tokens: list[int]) -> None:
        self.chain = chain
        self.tokens = tokens


@given(st.data())
def test_tells_truncations_and_forks_in_any_order(data: st.DataObject) -> None:
    models = [Model(BlockChain(ROOT, PAGE_TOKENS), [])]
    for _ in range(data.draw(st.integers(1, 25))):
        model = data.draw(st.sampled_from(models))
        step = data.draw(st.sampled_from(["tell", "tell", "grow", "truncate", "fork"]))
        if step == "tell":
            # What blocks have by name stays: others are contradicted, which is another test.
            fixed = len(model.chain) * PAGE_TOKENS
            start = data.draw(st.integers(min(fixed, len(model.tokens)), len(model.tokens)))
            new = data.draw(st.lists(st.integers(-3, 3), max_size=20))
            model.chain.tell(new, start)
            model.tokens = model.tokens[:start] + new
        elif step == "grow":
            model.chain.grow(data.draw(st.integers(0, len(model.tokens) // PAGE_TOKENS)))
        elif step == "truncate":
            length = data.draw(st.integers(0, len(model.tokens)))
            model.chain.truncate(length // PAGE_TOKENS, length)
            model.tokens = model.tokens[:length]
        elif len(models) < 5:
            models.append(Model(model.chain.fork(), list(model.tokens)))
        for each in models:
            agree(each.chain, each.tokens)


def test_telling_one_token_more_costs_no_more_in_a_long_sequence() -> None:
    """Bytes allocated, which copies of what is known would be."""
    long, added = 100_000, 4000
    chain = BlockChain(ROOT, PAGE_TOKENS)
    chain.tell(np.arange(long))
    chain.tell([7], long)  # whatever room it wants for more
    allocated = 0
    tracemalloc.start()
    try:
        for position in range(long + 1, long + added):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            chain.tell([7], position)
            allocated += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert chain.num_told == long + added
    assert allocated / added < 1000  # a copy of what is known is 800,000


def test_growing_token_by_token_copies_each_a_bounded_number_of_times() -> None:
    num_tokens = 30_000
    chain = BlockChain(ROOT, PAGE_TOKENS)
    allocated = 0
    tracemalloc.start()
    try:
        for position in range(num_tokens):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            chain.tell([position], position)
            more = tracemalloc.get_traced_memory()[1] - before
            allocated += more if more > 2000 else 0  # only growth: a tell's own objects are small
    finally:
        tracemalloc.stop()
    assert allocated <= 6 * 8 * num_tokens
    agree(chain, list(range(num_tokens)))


def test_what_contradicts_a_name_changes_nothing() -> None:
    chain = BlockChain(ROOT, PAGE_TOKENS)
    chain.tell(range(10))
    chain.grow(2)
    for wrong, start in (([9, 9], 5), (list(range(1, 11)), 0)):
        with pytest.raises(InvalidInput, match="differ"):
            chain.tell([*wrong, 0, 0, 0, 0], start)
        agree(chain, list(range(10)))
    with pytest.raises(InvalidInput, match="only 10 are known"):
        chain.tell([1], 11)


def test_records_keep_their_tokens_when_the_sequence_goes_another_way() -> None:
    chain = BlockChain(ROOT, PAGE_TOKENS)
    chain.tell(range(8))
    chain.grow(2)
    record = chain[1].record
    assert record is not None
    chain.truncate(1, 4)
    chain.tell([50, 51, 52, 53], 4)
    assert record.tokens.tolist() == [4, 5, 6, 7]


def test_confirming_what_was_told_keeps_what_was_told_ahead() -> None:
    chain = BlockChain(b"r" * 32, 4)
    chain.grow(3)
    chain.tell(range(10))
    names = [chain[block].hash for block in range(2)]
    chain.confirm(range(6))
    assert chain.num_told == 10
    chain.tell([10, 11], 10)
    assert [chain[block].hash for block in range(2)] == names
    assert chain.num_named == 3
    with pytest.raises(InvalidInput):
        chain.confirm([0, 1, 2, 9, 4])
    other = BlockChain(b"r" * 32, 4)
    other.grow(1)
    other.confirm(range(5))
    assert (other.num_told, other[0].hash) == (5, names[0])
