"""What comes into memory with `import tqstore` and `tqstore --help`: no MLX, no model library."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tqstore
from tqstore import errors

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("mlx", "mlx_lm", "transformers", "torch")


def heavy_modules_after(program: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after `program`."""
    report = f"""
import json, sys
{program}
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    run = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    loaded: list[str] = json.loads(run.stdout.splitlines()[-1])
    return loaded


def test_the_probe_sees_a_heavy_module() -> None:
    assert heavy_modules_after("import mlx.core") == ["mlx"]


@pytest.mark.parametrize(
    "program",
    [
        "import tqstore",
        "import tqstore; tqstore.CacheSpec; tqstore.TqStoreError",
        "import tqstore; tqstore.Store",
        "import tqstore.format",
        "import tqstore.store",
    ],
)
def test_these_load_no_heavy_module(program: str) -> None:
    assert heavy_modules_after(program) == []


@pytest.mark.skipif(
    not (ROOT / "tqstore" / "cli" / "__init__.py").exists(), reason="no command line yet"
)
@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"], ["inspect", "--help"]])
def test_help_loads_no_heavy_module(arguments: list[str]) -> None:
    program = f"""
from tqstore.cli import main
sys.argv = ["tqstore", *{arguments!r}]
try:
    main()
except SystemExit as leaving:
    assert not leaving.code, leaving.code
"""
    assert heavy_modules_after(program) == []


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tqstore.__version__ == project["version"]


@pytest.mark.parametrize("name", sorted(set(tqstore.__all__) - {"__version__"}))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tqstore, name).__name__ == name
    assert name in dir(tqstore)


def test_every_error_is_public() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TqStoreError)
    }
    assert raised <= set(tqstore.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tqstore.Nothing  # noqa: B018


def test_the_package_says_it_is_typed() -> None:
    spec = importlib.util.find_spec("tqstore")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert (Path(spec.submodule_search_locations[0]) / "py.typed").exists()
