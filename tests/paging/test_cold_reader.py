"""Reading ahead: a stream that was left unfinished shares nothing with the next."""

from __future__ import annotations

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tqstore.attend
from tests.test_session import MODEL
from tqstore import CacheSpec, KVCache, LayerSpec, Store
from tqstore.attend import PackedAttention

SPEC = CacheSpec(
    [LayerSpec(kv_heads=4, head_dim=64, keys="exact", values="exact")],
    page_tokens=16,
    recent_tokens=8,
)
PAGE = SPEC.page_specs[0].page_nbytes


def streamed_cache(store: Store) -> KVCache:
    keys = mx.random.normal((4, 2000, 64), key=mx.random.key(1)).astype(mx.float16)
    cache = store.new_cache(SPEC, model=MODEL, memory_budget=4 * PAGE)
    cache.tell(np.arange(2000))
    cache.append(0, keys, keys)
    return cache


def batches_of(cache: KVCache) -> list[list[bytes]]:
    hashes = cache.chain.hashes_of(np.arange(96))
    return [hashes[at : at + 8] for at in range(0, 96, 8)]


def test_streams_that_overlap_read_into_buffers_of_their_own(store_dir: Path) -> None:
    """One is left unfinished with a batch read ahead, as by an exception that is held on to."""
    page = SPEC.page_specs[0]
    with Store.open(store_dir) as store:
        cache = streamed_cache(store)
        cache.flush()
        batches, reader = batches_of(cache), cache.pager.cold
        expected = [np.array(records) for records in reader.stream(page, 0, batches)]
        assert len({records.tobytes() for records in expected}) == len(batches)
        for order in (slice(None), slice(None, None, -1)):
            unfinished = reader.stream(page, 0, batches)
            found = [np.array(next(unfinished))]
            others = [np.array(one) for one in reader.stream(page, 0, batches[order])]
            assert all(map(np.array_equal, others, expected[order]))
            found += [np.array(records) for records in unfinished]
            assert all(map(np.array_equal, found, expected))


def test_an_exception_in_a_part_ends_the_reading(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqstore.attend, "RUN_NBYTES", 8 * PAGE)
    monkeypatch.setattr("tqstore.quant.runwise.CPU_RUN_NBYTES", 8 * 4 * 4 * 16 * 64)
    queries = mx.random.normal((8, 1, 64), key=mx.random.key(2))
    with Store.open(store_dir) as store:
        cache = streamed_cache(store)
        expected = cache.attend(0, queries)
        over_part, parts = PackedAttention._over_part, []

        def failing(self, *args):  # type: ignore[no-untyped-def]
            parts.append(1)
            if len(parts) == 3:
                raise MemoryError("in a part")
            return over_part(self, *args)

        monkeypatch.setattr(PackedAttention, "_over_part", failing)
        with pytest.raises(MemoryError) as held:
            cache.attend(0, queries)
        assert not [t for t in threading.enumerate() if t.name.startswith("tqstore-read")]
        assert mx.array_equal(cache.attend(0, queries), expected)
        assert held.value.args == ("in a part",)


def test_buffers_are_used_again(store_dir: Path) -> None:
    queries = mx.random.normal((8, 1, 64), key=mx.random.key(2))
    with Store.open(store_dir) as store:
        cache = streamed_cache(store)
        for _ in range(3):
            mx.eval(cache.attend(0, queries))
        buffers = list(cache.pager.cold._idle)
        mx.eval(cache.attend(0, queries))
        assert {id(one) for one in cache.pager.cold._idle} == {id(one) for one in buffers}
        assert len(buffers) <= 2
