"""Any order of append, attend, trim, fork, save, resume, match and drop, under tiny budgets.

Keys and values are a function of the tokens up to a position, as a model's are, so whatever pages
sequences come to share, every sequence must equal a dense one computed from its tokens alone.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import check_store
from tests.dense_attention import dense_attention
from tqstore.errors import NotFound, PoolExhausted
from tqstore.kv_cache import KVCache
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


@dataclass
class Sequence:
    cache: KVCache
    tokens: list[int]


class Machine(RuleBasedStateMachine):
    window_history = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.dense = Dense()
        self.sequences: list[Sequence] = []
        self.saved: dict[str, list[int]] = {}
        self.queries = np.random.default_rng(0).standard_normal((4, 1, DIM)).astype(np.float32)

    @initialize(pages=st.integers(6, 40))
    def open(self, pages: int) -> None:
        self.budget = pages * PAGE
        self.store = Store.open(self.folder / "store")
        self.new()

    def teardown(self) -> None:
        self.sequences.clear()
        self.store.close()
        check_store(self.folder / "store")
        shutil.rmtree(self.folder)

    def one(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @rule()
    def new(self) -> None:
        cache = self.store.new_cache(SPEC, model=MODEL, memory_budget=self.budget)
        self.sequences.append(Sequence(cache, []))

    @rule(index=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=50))
    def append(self, index: int, tokens: list[int]) -> None:
        sequence = self.one(index)
        if len(sequence.tokens) + len(tokens) > MAX_TOKENS:
            return
        whole = sequence.tokens + tokens
        sequence.cache.tell(whole)
        try:
            for layer in range(len(SPEC.layers)):
                keys, values = self.dense.of(whole, layer)[:, :, len(sequence.tokens) :]
                sequence.cache.append(layer, mx.array(keys), mx.array(values))
        except PoolExhausted:
            # Only pins can do that: every page can be written out.
            assert any(s.cache.layers[0]._pinned for s in self.sequences)
            self.back_in_step(sequence)
            return
        sequence.tokens = whole

    def back_in_step(self, sequence: Sequence) -> None:
        """A step that failed half way is taken back, layer by layer."""
        cache = sequence.cache
        for layer in cache.layers:
            assert layer.num_tokens >= len(sequence.tokens)
        for index, layer in enumerate(cache.layers):
            cache.trim_layer(index, layer.num_tokens - len(sequence.tokens))

    @rule(index=st.integers(0, 9))
    def attend(self, index: int) -> None:
        sequence = self.one(index)
        if not sequence.tokens:
            return
        for layer, spec in enumerate(SPEC.layers):
            keys, values = self.dense.of(sequence.tokens, layer).astype(np.float64)
            expected = dense_attention(
                self.queries.astype(np.float64),
                keys,
                values,
                window=spec.window,
                sink_tokens=spec.sink_tokens,
            )
            got = np.array(sequence.cache.attend(layer, mx.array(self.queries)))
            assert np.abs(got - expected).max() < 1e-5

    @rule(index=st.integers(0, 9))
    def fetch(self, index: int) -> None:
        sequence = self.one(index)
        for layer in (0, 2):
            keys, values = self.dense.of(sequence.tokens, layer)
            assert np.array_equal(np.array(sequence.cache.get_keys(layer)), keys)
            assert np.array_equal(np.array(sequence.cache.get_values(layer)), values)

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    def trim(self, index: int, share: float) -> None:
        sequence = self.one(index)
        count = int(share * len(sequence.tokens))
        assert sequence.cache.can_trim(count), "all history is kept"
        sequence.cache.trim(count)
        del sequence.tokens[len(sequence.tokens) - count :]

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        sequence = self.one(index)
        self.sequences.append(Sequence(sequence.cache.fork(), list(sequence.tokens)))

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(index=st.integers(0, 9))
    def drop(self, index: int) -> None:
        del self.sequences[index % len(self.sequences)]
        gc.collect()

    @rule(index=st.integers(0, 9), name=st.sampled_from("abc"))
    def save(self, index: int, name: str) -> None:
        sequence = self.one(index)
        report = self.store.save(name, sequence.cache, sequence.tokens)
        assert report.num_tokens == len(sequence.tokens)
        self.saved[name] = list(sequence.tokens)

    @precondition(lambda self: self.saved)
    @rule(name=st.sampled_from("abc"))
    def resume(self, name: str) -> None:
        if name not in self.saved:
            with pytest.raises(NotFound):
                self.store.resume(name)
            return
        resumed = self.store.resume(name, spec=SPEC, model=MODEL, memory_budget=self.budget)
        assert resumed.lost_tokens == 0
        assert resumed.num_tokens == len(self.saved[name])
        self.sequences.append(Sequence(resumed.cache, list(self.saved[name])))

    @rule(index=st.integers(0, 9), more=st.lists(st.integers(0, 1), max_size=20))
    def match(self, index: int, more: list[int]) -> None:
        tokens = self.one(index).tokens + more
        found = self.store.match(tokens, spec=SPEC, model=MODEL, memory_budget=self.budget)
        assert found.num_tokens < max(1, len(tokens))
        if found.cache is not None:
            self.sequences.append(Sequence(found.cache, tokens[: found.num_tokens]))

    @rule(index=st.integers(0, 9))
    def pin(self, index: int) -> None:
        self.one(index).cache.pin()

    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        self.one(index).cache.unpin()

    @rule()
    def reopen(self) -> None:
        self.sequences.clear()
        gc.collect()
        self.store.close()
        self.store = Store.open(self.folder / "store")
        self.new()

    @invariant()
    def nothing_is_lost_and_budgets_hold(self) -> None:
        for sequence in self.sequences:
            assert sequence.cache.num_tokens == len(sequence.tokens)
            sequence.cache.check()
            pool = sequence.cache.pager.pool
            assert pool.used_nbytes <= pool.budget_nbytes
            # Slots of one layer are of no use to another: at most a page a layer is stranded.
            assert pool.allocated_nbytes <= 2 * pool.budget_nbytes


def test_any_order_of_steps_equals_a_dense_model() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
