"""Makes tests/data/format-1: a small store that every later release must read.

    python -m tools.make_test_store FOLDER

Made of fixed numbers, so that a reader can say what must come out.  The committed one was made once
and is never made anew; a new format gets a folder of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tqstore.format.arrays import RawArray
from tqstore.format.block_hash import BlockRecord, chain_blocks
from tqstore.format.checkpoint import Checkpoint, LayerTail, ModelState
from tqstore.format.namespace import Namespace
from tqstore.format.page import PageKey, stamp_headers
from tqstore.spec import CodecSpec, PageSpec
from tqstore.store.page_store import PageStore

PAGE_TOKENS = 4
NUM_TAIL = 3
MODEL = "0123456789abcdef"
CODECS = (("exact", "exact"), ("prod4", "int8"), ("uni4", "mse3"))
SESSIONS = {"first": 2, "second": 3}  # blocks of each; the second continues the first


def namespace(tenant_salt: str | None = None) -> Namespace:
    parse = CodecSpec.parse
    specs = [
        PageSpec(1, 8, 8, PAGE_TOKENS, parse(keys), parse(values), "float16")
        for keys, values in CODECS
    ]
    return Namespace.of(MODEL, specs, seed=5, parts={"weights": "w"}, tenant_salt=tenant_salt)


def blocks(of: Namespace) -> list[BlockRecord]:
    """Three; the first token is negative, as those of pictures are."""
    tokens = np.arange(3 * PAGE_TOKENS, dtype=np.int64) * 1000 - 1
    return chain_blocks(of.id, tokens, PAGE_TOKENS)


def record(spec: PageSpec, key: PageKey) -> npt.NDArray[np.uint8]:
    """uint8 [page_nbytes]: byte i is (i * 7 + layer) mod 251, behind the stamped header."""
    layer, _ = key
    row = ((np.arange(spec.page_nbytes) * 7 + layer) % 251).astype(np.uint8)
    stamp_headers(row[None], spec, [key])
    return row


def checkpoint(of: Namespace, num_blocks: int) -> Checkpoint:
    start = num_blocks * PAGE_TOKENS
    tail = np.arange(NUM_TAIL * 8, dtype=np.float16).reshape(1, NUM_TAIL, 8)
    arrays = (RawArray.of(tail), RawArray.of(-tail))
    return Checkpoint(
        namespace_id=of.id,
        page_tokens=PAGE_TOKENS,
        num_tokens=start + NUM_TAIL,
        block_hashes=tuple(block.hash for block in blocks(of)[:num_blocks]),
        tail_tokens=np.arange(NUM_TAIL, dtype="<i8").tobytes(),
        layers=(
            LayerTail(start, *arrays),
            LayerTail(start, *arrays, window=6, sink_tokens=1),
            LayerTail(start, *arrays),
        ),
        states=(ModelState(3, "ArraysCache", (RawArray("bfloat16", (2,), b"abcd"),), {"at": 1}),),
        metadata={"title": "café", "turns": [1, 2]},
        created_ns=1_700_000_000_000_000_000,
        recent_tokens=2,
        expires_ns=4_000_000_000_000_000_000 if num_blocks == SESSIONS["second"] else 0,
    )


def make(path: Path) -> None:
    """A store of two namespaces, one of them a tenant's, and two sessions in each."""
    with PageStore.open(path) as store:
        for salt in (None, "pepper"):
            own = namespace(salt)
            ns = store.namespace(own)
            done = 0
            for name, num_blocks in SESSIONS.items():
                with store.commit() as commit:
                    for spec in own.page_specs:
                        layers = [i for i, layer in enumerate(own.layers) if layer == spec]
                        keys = [(i, b.hash) for i in layers for b in blocks(own)[done:num_blocks]]
                        rows = np.stack([record(spec, key) for key in keys])
                        commit.add_pages(ns, spec, blocks(own), keys, rows)
                    session = name if salt is None else f"{name} of {salt}"
                    commit.publish(session, checkpoint(own, num_blocks))
                done = num_blocks


if __name__ == "__main__":
    make(Path(sys.argv[1]))
