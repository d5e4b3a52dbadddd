"""Stores of very many pages that take no time to make: real headers, pages that are holes.

What is measured in them never reads a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tqstore
from tools.benchmarks.synthetic import MODEL
from tqstore.format.block_hash import BlockRecord, chain_blocks
from tqstore.format.pack import PackHeader, PackLayout, shard_index
from tqstore.format.page import PageKey
from tqstore.spec import PageSpec
from tqstore.store.files import FILE_MODE

LAYERS = 16
SPEC = tqstore.CacheSpec((tqstore.LayerSpec(kv_heads=1, head_dim=64),) * LAYERS)
PAGES_A_PACK = PackLayout.of(SPEC.page_specs[0]).max_pages
FIRST_NUMBER = 1_000_000
_BLOCKS_OF_A_CHAIN = 512


def make_store(path: Path, num_packs: int, pages_a_pack: int = PAGES_A_PACK) -> Path:
    """A store of `num_packs` packs in `path`; full ones unless told otherwise.

    It holds chains of 32,768 tokens, `tokens_of(0)` the first.
    """
    with tqstore.Store.open(path) as store:
        store.save("empty", store.new_cache(SPEC, model=MODEL), [])
        namespace = store.namespace(SPEC, MODEL)
    (spec,) = namespace.page_specs
    layout = PackLayout.of(spec)
    blocks_a_pack = max(1, pages_a_pack // LAYERS)
    folder = path / "ns" / namespace.id.hex() / "pages" / spec.name
    folder.mkdir(parents=True, mode=0o700)
    waiting: list[BlockRecord] = []
    chain = made = 0
    while made < num_packs:
        while len(waiting) < blocks_a_pack:
            waiting += chain_blocks(namespace.id, tokens_of(chain), SPEC.page_tokens)
            chain += 1
        _write_pack(folder / f"c.{FIRST_NUMBER + made}.0", spec, layout, waiting[:blocks_a_pack])
        del waiting[:blocks_a_pack]
        made += 1
    return path


def tokens_of(chain: int) -> npt.NDArray[np.int64]:
    """int64 [32,768] of one of the store's chains."""
    rng = np.random.default_rng(chain)
    return rng.integers(0, 1 << 17, _BLOCKS_OF_A_CHAIN * SPEC.page_tokens)


def _write_pack(
    path: Path, spec: PageSpec, layout: PackLayout, blocks: Sequence[BlockRecord]
) -> None:
    keys: list[PageKey] = [(layer, block.hash) for layer in range(LAYERS) for block in blocks]
    header = PackHeader.of(spec, blocks, keys).encode()
    first_slot = layout.first_slot(len(header))
    with path.open("xb") as file:
        file.write(header)
        file.seek(first_slot + len(keys) * layout.stride)
        file.write(shard_index(layout, first_slot, len(keys)))
    path.chmod(FILE_MODE)
