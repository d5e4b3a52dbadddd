"""Every pack is what stock zarr reads: same bytes, absent pages as fill, damage as an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.store.synthetic import SPEC, chain, locations, packs, page_spec, save
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackLayout
from tqstore.spec import PageSpec
from tqstore.store.page_store import PageStore

SPECS = [SPEC, page_spec("exact", "exact", 2, 1024), page_spec("mse3", "uni6", 3, 80)]


def rows(path: Path) -> zarr.Array:  # type: ignore[type-arg]
    array = zarr.open_array(packs(path)[0].parent, mode="r")
    assert isinstance(array, zarr.Array)
    return array


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_zarr_reads_the_same_pages(store_dir: Path, spec: PageSpec) -> None:
    """A full pack, a partial one, and several of them."""
    per_pack = PackLayout.of(spec).max_pages
    long = chain(per_pack + 3, 1, Namespace.of("cd" * 8, [spec]))
    keys = long.keys(spec)
    expected = long.records(spec, keys)
    with PageStore.open(store_dir) as store:
        save(store, "demo", long, 0, per_pack + 1)
        save(store, "demo", long, per_pack + 1)
        found = locations(store.namespace(long.namespace), spec, keys)
    array = rows(store_dir)
    assert array.chunks == (1, spec.page_nbytes)
    assert array.shards == (per_pack, spec.page_nbytes)
    assert len(packs(store_dir)) == 3
    for location, record in zip(found, expected, strict=True):
        if location.slot < 4 or location.slot == per_pack - 1:
            assert (np.asarray(array[location.pack * per_pack + location.slot]) == record).all()
    first = found[0].pack * per_pack
    assert (np.asarray(array[first : first + per_pack]) == expected[:per_pack]).all()
    absent = found[-1].pack * per_pack + per_pack - 1
    assert not np.asarray(array[absent]).any()
    attributes = array.attrs["tqstore"]
    assert isinstance(attributes, dict)
    assert attributes["page_spec"] == spec.fields
    assert [stream["name"] for stream in attributes["streams"]] == [s.name for s in spec.streams]  # type: ignore[index,union-attr]


def test_zarr_sees_a_flipped_byte(store_dir: Path, expected_findings: set[str]) -> None:
    expected_findings |= {"page", "reference"}
    demo = chain(2)
    with PageStore.open(store_dir) as store:
        save(store, "demo", demo)
        found = locations(store.namespace(demo.namespace), SPEC, demo.keys(SPEC))
        entry = store.namespace(demo.namespace).index(SPEC).entry(found[0].pack)
        assert entry is not None
        layout = PackLayout.of(SPEC)
        at = entry.first_slot + found[3].slot * layout.stride + SPEC.page_nbytes // 2
    content = bytearray(packs(store_dir)[0].read_bytes())
    content[at] ^= 1
    packs(store_dir)[0].write_bytes(content)
    array = rows(store_dir)
    row = found[0].pack * layout.max_pages
    assert (np.asarray(array[row + found[2].slot]) == demo.records(SPEC, demo.keys(SPEC))[2]).all()
    with pytest.raises(ValueError, match=r"(?i)checksum|crc"):
        array[row + found[3].slot]
