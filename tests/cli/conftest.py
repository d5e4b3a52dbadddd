"""A store of three sessions, made once and copied for each test, and a way to run commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

import tqstore
from tqstore.cli.app import app
from tqstore.kv_cache import KVCache
from tqstore.saved_state import NamedState

MODEL = "ab" * 32
WINDOW, SINKS = 100, 4
LAYERS = (
    tqstore.LayerSpec(2, 64),
    tqstore.LayerSpec(2, 64, window=WINDOW, sink_tokens=SINKS),
    tqstore.LayerSpec(2, 64, keys="exact", values="uni4", dtype="bfloat16"),
)
SPEC = tqstore.CacheSpec(LAYERS, page_tokens=16, recent_tokens=8)
METADATA = {"title": "red \x1b[31m", "limit": float("inf"), "raw": b"\x01\x02"}


def feed(cache: KVCache, num_tokens: int) -> None:
    for index, layer in enumerate(LAYERS):
        keys, values = (mx.random.normal((2, num_tokens, 64)) for _ in range(2))
        dtype = getattr(mx, layer.dtype)
        cache.append(index, keys.astype(dtype), values.astype(dtype))


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`chat one` of 340 tokens and two checkpoints, `fork` of it and 50 more, `small` of none."""
    path = tmp_path_factory.mktemp("cli") / "store"
    mx.random.seed(0)
    with tqstore.Store.open(path) as store:
        cache = store.new_cache(SPEC, model=MODEL, parts={"weights": "12" * 8})
        tokens = list(range(-5, 295))
        feed(cache, 300)
        state = NamedState(7, "ArraysCache", [mx.zeros((1, 3, 4))], {"offset": 1})
        store.save("chat one", cache, tokens)
        feed(cache, 40)
        tokens += range(1000, 1040)
        store.save("chat one", cache, tokens, metadata=METADATA, states=[state])
        fork = cache.fork()
        feed(fork, 50)
        store.save("fork", fork, tokens + list(range(50)))
        store.save("small", store.new_cache(SPEC, model=MODEL), [])
    return path


@pytest.fixture
def chats(made_store: Path, store_dir: Path) -> Path:
    """A copy of the store that a test may damage."""
    shutil.copytree(made_store, store_dir)
    return store_dir


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


Run = Callable[..., Ran]


@pytest.fixture
def run() -> Run:
    """`run("ls", "--json")` in this process."""

    def run_command(*arguments: object) -> Ran:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run_command


def packs_of(store: Path) -> list[Path]:
    return sorted(store.glob("ns/*/pages/*/c.*"))


def flip(path: Path, offset: int) -> None:
    """Inverts one bit of a file, which stores never do."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def the_error(ran: Ran) -> str:
    """The one line that a failed command prints on stderr."""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("tqstore: ")
    assert "Traceback" not in ran.out
    return lines[0]
