"""Lanes: the same bits however many there are, from any thread, and work for every core."""

from __future__ import annotations

import threading
from collections.abc import Callable

import mlx.core as mx
import pytest

import tqstore.lanes
from tests.test_attend import filled, random
from tqstore.lanes import lane

SetLanes = Callable[[int], None]
CODECS = [("prod4", "int8"), ("split4.5+mean", "mse4"), ("exact", "exact")]


@pytest.fixture
def num_lanes(monkeypatch: pytest.MonkeyPatch) -> SetLanes:
    def set_to(count: int) -> None:
        streams = tuple(mx.new_thread_local_stream(mx.cpu) for _ in range(count))
        monkeypatch.setattr(tqstore.lanes, "_streams", lambda: streams)

    return set_to


@pytest.mark.parametrize(("keys", "values"), CODECS)
def test_results_do_not_depend_on_how_many_there_are(
    keys: str, values: str, num_lanes: SetLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqstore.quant.runwise.CPU_RUN_NBYTES", 4 * 2 * 16 * 64)  # a page
    monkeypatch.setattr("tqstore.attend.RUN_NBYTES", 1)
    outcomes = []
    for count in (1, 2, 5):
        num_lanes(count)
        mx.random.seed(3)
        cache = filled(300, keys=keys, values=values)
        queries = random(4, 3, 64)
        outcomes.append((cache.attend(0, queries), cache.get_keys(0), cache.get_values(0)))
    for other in outcomes[1:]:
        for one, another in zip(outcomes[0], other, strict=True):
            assert mx.array_equal(one, another)


def test_parts_go_to_lanes_in_turn_and_the_callers_stream_stays(
    num_lanes: SetLanes,
) -> None:
    num_lanes(3)
    before = mx.default_stream(mx.default_device())
    seen = []
    for index in range(6):
        with lane(index):
            seen.append(mx.default_stream(mx.default_device()))
    assert seen[:3] == seen[3:]
    assert len({str(stream) for stream in [before, *seen]}) == 4
    assert mx.default_stream(mx.default_device()) == before


def test_one_core_means_the_callers_own_stream(num_lanes: SetLanes) -> None:
    num_lanes(1)
    before = mx.default_stream(mx.default_device())
    with lane(0):
        assert mx.default_stream(mx.default_device()) == before


def test_caches_of_several_threads_attend_at_the_same_time() -> None:
    mx.random.seed(4)
    expected = [filled_with_seed(seed) for seed in range(4)]
    found: list[mx.array | None] = [None] * 4

    def work(seed: int) -> None:
        found[seed] = filled_with_seed(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, found, strict=True):
        assert other is not None
        assert mx.array_equal(one, other)


def filled_with_seed(seed: int) -> mx.array:
    generator = mx.random.key(seed)
    keys, values, queries = (
        mx.random.normal((2, 400, 64), key=key) for key in mx.random.split(generator, 3)
    )
    cache = filled(1)
    cache.trim(1)
    cache.append(0, keys, values)
    out = cache.attend(0, queries[:, :3])
    mx.eval(out)
    return out
