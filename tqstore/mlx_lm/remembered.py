"""Fingerprints remembered by weight files, so that a model need not be read whole each time.

Owns small files in the user's cache folder (TQSTORE_CACHE, else the platform's), which may be
deleted at any time.  What is remembered is believed only while every weight file has the size,
mtime, inode and device it had, the description is the same and samples of all parameters are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

from mlx.nn.layers.base import Module
from platformdirs import user_cache_dir

from tqstore.errors import NotFound
from tqstore.mlx_lm.fingerprint import fingerprint, sampled_fingerprint

SETTLED_NS = 2_000_000_000  # younger files might change again within the same mtime
_CONTENT = re.compile(rb"([0-9a-f]{64}) ([0-9a-f]{64})\n")


def remembered_fingerprint(model: Module, weights: str | Path) -> str:
    """`fingerprint(model)` for a model just loaded from the folder `weights`.

    Reads all parameters the first time, and samples of them afterwards.  A model whose weights
    were changed one by one in memory since must not be given; adapters and training show.
    Raises NotFound if the folder holds no .safetensors file.
    """
    stats = _weight_files(Path(weights))
    key = hashlib.sha256(f"{stats} {sampled_fingerprint(model)}".encode()).hexdigest()
    path = _folder() / key
    known = _read(path, key)
    if known is not None:
        return known
    digest = fingerprint(model)
    newest = max(mtime for _, _, mtime, _, _ in stats)
    if time.time_ns() - newest > SETTLED_NS and _weight_files(Path(weights)) == stats:
        _write(path, key, digest)
    return digest


def _weight_files(folder: Path) -> list[tuple[str, int, int, int, int]]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise NotFound(
            f"no .safetensors file in {folder}",
            doing="fingerprinting the model",
            remedy="Give the folder that the model was loaded from, or leave out weights",
        )
    stats = [(path, path.stat()) for path in found]
    return [
        (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev)
        for path, stat in stats
    ]


def _folder() -> Path:
    root = os.environ.get("TQSTORE_CACHE") or user_cache_dir("tqstore")
    return Path(root) / "fingerprints"


def _read(path: Path, key: str) -> str | None:
    try:
        match = _CONTENT.fullmatch(path.read_bytes())
    except OSError:
        return None
    if match is None or match[2].decode() != _check(key, match[1].decode()):
        return None
    return match[1].decode()


def _write(path: Path, key: str, digest: str) -> None:
    """Best effort: a folder that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(f"{digest} {_check(key, digest)}\n".encode())
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _check(key: str, digest: str) -> str:
    """Binds a fingerprint to its key, so that a damaged or exchanged file is not believed."""
    return hashlib.sha256(f"{key} {digest}".encode()).hexdigest()
