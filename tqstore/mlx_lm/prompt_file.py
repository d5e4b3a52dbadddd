"""mlx-lm's prompt-cache files, read whatever version wrote them and written for the installed one.

Owns the two layouts that such files have had (mlx-lm 0.32 keeps numbers as arrays and names them in
`scalars`; those before keep them as text in the metadata), and a durable, exclusive way of writing.
Does not own what a cache class's state means (prompt_state's), nor sessions.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, save_prompt_cache
from safetensors import SafetensorError, safe_open

from tqstore.errors import AlreadyExists, BackendFailed, Corrupt, InvalidInput, NotFound
from tqstore.mlx_lm.prompt_entry import Entry, Layout
from tqstore.mlx_lm.prompt_state import entries_of
from tqstore.store.files import failure

SUFFIX = ".safetensors"
MAX_PARTS = 1 << 16  # of one level of a state's tree


@dataclass(frozen=True)
class PromptFile:
    """A file's caches in the order of the model's list, and its user's metadata."""

    path: str
    layout: Layout
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def read_prompt_file(path: str | Path) -> PromptFile:
    """Reads a whole file into memory; nothing of it is read later.

    Raises NotFound, Corrupt for what is no intact prompt-cache file, InvalidInput for caches that
    this release cannot take over.
    """
    where = str(path)
    _check_suffix(where, "importing")
    if not Path(path).is_file():
        raise NotFound(f"there is no file {where}", doing="importing")
    try:
        # MLX believes what a header says about offsets; this library checks it.
        with safe_open(where, framework="numpy") as file:
            raw = dict(file.metadata() or {})
        arrays: dict[str, mx.array] = mx.load(where)  # type: ignore[assignment]
        mx.eval(list(arrays.values()))
    except OSError as error:
        raise failure(error, "importing", where) from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise Corrupt(where, f"not a safetensors file ({error})", doing="importing") from error
    layout, metadata, classes, infos = _split(raw, where)
    scalars = _scalars(raw, where) if layout is Layout.SCALARS else {}
    states = _nested({**arrays, **_values(arrays, scalars, where)}, where)
    if not isinstance(states, list) or len(states) != len(classes):
        raise Corrupt(where, "its states are not as many as its cache classes", doing="importing")
    entries = entries_of(layout, classes, states, infos, where)
    return PromptFile(where, layout, tuple(entries), metadata)


def _check_suffix(path: str, doing: str) -> None:
    if not path.endswith(SUFFIX):
        raise InvalidInput(
            f"{path} does not end in {SUFFIX}",
            doing=doing,
            remedy="mlx-lm knows prompt-cache files by that name",
        )


def _split(
    raw: Mapping[str, str], where: str
) -> tuple[Layout, dict[str, str], list[str], list[Any]]:
    """Layout, the user's metadata, class names, and the `meta_state` of each class.

    0.32: [metadata, classes, scalars], where scalars begin with an empty text.  Before: [infos,
    metadata, classes].
    """
    layout = Layout.SCALARS if raw.get("2.0") == "" else Layout.META_STATE
    user, names = ("0", "1") if layout is Layout.SCALARS else ("1", "2")
    metadata = _below(raw, user)
    classes = _nested(_below(raw, names), where)
    infos = _nested(_below(raw, "0"), where) if layout is Layout.META_STATE else []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise Corrupt(where, "it names no cache classes: not a prompt-cache file of mlx-lm")
    if not classes:
        raise Corrupt(where, "it holds no caches")
    if layout is Layout.SCALARS:
        return layout, metadata, classes, [""] * len(classes)
    if not isinstance(infos, list) or len(infos) != len(classes):
        raise Corrupt(where, "its infos are not as many as its cache classes")
    return layout, metadata, classes, infos


def _below(raw: Mapping[str, str], part: str) -> dict[str, str]:
    prefix = part + "."
    return {key[len(prefix) :]: text for key, text in raw.items() if key.startswith(prefix)}


def _scalars(raw: Mapping[str, str], where: str) -> dict[str, str]:
    """Array name -> how to read it."""
    listed = _nested(_below(raw, "2"), where)
    scalars = {}
    for item in listed[1:]:
        if not (isinstance(item, list) and len(item) == 2):
            raise Corrupt(where, "its list of scalars is malformed")
        scalars[str(item[0])] = str(item[1])
    return scalars


def _values(
    arrays: Mapping[str, mx.array], scalars: Mapping[str, str], where: str
) -> dict[str, Any]:
    """What the arrays that stand for other values stand for."""
    values: dict[str, Any] = {}
    for name, kind in scalars.items():
        array = arrays.get(name)
        if array is None:
            raise Corrupt(where, f"its scalar {name} is missing")
        if kind == "scalar" and array.size == 1:
            values[name] = array.item()
        elif kind == "string" and array.ndim == 1 and array.size < MAX_PARTS:
            values[name] = _text(array, name, where)
        elif kind == "none":
            values[name] = None
        else:
            raise Corrupt(where, f"its scalar {name} is of unknown kind {kind!r}")
    return values


def _text(codes: mx.array, name: str, where: str) -> str:
    try:
        return "".join(chr(int(code)) for code in codes.tolist())  # type: ignore[arg-type, union-attr]
    except (ValueError, OverflowError, TypeError) as error:
        raise Corrupt(where, f"its scalar {name} is no text", doing="importing") from error


def _nested(flat: Mapping[str, Any], where: str) -> Any:
    """Lists of lists from names such as `0.1.0`; every list whole, whatever the order of names."""
    groups: dict[str, dict[str, Any]] = {}
    leaves: dict[str, Any] = {}
    for name, value in flat.items():
        head, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(head, {})[rest] = value
        else:
            leaves[head] = value
    names = {*groups, *leaves}
    if len(names) > MAX_PARTS or len(names) < len(groups) + len(leaves):
        raise Corrupt(where, "its names contradict each other")
    if names != {str(index) for index in range(len(names))}:
        raise Corrupt(where, f"its names are not a list: {', '.join(sorted(names)[:4])}")
    items = (str(index) for index in range(len(names)))
    return [_nested(groups[i], where) if i in groups else leaves[i] for i in items]


def write_prompt_file(
    path: str | Path,
    caches: Sequence[Any],
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> int:
    """Writes a file that `load_prompt_cache` of the installed mlx-lm reads; its bytes.

    `caches` are that mlx-lm's own objects.  Durable when this returns, readable by its owner only.
    A file that is there stays as it is (AlreadyExists) unless `overwrite`, and then until the new
    one is whole.  Raises InvalidInput for what that mlx-lm cannot save, StoreFull and BackendFailed
    as the file system does.
    """
    target = Path(path).absolute()
    _check_suffix(target.name, "exporting")
    _refuse_chunked(caches)
    if not overwrite and os.path.lexists(target):
        raise _taken(target)
    try:
        handle, name = tempfile.mkstemp(prefix=".tmp-", suffix=SUFFIX, dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise failure(error, "exporting", str(target)) from error
    try:
        nbytes = _fill(Path(name), caches, metadata)
        _publish(Path(name), target, overwrite=overwrite)
        return nbytes
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        if isinstance(error, BackendFailed):
            raise
        raise failure(error, "exporting", str(target)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _refuse_chunked(caches: Sequence[Any]) -> None:
    """mlx-lm before 0.32 keeps no length of a ChunkedKVCache: its file would be read wrongly."""
    for cache in caches:
        for leaf in cache.caches if isinstance(cache, CacheList) else [cache]:
            if isinstance(leaf, ChunkedKVCache) and hasattr(leaf, "meta_state"):
                raise InvalidInput(
                    "the installed mlx-lm forgets the length of a ChunkedKVCache in its files",
                    doing="exporting",
                    remedy="Install mlx-lm 0.32 or newer",
                )


def _taken(target: Path) -> AlreadyExists:
    return AlreadyExists(
        f"there is a file {target}", doing="exporting", remedy="Use another name, or --force"
    )


def _fill(file: Path, caches: Sequence[Any], metadata: Mapping[str, str]) -> int:
    """Writes the temporary file, which is ours alone by its mode, and reads its header back."""
    try:
        save_prompt_cache(str(file), list(caches), dict(metadata))
        with safe_open(str(file), framework="numpy"):
            pass
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise BackendFailed(
            f"the file could not be written whole ({error})",
            doing="exporting",
            remedy="Free disk space; nothing was published",
        ) from error
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _publish(file: Path, target: Path, *, overwrite: bool) -> None:
    if overwrite:
        os.replace(file, target)
    else:
        os.link(file, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
