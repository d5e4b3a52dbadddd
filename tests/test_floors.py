"""The floors of docs/architecture.md: every import of every module, wherever it is, goes down."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tqstore"
NUMBERS = {"numpy"}
FORMAT = {*NUMBERS, "msgpack", "google_crc32c"}
STORE = {*FORMAT, "cryptography", "numcodecs", "platformdirs", "zarr"}
DEVICE = {*NUMBERS, "mlx"}
IO = {"fcntl", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile"}


@dataclass(frozen=True)
class Floor:
    """`height` orders the floors; `libraries` are the top-level packages a floor may import."""

    height: int
    libraries: frozenset[str]
    below: frozenset[str] | None = None  # floors it may import, None for all of lower height
    does_io: bool = True

    def may_import(self, name: str, own: str) -> bool:
        if name == own:
            return True
        if self.below is not None:
            return name in self.below
        return FLOORS[name].height < self.height


# The floors by the first part of a module's name below `tqstore`; an unknown name fails.
FLOORS = {
    "errors": Floor(0, frozenset(), frozenset(), does_io=False),
    "codec_spec": Floor(0, frozenset(), frozenset({"errors"}), does_io=False),
    "presets": Floor(0, frozenset(), frozenset({"errors", "codec_spec"}), does_io=False),
    "spec": Floor(0, frozenset(), frozenset({"errors", "codec_spec", "presets"}), does_io=False),
    "format": Floor(1, frozenset(FORMAT), does_io=False),
    "store": Floor(2, frozenset(STORE), frozenset({"errors", "codec_spec", "spec", "format"})),
    "device": Floor(1, frozenset(DEVICE), frozenset(), does_io=False),
    "lanes": Floor(1, frozenset(DEVICE), frozenset({"device"})),
    "quant": Floor(
        2,
        frozenset(DEVICE),
        frozenset({"errors", "codec_spec", "device", "lanes", "spec"}),
        does_io=False,
    ),
    "paging": Floor(3, frozenset(DEVICE | FORMAT)),
    "visibility": Floor(3, frozenset(DEVICE), frozenset()),
    "attend": Floor(4, frozenset(DEVICE)),
    # The parts of F5, one above the other.
    "tail": Floor(5, frozenset(DEVICE)),
    "layer_input": Floor(6, frozenset(DEVICE)),
    "layer_cache": Floor(7, frozenset(DEVICE)),
    "kv_cache": Floor(8, frozenset(DEVICE)),
    "saved_state": Floor(9, frozenset(DEVICE)),
    "transcode": Floor(10, frozenset(DEVICE)),
    "resuming": Floor(10, frozenset(DEVICE)),
    "session": Floor(11, frozenset(DEVICE)),
    "mlx_lm": Floor(12, frozenset(DEVICE | {"mlx_lm", "platformdirs", "safetensors"})),
    "seeds": Floor(12, frozenset(DEVICE)),
    "cli": Floor(13, frozenset(DEVICE | {"mlx_lm", "platformdirs", "rich", "typer"})),
    "__main__": Floor(14, frozenset()),
}
# What every floor may take from the package's own door.
DOOR = {"__version__"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> list[str]:
    """The module's full name in parts; a package's `__init__` is the package itself."""
    parts = ["tqstore", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(tree: ast.AST, name: list[str], is_package: bool) -> Iterator[tuple[int, list[str]]]:
    """(line, parts of what is imported) of every import, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                package = name if is_package else name[:-1]
                base = package[: len(package) - node.level + 1] + base
            # `from tqstore import store` names a module only in its last part
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value.split(".")
            else:
                yield node.lineno, ["<dynamic>"]


def _is_dynamic_import(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id in ("__import__", "import_module")) or (
        isinstance(function, ast.Attribute) and function.attr == "import_module"
    )


def breaches(source: str, name: list[str], is_package: bool) -> list[str]:
    """What is wrong with a module's imports, one line each."""
    own = name[1]
    if own not in FLOORS:
        return [f"{'.'.join(name)} is on no floor: give it one in docs/architecture.md and here"]
    floor = FLOORS[own]
    allowed = (sys.stdlib_module_names - (set() if floor.does_io else IO)) | floor.libraries
    found = []
    for line, parts in imports(ast.parse(source), name, is_package):
        where = f"{'.'.join(name)}:{line} imports {'.'.join(parts)}"
        if parts[0] == "tqstore":
            target = parts[1] if len(parts) > 1 else "the door"
            if target in DOOR:
                continue
            if target not in FLOORS:
                found.append(f"{where}, which is on no floor")
            elif not floor.may_import(target, own):
                found.append(f"{where}, which is not below it")
        elif parts[0] not in allowed:
            found.append(f"{where}, which its floor may not")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(dotted(path)))
def test_every_import_goes_down(path: Path) -> None:
    name = dotted(path)
    if name == ["tqstore"]:
        pytest.skip("the package's door has its own test")
    assert breaches(path.read_text(), name, path.name == "__init__.py") == []


def test_the_table_in_the_docs_names_the_same_modules() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| F")]
    named = [name for row in rows for name in re.findall(r"`(\w+)/?`", row[2])]
    assert sorted(named) == sorted(FLOORS)


def test_the_door_imports_nothing_when_it_opens() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    eager = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {part[0] for node in eager for _, part in imports(node, ["tqstore"], True)}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("name", "source", "is_package"),
    [
        ("store.packs", "import mlx.core as mx", False),
        ("store.packs", "def f():\n    from mlx import core", False),
        ("format.page", "import zarr", False),
        ("format.page", "from pathlib import Path", False),
        ("quant.codebook", "import os", False),
        ("store.gc", "import tqstore", False),
        ("spec", "import numpy", False),
        ("spec", "from tqstore.store import packs", False),
        ("store.packs", "from tqstore.quant import codecs", False),
        ("quant.codecs", "from tqstore.store import packs", False),
        ("quant.codecs", "from ..paging import hot_pool", False),
        ("quant", "from ..kv_cache import KVCache", True),
        ("paging.pager", "import tqstore.attend", False),
        ("errors", "from . import spec", False),
        ("kv_cache", "from tqstore import session", False),
        ("kv_cache", "from tqstore import KVCache", False),
        ("store.gc", "import importlib\nimportlib.import_module('mlx.core')", False),
        ("store.gc", "from importlib import import_module\nimport_module(name)", False),
        ("novelty", "", False),
    ],
)
def test_a_breach_is_seen(name: str, source: str, is_package: bool) -> None:
    assert breaches(source, ["tqstore", *name.split(".")], is_package)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "store.packs",
            "import os\nimport zarr\nfrom tqstore.format import pack\nfrom . import gc",
        ),
        ("kv_cache", "import mlx.core as mx\nfrom tqstore.attend import attend"),
        ("session", "from tqstore.kv_cache import KVCache"),
        ("mlx_lm.cache", "import mlx_lm\nfrom tqstore import kv_cache"),
        ("cli.inspect", "from tqstore import __version__\nimport typer"),
    ],
)
def test_a_proper_import_passes(name: str, source: str) -> None:
    assert breaches(source, ["tqstore", *name.split(".")], is_package=False) == []
