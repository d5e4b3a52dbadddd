"""What the figures were measured on, in one line each."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

GIB = 1 << 30


def description(folder: Path) -> list[str]:
    """`folder` is where the benchmarks' files lie."""
    return [
        f"{_processor()}, {os.cpu_count()} cores, {_memory_nbytes() / GIB:.0f} GiB of memory",
        f"{platform.system()} {platform.release()}, file system {_file_system(folder)}",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numpy", "zarr")),
        f"MLX on {mx.default_device().type.name}, {_blas()}; load average {_load()}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _file_system(folder: Path) -> str:
    """The type of the mount that `folder` is on, where the system tells."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    parents = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    over = [(len(fields[1]), fields[2]) for fields in mounts if fields[1] in parents]
    return max(over)[1] if over else "unknown"


def _blas() -> str:
    preloaded = os.environ.get("LD_PRELOAD", "")
    return "OpenBLAS preloaded" if "openblas" in preloaded else "no OpenBLAS preloaded"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"
