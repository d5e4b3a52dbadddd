"""Any order of append, attend, trim, fork, save, resume, match and drop, under tiny budgets.

Keys and values are a function of the tokens up to a position, as a model's are, so whatever pages
sequences come to share, every sequence must equal a dense one computed from its tokens alone.
What the runs have done is counted, and each test fails if any move between the tiers was rare in
them: then they would prove nothing about it.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import check_store
from tests.dense_attention import dense_attention
from tqstore.errors import NotFound, PoolExhausted
from tqstore.kv_cache import KVCache
from tqstore.paging.page_table import Refs
from tqstore.session import Store
from tqstore.spec import CacheSpec, LayerSpec

HEADS, DIM, WINDOW, SINKS = 2, 16, 20, 5
MODEL = "12" * 32
SPEC = CacheSpec(
    [
        LayerSpec(HEADS, DIM, keys="exact", values="exact", dtype="float32"),
        LayerSpec(HEADS, DIM, None, WINDOW, SINKS, keys="exact", values="exact", dtype="float32"),
        LayerSpec(HEADS, DIM, keys="exact", values="exact", dtype="float32"),
    ],
    page_tokens=8,
    recent_tokens=4,
)
PAGE = SPEC.page_specs[0].page_nbytes
MAX_TOKENS = 300
MAX_SEQUENCES = 6
# What one run must have done at least this often.
AT_LEAST = {
    "steps": 1000,
    "long": 200,
    "beside": 50,
    "refused": 1,
    "compacted": 1,
    "restored_pages": 10,
    "streamed_pages": 100,
    "shared_pages": 1,
    "spilled_pages": 100,
    "evicted_pages": 100,
    "expired_pages": 5,
    "reopened_pages": 10,
}


class Dense:
    """What a model would compute: float32 [2 (keys, values), heads, tokens, dim] of tokens."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}

    def of(self, tokens: list[int], layer: int) -> np.ndarray:
        rows, chain = [np.zeros((2, HEADS, 0, DIM), np.float32)], layer
        for token in tokens:
            chain = zlib.crc32(token.to_bytes(4, "little"), chain)
            if chain not in self._known:
                rng = np.random.default_rng(chain)
                self._known[chain] = rng.standard_normal((2, HEADS, 1, DIM)).astype(np.float32)
            rows.append(self._known[chain])
        return np.concatenate(rows, axis=2)


@dataclass(eq=False)
class Sequence:
    cache: KVCache
    tokens: list[int]
    grown: int = MAX_TOKENS  # tokens appended since it was taken up or trimmed
    pins: list[list[Refs]] = field(default_factory=list)  # the hot pages of each pin, by layer

    def pin(self) -> None:
        self.cache.pin()
        arenas = self.cache.pager.pool.arenas
        tables = [layer.table.refs() for layer in self.cache.layers]
        self.pins.append(
            [refs[arena.resolve(refs) >= 0] for refs, arena in zip(tables, arenas, strict=True)]
        )

    def unpin(self) -> None:
        self.cache.unpin()
        del self.pins[-1:]

    def check_pins(self) -> None:
        """What was hot when it was pinned, and is still this sequence's, is hot."""
        for pinned in self.pins:
            for layer, refs in zip(self.cache.layers, pinned, strict=True):
                held = np.intersect1d(refs, layer.table.refs())
                assert (self.cache.pager.pool.arenas[layer.layer].resolve(held) >= 0).all()


def some_tokens(count: int, seed: int) -> list[int]:
    """Mostly ones, so that sequences come to share prefixes."""
    return (np.random.default_rng(seed).random(count) > 0.05).astype(int).tolist()


class Machine(RuleBasedStateMachine):
    spec = SPEC
    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.dense = Dense()
        self.sequences: list[Sequence] = []
        self.saved: dict[str, list[int]] = {}
        self.queries = np.random.default_rng(0).standard_normal((4, 4, DIM)).astype(np.float32)

    @initialize(pages=st.sampled_from([1, 3, 6, 12, 24, 48, 96, 192]), count=st.integers(1, 200))
    def open(self, pages: int, count: int) -> None:
        self.budget = pages * PAGE
        self.store = Store.open(self.folder / "store")
        self.prompt(count=count, seed=0)

    def teardown(self) -> None:
        self.leave()
        check_store(self.folder / "store")
        shutil.rmtree(self.folder)

    def leave(self) -> None:
        if self.sequences:
            self.totals.update(asdict(self.sequences[0].cache.pager.stats))
        self.sequences.clear()
        gc.collect()
        self.store.close()

    def join(self, sequence: Sequence) -> None:
        # No rule has a precondition: what `match` finds depends on what was written meanwhile, and
        # Hypothesis must be able to draw the same steps again.
        if len(self.sequences) == MAX_SEQUENCES:
            self.drop(0)
        self.sequences.append(sequence)

    def one(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @rule(count=st.integers(1, 150), seed=st.integers(0, 3))
    def prompt(self, count: int, seed: int) -> None:
        """A new sequence begins."""
        cache = self.store.new_cache(self.spec, model=MODEL, memory_budget=self.budget)
        self.join(Sequence(cache, []))
        self.append(len(self.sequences) - 1, count, seed, is_told=True)

    @rule(index=st.integers(0, 9), count=st.integers(40, 120), seed=st.integers(0, 3))
    def turn(self, index: int, count: int, seed: int) -> None:
        """A sequence goes on with a prompt."""
        self.append(index, count, seed, is_told=True)

    @rule(
        index=st.integers(0, 9),
        count=st.integers(1, 40),
        seed=st.integers(0, 3),
        is_told=st.sampled_from([True, True, True, True, False]),
    )
    def append(self, index: int, count: int, seed: int, is_told: bool) -> None:
        sequence = self.one(index)
        if len(sequence.tokens) + count > MAX_TOKENS:
            return
        whole = sequence.tokens + some_tokens(count, seed)
        if is_told:
            sequence.cache.tell(whole)
        try:
            for layer in range(len(SPEC.layers)):
                keys, values = self.dense.of(whole, layer)[:, :, len(sequence.tokens) :]
                sequence.cache.append(layer, mx.array(keys), mx.array(values))
        except PoolExhausted:
            assert not is_told or self.some_pages_must_stay()
            self.totals["refused"] += 1
            self.back_in_step(sequence)
            return
        sequence.tokens = whole
        sequence.grown += count

    @rule(
        index=st.integers(0, 9),
        count=st.integers(1, 12),
        back=st.integers(0, 20),
        saves=st.booleans(),
    )
    def decode(self, index: int, count: int, back: int, saves: bool) -> None:
        """Token by token, then some of them are taken back."""
        for _ in range(count):
            self.append(index, 1, seed=0, is_told=True)
        self.attend(index, num_queries=4)
        self.trim(index, back, saves)

    def some_pages_must_stay(self) -> bool:
        """Whether there are pages that are pinned or cannot be written out."""
        return any(
            sequence.pins or sequence.cache.num_told < len(sequence.tokens)
            for sequence in self.sequences
        )

    def back_in_step(self, sequence: Sequence) -> None:
        """A step that failed half way is taken back, layer by layer."""
        cache = sequence.cache
        for layer in cache.layers:
            assert layer.num_tokens >= len(sequence.tokens)
        for index, layer in enumerate(cache.layers):
            cache.trim_layer(index, layer.num_tokens - len(sequence.tokens))

    @rule(index=st.integers(0, 9), num_queries=st.integers(1, 4))
    def attend(self, index: int, num_queries: int) -> None:
        sequence = self.one(index)
        if len(sequence.tokens) < num_queries:
            return
        queries = self.queries[:, :num_queries]
        for layer, spec in enumerate(SPEC.layers):
            keys, values = self.dense.of(sequence.tokens, layer).astype(np.float64)
            expected = dense_attention(
                queries.astype(np.float64),
                keys,
                values,
                window=spec.window,
                sink_tokens=spec.sink_tokens,
            )
            got = np.array(sequence.cache.attend(layer, mx.array(queries)))
            assert np.abs(got - expected).max() < 1e-5

    @rule(index=st.integers(0, 9))
    def fetch(self, index: int) -> None:
        sequence = self.one(index)
        for layer in (0, 2):
            keys, values = self.dense.of(sequence.tokens, layer)
            assert np.array_equal(np.array(sequence.cache.get_keys(layer)), keys)
            assert np.array_equal(np.array(sequence.cache.get_values(layer)), values)

    @rule(index=st.integers(0, 9), count=st.integers(0, 60), saves=st.booleans())
    def trim(self, index: int, count: int, saves: bool) -> None:
        sequence = self.one(index)
        count = min(count, len(sequence.tokens))
        if not sequence.cache.can_trim(count):
            assert not self.spec.window_history, "all history is kept"
            assert count > SPEC.recent_tokens or sequence.grown < SPEC.recent_tokens
            with pytest.raises(NotFound):
                sequence.cache.trim(count)
            return
        sequence.cache.trim(count)
        del sequence.tokens[len(sequence.tokens) - count :]
        sequence.grown = 0
        if saves:  # what is allowed can be saved
            self.save(index, "c")

    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        self.join(self.forked(self.one(index)))

    def forked(self, sequence: Sequence) -> Sequence:
        return Sequence(sequence.cache.fork(), list(sequence.tokens), sequence.grown)

    @rule(index=st.integers(0, 9))
    def drop(self, index: int) -> None:
        if len(self.sequences) == 1:
            return
        del self.sequences[index % len(self.sequences)]
        gc.collect()

    @rule(index=st.integers(0, 9), name=st.sampled_from("abc"))
    def save(self, index: int, name: str) -> None:
        sequence = self.one(index)
        report = self.store.save(name, sequence.cache, sequence.tokens)
        assert report.num_tokens == len(sequence.tokens)
        self.saved[name] = list(sequence.tokens)

    @rule(name=st.sampled_from("abc"))
    def resume(self, name: str) -> None:
        if name not in self.saved:
            with pytest.raises(NotFound):
                self.store.resume(name)
            return
        resumed = self.store.resume(name, spec=self.spec, model=MODEL, memory_budget=self.budget)
        assert resumed.lost_tokens == 0
        assert resumed.num_tokens == len(self.saved[name])
        self.join(Sequence(resumed.cache, list(self.saved[name]), grown=0))

    @rule(index=st.integers(0, 9), count=st.integers(0, 20), seed=st.integers(0, 3))
    def match(self, index: int, count: int, seed: int) -> None:
        tokens = self.one(index).tokens + some_tokens(count, seed)
        found = self.store.match(tokens, spec=self.spec, model=MODEL, memory_budget=self.budget)
        assert found.num_tokens < max(1, len(tokens))
        if found.cache is not None:
            self.join(Sequence(found.cache, tokens[: found.num_tokens], grown=0))

    @rule(index=st.integers(0, 9), layer=st.integers(0, len(SPEC.layers) - 1))
    def compact(self, index: int, layer: int) -> None:
        """Memory is given back, as it would be if another layer needed it."""
        pager = self.one(index).cache.pager
        pager.reap()
        arena = pager.pool.arenas[layer]
        self.totals["compacted"] += bool(arena.num_used and arena.num_free)
        arena.compact()

    @rule(index=st.integers(0, 9))
    def pin(self, index: int) -> None:
        self.one(index).pin()

    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        pinned = [sequence for sequence in self.sequences if sequence.pins] or self.sequences
        pinned[index % len(pinned)].unpin()

    @rule(index=st.integers(0, 9))
    def drop_pinned(self, index: int) -> None:
        """A fork outlives the pinned sequence it was taken from."""
        sequence = self.one(index)
        sequence.pin()
        self.sequences[self.sequences.index(sequence)] = self.forked(sequence)
        del sequence
        gc.collect()

    @rule(count=st.integers(1, 100), seed=st.integers(0, 3))
    def reopen(self, count: int, seed: int) -> None:
        self.leave()
        self.store = Store.open(self.folder / "store")
        self.prompt(count=count, seed=seed)

    @invariant()
    def nothing_is_lost_and_budgets_hold(self) -> None:
        self.totals["steps"] += 1
        self.totals["long"] += any(len(s.tokens) >= 100 for s in self.sequences)
        spiller = self.sequences[0].cache.pager.spilling._spiller
        self.totals["beside"] += bool(spiller and spiller.pending)  # a write goes on meanwhile
        for sequence in self.sequences:
            assert sequence.cache.num_tokens == len(sequence.tokens)
            sequence.cache.check()
            sequence.check_pins()
            assert sequence.cache.can_trim(0), "it could not be saved"
            pool = sequence.cache.pager.pool
            assert pool.used_nbytes <= pool.budget_nbytes
            assert pool.allocated_nbytes <= pool.budget_nbytes


class WithoutHistory(Machine):
    spec = replace(SPEC, window_history=False)


@pytest.mark.parametrize("machine", [Machine, WithoutHistory])
def test_any_order_of_steps_equals_a_dense_model(machine: type[Machine]) -> None:
    machine.totals = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=45,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,  # what is counted below must not hang on luck
            suppress_health_check=list(HealthCheck),
        ),
    )
    rare = {
        name: machine.totals[name] for name in AT_LEAST if machine.totals[name] < AT_LEAST[name]
    }
    assert not rare
