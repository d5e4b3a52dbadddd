"""Keeping a store in order through the public Store: ends, gc, purge, reasons, sharing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.test_session import MODEL, TOKENS, fill, key_values, same_contents, spec_of
from tqstore.errors import InvalidInput, NotFound
from tqstore.kv_cache import KVCache
from tqstore.session import Store
from tqstore.store.gc_plan import GcOptions

NOW = GcOptions(grace_seconds=0)
READER = """
import sys
sys.path.insert(0, {root!r})
from tests.test_session import MODEL, TOKENS, fill, key_values, spec_of
from tests.test_upkeep import is_prefix
from tqstore.kv_cache import KVCache
from tqstore.session import Store
with Store.open({path!r}) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    match = store.match(TOKENS[:300], spec=spec_of(), model=MODEL)
    whole = fill(KVCache(spec_of()), *key_values(200))
    print(match.num_tokens, is_prefix(match.cache, whole), flush=True)
"""


def is_prefix(cache: KVCache, whole: KVCache) -> bool:
    """Whether the cache holds what the first of the whole's tokens are, bit for bit."""
    return all(
        mx.array_equal(got(cache), got(whole)[:, : cache.num_tokens]).item()
        for layer in range(2)
        for got in (lambda c: c.get_keys(layer), lambda c: c.get_values(layer))  # noqa: B023
    )


def stored(store: Store, name: str, num_tokens: int, ttl: float | None = None) -> KVCache:
    cache = fill(store.new_cache(spec_of(), model=MODEL), *key_values(num_tokens))
    store.save(name, cache, TOKENS[:num_tokens], ttl=ttl)
    return cache


def test_promise_1_a_process_finds_what_another_has_just_written(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        store.save("empty", store.new_cache(spec_of(), model=MODEL), [])
        root = str(Path(__file__).parents[1])
        script = READER.format(root=root, path=str(store_dir))
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            stored(store, "chat", 200)
            told, _ = reader.communicate("go\n", timeout=60)
        assert told == "192 True\n"


def test_sessions_with_a_ttl_end(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        stored(store, "long", 200, ttl=3600)
        stored(store, "short", 100, ttl=0.001)
        time.sleep(0.01)
        report = store.gc(NOW)
        assert (report.sessions_expired, report.packs_deleted) == (1, 0)
        assert [info.name for info in store.sessions()] == ["long"]
        with pytest.raises(NotFound, match="expired"):
            store.resume("short")
        cache = fill(store.new_cache(spec_of(), model=MODEL), *key_values(10))
        for ttl in (0, -1, float("nan"), 1e30):
            with pytest.raises(InvalidInput, match="ttl"):
                store.save("bad", cache, TOKENS[:10], ttl=ttl)


def test_every_reason_reaches_the_caller(store_dir: Path) -> None:
    def asked(num_tokens: int, model: str = MODEL) -> tuple[int, str]:
        match = store.match(TOKENS[:num_tokens], spec=spec_of(), model=model)
        return match.num_tokens, match.reason

    with Store.open(store_dir) as store:
        stored(store, "chat", 200)
        assert asked(200) == (192, "")
        assert asked(5) == (0, "shorter than a block")
        assert asked(300) == (192, "no such prefix")
        found, reason = asked(200, model="12" * 32)
        assert found == 0
        assert reason.startswith("namespace differs: model.fingerprint")
        options = {"spec": spec_of(), "model": MODEL}
        assert store.why_miss(TOKENS[:200], **options).kind == "hit"
        store.remove("chat")
        stored(store, "kept", 16)
        store.gc(replace(NOW, compact_at=0.1))
        assert asked(200)[1].startswith("evicted: layer 0 of block")
        assert store.why_miss(TOKENS[:200], **options).kind == "evicted"
        counted = store.stats().counters["misses"]
        assert counted["evicted"] == 2
        assert counted["no such prefix"] == 1


def test_a_cache_outlives_the_compaction_of_its_pages(store_dir: Path) -> None:
    with Store.open(store_dir) as store, Store.open(store_dir) as other:
        stored(store, "long", 400)
        short = fill(store.new_cache(spec_of(), model=MODEL), *[a[:, :64] for a in key_values(400)])
        store.save("short", short, TOKENS[:64])
        cold = other.resume("short").cache  # nothing read yet
        store.remove("long")
        pack = next(store_dir.glob("ns/*/pages/*/c.*"))
        assert store.gc(NOW).packs_compacted == 1
        assert not pack.exists()
        assert cold.num_tokens == 64
        assert same_contents(cold, short)


def test_purge_and_statistics(store_dir: Path) -> None:
    with Store.open(store_dir) as store:
        stored(store, "one", 200)
        fork = store.resume("one").cache
        fill(fork, *[mx.contiguous(a[:, 200:260]) for a in key_values(260)])
        store.save("two", fork, TOKENS[:260])
        stats = store.stats()
        assert (stats.num_sessions, stats.garbage_nbytes) == (2, 0)
        files = [file for file in store_dir.rglob("*") if file.is_file()]
        assert stats.nbytes == sum(os.stat(file).st_size for file in files)
        report = store.purge("two")
        assert list(report.shared) == ["one"]
        assert store.resume("one").num_tokens == 200
        assert store.why_miss(TOKENS[:260], spec=spec_of(), model=MODEL).kind == "no such prefix"
        assert store.stats().garbage_nbytes == 0
