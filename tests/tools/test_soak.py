"""tools/soak: a few seconds of the crowd, and what it says of a store that loses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.store.synthetic import chain, packs, save
from tools import soak
from tools.faults.crowd import checkpoint_of
from tools.faults.promises import Promises, State, Step
from tools.faults.scenarios import PLAIN
from tqstore.store.page_store import PageStore

SECONDS = 6
ROOT = Path(__file__).parents[2]


def test_a_crowd_reads_no_wrong_byte_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--minutes", str(SECONDS / 60), "--json", str(file), "--folder", str(tmp_path)]
    # A process of its own: what other tests have loaded need not survive being forked.
    ran = subprocess.run(
        [sys.executable, "-m", "tools.soak", *options], check=False, capture_output=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr.decode()
    figures = json.loads(file.read_text())
    assert (figures["wrong"], figures["lost"], figures["leftovers"]) == ([], [], [])
    counts = figures["counts"]
    for what in ("save", "remove", "sessions read", "own sessions read", "gc", "packs deleted"):
        assert counts[what] > 0, what


def test_what_it_would_say_of_a_loss(tmp_path: Path) -> None:
    path, sequence = tmp_path / "store", chain(6, 3, PLAIN)
    with PageStore.open(path) as store:
        save(store, "demo", sequence, 0, 2)
        with store.commit() as commit:
            commit.publish("demo", checkpoint_of(State(sequence, 2)))
    promises = Promises()
    promises.hear(Step("acknowledged", "demo", State(sequence, 2)))
    assert soak.what_is_lost(path, promises) == []
    assert soak.what_is_left(path) == []
    (path / "sessions" / "stranger").mkdir()
    assert len(soak.what_is_left(path)) == 1
    packs(path)[0].unlink()
    assert "lost a page" in soak.what_is_lost(path, promises)[0]
    promises.hear(Step("acknowledged", "other", State(sequence, 2)))
    assert "'other' is lost" in soak.what_is_lost(path, promises)[1]
