"""Opening a store of very many packs, up to the first look-up."""

from __future__ import annotations

import time

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.sparse_store import LAYERS, SPEC, make_store, tokens_of
from tools.benchmarks.synthetic import MODEL
from tools.benchmarks.timing import stopwatch
from tools.benchmarks.workshop import Workshop
from tqstore.format.block_hash import chain_blocks

NAME = "open-10k-packs"
BAR_MS = 300.0
PAGES_A_PACK = 2 * LAYERS  # as a chat that saves every 128 tokens writes them


def run(workshop: Workshop) -> list[Row]:
    num_packs = workshop.sizes.many_packs
    workshop.progress(f"making {num_packs:,} packs", 0, 1)
    path = make_store(workshop.folder / NAME, num_packs, PAGES_A_PACK)
    cpu: list[float] = []

    def ours() -> float:
        with stopwatch() as watch:
            started = time.process_time()
            store = tqstore.Store.open(path)
            namespace = store.namespace(SPEC, MODEL)
            ns = store.pages.namespace(namespace)
            block = chain_blocks(ns.id, tokens_of(0)[: SPEC.page_tokens], SPEC.page_tokens)[0]
            found = ns.locate(namespace.layers[0], 0, block.hash)
            cpu.append(time.process_time() - started)
        store.close()
        assert found is not None, "the store lost a page"
        return watch.seconds

    taken = workshop.measure(NAME, {"ours": ours})
    note = f"{num_packs:,} packs, a header each, files in the page cache; no index file is kept"
    return [
        Row(NAME, taken["ours"] * 1e3, "ms", "what it may take", BAR_MS, Bar(1.0), note),
        Row(
            f"{NAME}/cpu",
            min(cpu) * 1e3,
            "ms",
            "all of it, waiting included",
            taken["ours"] * 1e3,
            note="the least of its rounds: what an idle machine would take",
        ),
    ]
