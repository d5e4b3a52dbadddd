"""Finding the longest stored prefix of a prompt in a store of very many pages."""

from __future__ import annotations

import tqstore
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.sparse_store import LAYERS, PAGES_A_PACK, SPEC, make_store, tokens_of
from tools.benchmarks.synthetic import MODEL
from tools.benchmarks.timing import stopwatch, timed
from tools.benchmarks.workshop import Workshop

NAME = "lookup-1m-pages"
BAR_MS = 10.0


def run(workshop: Workshop) -> list[Row]:
    num_packs = -(-workshop.sizes.many_pages // PAGES_A_PACK)
    workshop.progress(f"making {num_packs:,} packs", 0, 1)
    path = make_store(workshop.folder / NAME, num_packs)
    tokens = tokens_of(0)
    stored = len(tokens) - SPEC.page_tokens  # one token is left to feed, so the last block is not

    def first() -> float:
        """By a process that has not looked into the store yet."""
        with tqstore.Store.open(path) as store, stopwatch() as watch:
            found = store.match(tokens, spec=SPEC, model=MODEL).num_tokens
        assert found == stored, "the store lost a prefix"
        return watch.seconds

    with tqstore.Store.open(path) as store:

        def look_up() -> None:
            found = store.match(tokens, spec=SPEC, model=MODEL).num_tokens
            assert found == stored, "the store lost a prefix"

        taken = workshop.measure(NAME, {"warm": timed(look_up), "first": first})
    shape = f"{num_packs * PAGES_A_PACK:,} pages in {num_packs:,} packs, {LAYERS} layers"
    note = f"{len(tokens):,} tokens hashed, looked up, a cache made of them; {shape}"
    return [
        Row(NAME, taken["warm"] * 1e3, "ms", "what it may take", BAR_MS, Bar(1.0), note),
        Row(
            f"{NAME}/first",
            taken["first"] * 1e3,
            "ms",
            "the same, warm",
            taken["warm"] * 1e3,
            note="by a process that has yet to read the headers of all packs; files in the page "
            "cache",
        ),
    ]
