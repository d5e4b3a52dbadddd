"""docs/api.md is so: its example runs, its names are there and take what it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import tqstore
import tqstore.mlx_lm

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
ROWS = re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE)
CALLS = re.findall(r"`((?:Store\.|store\.|cache\.)?\w+)\(([^`]*)\)`", "\n".join(ROWS))


def test_the_example_runs(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQSTORE_HOME", str(store_dir))
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/api.md", "exec"), names)
    assert capsys.readouterr().out == "128 no such prefix\n"
    with tqstore.Store.open(store_dir) as store:
        assert store.resume("mine").tokens == [*range(200), 7]


def test_every_name_of_the_tables_is_public() -> None:
    named = {name for row in ROWS for name in re.findall(r"^`([A-Z]\w+)", row)}
    assert {"Resumed", "Match", "SaveReport", "CacheStats", "StoreFull"} <= named
    assert named <= set(tqstore.__all__)
    assert set(tqstore.__all__) - {"__version__"} <= set(re.findall(r"\w+", TEXT))


@pytest.mark.parametrize(("name", "told"), [call for call in CALLS if "..." not in call[1]])
def test_calls_take_what_the_tables_say(name: str, told: str) -> None:
    bare = name.rpartition(".")[2]
    owners: list[Any] = [tqstore.Store, tqstore.KVCache, tqstore.mlx_lm]
    owner = tqstore if bare in tqstore.__all__ else next(o for o in owners if hasattr(o, bare))
    signature = inspect.signature(getattr(owner, bare))
    ours = {"self", "pager", "chain"}  # what only tqstore itself gives
    has = {
        parameter.name: (parameter.kind is parameter.KEYWORD_ONLY, parameter.default)
        for parameter in signature.parameters.values()
        if parameter.name not in ours
    }
    before, has_star, behind = told.partition("*")
    for part, is_by_name in ((before, False), (behind, bool(has_star))):
        for parameter in filter(None, re.split(r",\s*", part)):
            key, _, default = parameter.partition("=")
            wanted = eval(default) if default else inspect.Parameter.empty
            assert has.pop(key) == (is_by_name, wanted), parameter
    assert has == {}
