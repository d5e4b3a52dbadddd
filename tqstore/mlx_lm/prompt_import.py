"""A prompt-cache file of mlx-lm becomes a session.

Owns the tokens' and the model's identity, and the filling of layers.  Does not own how a file is
read (prompt_file's), what its caches become (prompt_layout's) nor how a cache is saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from tqstore.errors import AlreadyExists, Incompatible, InvalidInput
from tqstore.format.block_hash import Tokens, as_tokens, needed_blocks
from tqstore.kv_cache import KVCache
from tqstore.layer_cache import LayerCache
from tqstore.mlx_lm.own_states import collect
from tqstore.mlx_lm.probe import Codecs, probe
from tqstore.mlx_lm.prompt_entry import DenseEntry
from tqstore.mlx_lm.prompt_file import PromptFile, read_prompt_file
from tqstore.mlx_lm.prompt_layout import checked_layout, layout_of, own_objects
from tqstore.paging.page_table import EXPIRED
from tqstore.presets import DEFAULT_PRESET
from tqstore.saved_state import require_in_step, to_checkpoint
from tqstore.session import Store

CHUNK_TOKENS = 1024  # appended at a time
TOKENS_KEY = "tokens"  # of a file's metadata: a JSON list
FINGERPRINT_KEY = "model_fingerprint"


@dataclass(frozen=True)
class ImportReport:
    """What an import did.  `losses` says what the file had lost and what the codecs lose."""

    session: str
    layout: str
    num_tokens: int
    num_layers: int
    own_states: tuple[str, ...]
    new_pages: int
    nbytes_written: int
    codecs: tuple[tuple[str, str], ...]
    losses: tuple[str, ...]


def import_prompt_file(
    store: Store,
    name: str,
    path: str | Path,
    *,
    fingerprint: str | None = None,
    tokens: Tokens | None = None,
    model: Module | None = None,
    preset: str = DEFAULT_PRESET,
    keys: Codecs | None = None,
    values: Codecs | None = None,
    page_tokens: int = 64,
    recent_tokens: int = 32,
    seed: int = 0,
    memory_budget: int | None = None,
) -> ImportReport:
    """Makes the new session `name` of a file that any mlx-lm from 0.28 on has saved.

    `tokens` are those whose keys and values the file holds, and `fingerprint` is the model's
    (`tqstore.mlx_lm.fingerprint`); both may stand in the file's metadata, as in one that `export`
    wrote.  With `model` the file is checked against what that model's caches look like; without
    it layers are taken as the file has them.  Settings are as in `tqstore.mlx_lm.session`.

    Raises InvalidInput if tokens are missing or not as many as the file's, or keys that a windowed
    layer needs are not in the file; AlreadyExists (or Conflict), NotFound, Corrupt; Incompatible if
    file and model do not fit.  The store is as before then, apart from pages no session needs.
    """
    _require_new(store, name)
    file = read_prompt_file(path)
    told = _tokens(file, tokens)
    digest = _fingerprint(file, fingerprint)
    dense = {(e.entry, e.part): e for e in file.entries if isinstance(e, DenseEntry)}
    _check_counts(file, dense.values(), len(told))
    layout = layout_of(file) if model is None else checked_layout(probe(model), file)
    spec = layout.cache_spec(
        preset=preset,
        keys=keys,
        values=values,
        page_tokens=page_tokens,
        recent_tokens=recent_tokens,
        seed=seed,
    )
    cache = store.new_cache(spec, model=digest, memory_budget=memory_budget)
    cache.tell(told)
    layers = [dense[item.entry, item.part] for item in layout.paged]
    for layer, entry in zip(cache.layers, layers, strict=True):
        _fill(layer, entry)
    require_in_step(cache, told)
    metadata = {
        key: text for key, text in file.metadata.items() if key not in (TOKENS_KEY, FINGERPRINT_KEY)
    }
    states = collect(own_objects(file.entries, layout), layout)
    with store.pages.commit() as commit:
        cache.spill(commit)
        commit.publish(name, to_checkpoint(cache, told, states, metadata), after=0)
    return ImportReport(
        session=name,
        layout=file.layout.value,
        num_tokens=len(told),
        num_layers=len(layers),
        own_states=tuple(item.class_name for item in layout.own),
        new_pages=commit.new_pages,
        nbytes_written=commit.nbytes_written,
        codecs=tuple((str(page.keys), str(page.values)) for page in spec.page_specs),
        losses=tuple(_losses(layers, cache)),
    )


def _require_new(store: Store, name: str) -> None:
    """Early, before a long import; publishing makes sure of it again."""
    with store.pages.commit() as commit:
        if commit.newest(name):
            raise AlreadyExists(
                f"there is a session {name!r}", doing="importing", remedy="Use another name"
            )


def _tokens(file: PromptFile, given: Tokens | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The tokens given, or those of the file's metadata; InvalidInput if they differ or miss."""
    stored = None
    if TOKENS_KEY in file.metadata:
        try:
            stored = as_tokens(json.loads(file.metadata[TOKENS_KEY]))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"the tokens in the metadata of {file.path} are not a JSON list of integers",
                doing="importing",
            ) from error
    if given is None and stored is None:
        raise InvalidInput(
            f"{file.path} does not say which tokens its keys and values are of",
            doing="importing",
            remedy="Give the tokens of the prompt that was cached (--tokens FILE): without them "
            "no later prompt could be compared with the session",
        )
    told = stored if given is None else as_tokens(given)
    assert told is not None
    if stored is not None and not np.array_equal(stored, told):
        raise InvalidInput(
            f"the tokens given are not those in the metadata of {file.path}", doing="importing"
        )
    return told


def _fingerprint(file: PromptFile, given: str | None) -> str:
    stored = file.metadata.get(FINGERPRINT_KEY)
    if given is None and stored is None:
        raise InvalidInput(
            f"{file.path} does not say which model it is of",
            doing="importing",
            remedy="Give the model's folder or its fingerprint (--model)",
        )
    if given is not None and stored is not None and given != stored:
        raise Incompatible("model", stored, given, doing="importing")
    return given or stored or ""


def _check_counts(file: PromptFile, entries: Iterable[DenseEntry], num_tokens: int) -> None:
    for entry in entries:
        if entry.offset != num_tokens:
            raise InvalidInput(
                f"entry {entry.entry} of {file.path} holds {entry.offset} tokens, "
                f"{num_tokens} were given",
                doing="importing",
                remedy="Give exactly the tokens that the model was fed",
            )


def _fill(layer: LayerCache, entry: DenseEntry) -> None:
    """Appends what the file has; a windowed layer begins with the first block that is whole."""
    first = -(-entry.first_kept // layer.page_tokens)
    if first:
        _require_enough(layer, entry, first)
        layer.table.extend(np.full(first, EXPIRED, np.int64))
    dtype = getattr(mx, layer.page_spec.dtype)
    # Rows from the first whole block on: the last rows of the file are its newest tokens.
    start = entry.num_kept - (entry.offset - first * layer.page_tokens)
    for at in range(start, entry.num_kept, CHUNK_TOKENS):
        part = slice(at, min(at + CHUNK_TOKENS, entry.num_kept))
        layer.append(
            entry.keys[:, part].astype(dtype),
            entry.values[:, part].astype(dtype),
            check_finite=True,
        )


def _require_enough(layer: LayerCache, entry: DenseEntry, first: int) -> None:
    """InvalidInput unless every block that a resume needs is whole in the file."""
    num_blocks = max(0, entry.offset - layer.recent_tokens) // layer.page_tokens
    sinks, needed = needed_blocks(
        num_blocks, layer.page_tokens, layer.spec.window, layer.spec.sink_tokens
    )
    if sinks or first > min(needed, num_blocks):
        raise InvalidInput(
            f"entry {entry.entry} keeps {entry.num_kept} of {entry.offset} tokens, and pages need "
            f"all from token {0 if sinks else needed * layer.page_tokens} on: what left its ring "
            "is gone",
            doing="importing",
            remedy="Feed the tokens to a new session instead: mlx-lm's ring keeps less than a "
            "windowed layer's pages",
        )


def _losses(layers: Sequence[DenseEntry], cache: KVCache) -> Iterator[str]:
    quantized = sorted({entry.bits for entry in layers if entry.bits is not None})
    if quantized:
        bits = " and ".join(map(str, quantized))
        yield f"the file's keys and values were quantized to {bits} bits: that loss stays"
    lossy = {
        f"{page.keys}/{page.values}"
        for page in cache.spec.page_specs
        if {page.keys.kind, page.values.kind} != {"exact"}
    }
    if lossy and cache.num_sealed_blocks:
        before = ", on top of that" if quantized else ""
        yield f"pages are coded as {', '.join(sorted(lossy))}{before}"
