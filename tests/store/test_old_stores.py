"""The committed store of each format must always read, to the last bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import check_store
from tools.make_test_store import SESSIONS, blocks, checkpoint, make, namespace, record
from tqstore.store.files import FILE_MODE, FOLDER_MODE
from tqstore.store.gc_plan import GcOptions
from tqstore.store.page_store import PageStore

FORMAT_1 = Path(__file__).parents[1] / "data" / "format-1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, private as a store's files are: version control keeps no such modes."""
    path = tmp_path / "store"
    shutil.copytree(FORMAT_1, path)
    for place in [path, *path.rglob("*")]:
        os.chmod(place, FOLDER_MODE if place.is_dir() else FILE_MODE)
    return path


@pytest.fixture(params=["committed", "made anew"])
def path(request: pytest.FixtureRequest, old: Path, tmp_path: Path) -> Path:
    """The committed store, and one made by the tool now: both hold the same."""
    if request.param == "committed":
        return old
    make(tmp_path / "new")
    return tmp_path / "new"


def test_everything_in_it_reads(path: Path) -> None:
    check_store(path)
    with PageStore.open(path, mode="r") as store:
        for salt in (None, "pepper"):
            own = namespace(salt)
            assert store.stored_namespace(own.id) == own
            ns = store.namespace(own)
            for name, num_blocks in SESSIONS.items():
                session = name if salt is None else f"{name} of {salt}"
                assert store.latest(session) == checkpoint(own, num_blocks)
            for layer, spec in enumerate(own.layers):
                for block in blocks(own):
                    place = ns.locate(spec, layer, block.hash)
                    assert place is not None
                    out = np.empty((1, spec.page_nbytes), np.uint8)
                    ns.read_pages(spec, [place], out)
                    assert (out[0] == record(spec, (layer, block.hash))).all()
            hashes = [block.hash for block in blocks(own)]
            assert ns.match(own.layers, [None, 6, None], [0, 1, 0], hashes) == 3


def test_it_can_be_worked_with(old: Path) -> None:
    own = namespace()
    with PageStore.open(old) as store:
        assert store.repair() == []
        store.purge("second of pepper")
        store.gc(GcOptions(grace_seconds=0))
        with store.commit() as commit:
            assert commit.publish("first", checkpoint(own, 2)) == 2
        assert store.latest("second") == checkpoint(own, 3)
    check_store(old)
