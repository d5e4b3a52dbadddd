"""Real deaths: SIGKILL of a saving process at random moments.  tools/crash does it 1,000 times."""

from __future__ import annotations

import pytest

from tests.store.synthetic import chain, save
from tools.faults.cuts import memory_folder
from tools.faults.kills import kill_often, what_is_lost
from tools.faults.promises import BrokenPromise, Promises, State, Step
from tqstore.store.page_store import PageStore

KILLS = 60
DEMO = chain(2)


def test_kills_at_random_moments_lose_nothing() -> None:
    """Promises 1 and 2 against the death of the process."""
    with memory_folder() as folder:
        report = kill_often(folder, KILLS)
    assert report.broken == ()
    assert report.kills == KILLS
    assert report.acknowledged > KILLS


def test_a_loss_is_seen() -> None:
    """The check that follows each kill: a lost session, another state, a lost page."""
    with memory_folder() as folder:
        path = folder / "store"
        with PageStore.open(path) as store:
            save(store, "demo", DEMO, 0, 1)
        for step, problem in (
            (Step("acknowledged", "demo", State(DEMO, 1)), None),
            (Step("acknowledged", "other", State(DEMO, 1)), "'other' is lost"),
            (Step("acknowledged", "demo", State(DEMO, 2)), "never saved so"),
            (Step("acknowledged", "demo", None), "never saved so"),
        ):
            promises = Promises()
            promises.hear(step)
            found = what_is_lost(path, promises, is_thorough=True)
            assert (problem is None and found is None) or (problem and problem in str(found))
        for pack in path.rglob("c.*.0"):
            pack.unlink()
        promises = Promises()
        promises.hear(Step("acknowledged", "demo", State(DEMO, 1)))
        with PageStore.open(path) as store, pytest.raises(BrokenPromise, match="lost a page"):
            promises.check(store)
