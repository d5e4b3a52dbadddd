"""Every miss says why: one test for each reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.synthetic import NAMESPACE, PAGE_TOKENS, SPEC, Chain, chain, packs, read, save
from tests.store.test_gc import NOW
from tqstore.errors import Corrupt, NotFound
from tqstore.format.block_hash import chain_blocks
from tqstore.format.namespace import Namespace
from tqstore.store.misses import Miss, explain
from tqstore.store.page_store import PageStore
from tqstore.store.tombstones import Gone, read_gone, write_gone


def why(store: PageStore, sequence: Chain, windows: Sequence[int | None] = (None,) * 3) -> Miss:
    ns = store.namespace(sequence.namespace)
    first = sequence.blocks[0] if sequence.blocks else None
    return explain(ns, windows, [0] * len(windows), sequence.hashes, first)


def test_promise_10_hits_and_prefixes_that_never_were(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(4))
        assert why(store, chain(4)) == Miss("hit", "", 4, 4)
        assert why(store, chain(4, 1)) == Miss("no such prefix", "", 0, 4)
        assert why(store, chain(0)).kind == "shorter than a block"
        longer = chain_blocks(
            NAMESPACE.id,
            [t for b in chain(4).blocks for t in b.tokens.tolist()] + [1] * PAGE_TOKENS,
            PAGE_TOKENS,
        )
        assert why(store, Chain(NAMESPACE, longer)) == Miss("no such prefix", "", 4, 5)
        assert store.counters.misses == {"no such prefix": 2, "shorter than a block": 1}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (replace(NAMESPACE, fingerprint="cd" * 8), "model.fingerprint"),
        (replace(NAMESPACE, seed=7), "seed, stored 0, given 7"),
        (replace(NAMESPACE, layers=(SPEC,) * 2), "number of layers, stored 3, given 2"),
    ],
)
def test_promise_10_the_field_in_which_namespaces_differ(
    store_dir: Path, given: Namespace, field: str
) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "demo", chain(2))
        tokens = [t for b in chain(2).blocks for t in b.tokens.tolist()]
        blocks = chain_blocks(given.id, tokens, PAGE_TOKENS)
        miss = why(store, Chain(given, blocks), (None,) * len(given.layers))
        assert miss.kind == "namespace differs"
        assert field in miss.detail


def test_promise_10_other_tenants_do_not_learn_of_each_other(store_dir: Path) -> None:
    """A salt keeps tenants apart: neither hits nor reasons tell what another has stored."""
    salted = [Namespace.of("ab" * 8, [SPEC] * 3, tenant_salt=salt) for salt in ("x", "y")]
    tokens = list(range(2 * PAGE_TOKENS))
    chains = [Chain(ns, chain_blocks(ns.id, tokens, PAGE_TOKENS)) for ns in salted]
    with PageStore.open(store_dir) as store:
        save(store, "secret", chains[0])
        assert why(store, chains[1]).kind == "no such prefix"
        assert why(store, chains[0]).kind == "hit"


def test_promise_10_evicted_and_expired(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        save(store, "kept", chain(1, 9))
        save(store, "removed", chain(2, 1))
        save(store, "over", chain(2, 2))
        with store.commit() as commit:
            commit.publish("over", chain(2, 2).checkpoint(2, expires_ns=1))
        store.remove("removed")
        store.gc(NOW)
        assert str(why(store, chain(2, 1))) == "evicted: layer 0 of block 0"
        assert why(store, chain(2, 2)).kind == "expired"
        with pytest.raises(NotFound, match="'over' has expired"):
            store.latest("over")
        save(store, "again", chain(2, 1))
        assert why(store, chain(2, 1)).kind == "hit"


def test_promise_10_corrupt_pages_and_packs(store_dir: Path, expected_findings: set[str]) -> None:
    expected_findings |= {"page", "pack", "reference"}
    demo = chain(4)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo, 0, 2)
        save(store, "demo", demo, 2, 4)
        newest = packs(store_dir)[1]
        raw = bytearray(newest.read_bytes())
        raw[len(raw) // 2] ^= 1
        newest.write_bytes(raw)
        ns = store.namespace(NAMESPACE)
        with pytest.raises(Corrupt):
            read(ns, SPEC, demo.keys(SPEC))
        miss = why(store, demo)
        assert miss.kind == "corrupt"
        assert miss.detail.startswith("layer ")
        raw[3] ^= 1
        newest.write_bytes(raw)
    with PageStore.open(store_dir) as store:
        assert why(store, demo) == replace(why(store, demo), kind="corrupt", num_blocks=2)


def test_the_record_of_what_is_gone_stays_small(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store:
        for turn in range(10):
            blocks = {bytes([turn]) + i.to_bytes(15, "big") for i in range(1)}
            write_gone(store.root, dict.fromkeys(blocks, "evicted"), {})
        assert len(read_gone(store.root).blocks) == 10
        assert len(list(store_dir.glob("gone/*"))) == 1
        for turn in range(4):
            many = {i.to_bytes(7, "big") + bytes([turn + 1]) + bytes(8) for i in range(40_000)}
            write_gone(store.root, dict.fromkeys(many, "expired"), {})
        files = list(store_dir.glob("gone/*"))
        assert len(files) == 2
        assert sum(file.stat().st_size for file in files) < 1 << 20
        assert len(read_gone(store.root).blocks) == 2 << 15
        gone = Gone()
        gone.add({bytes(16): "corrupt"}, {"a": "expired"})
        assert Gone.decode(gone.encode(), "x") == gone
