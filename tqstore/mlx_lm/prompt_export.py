"""A session becomes a prompt-cache file that the installed mlx-lm reads.

Owns the decoding of a session's layers into mlx-lm's own cache objects.  Does not own the file's
layout (mlx-lm's) nor how it is written durably (prompt_file's).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList

from tqstore.errors import Incompatible, InvalidInput, NotFound
from tqstore.format.namespace import Namespace
from tqstore.layer_cache import LayerCache
from tqstore.mlx_lm.own_states import restore
from tqstore.mlx_lm.probe import ModelLayout, as_cache_list, new_own_cache, probe
from tqstore.mlx_lm.prompt_entry import DenseEntry
from tqstore.mlx_lm.prompt_file import write_prompt_file
from tqstore.mlx_lm.prompt_import import FINGERPRINT_KEY, TOKENS_KEY
from tqstore.resuming import Resumed
from tqstore.session import Store

_KEY = re.compile(r"[A-Za-z_][^.]*")  # what mlx-lm's own reading of metadata leaves whole


@dataclass(frozen=True)
class ExportReport:
    """What an export did.  `left_out` are metadata keys that such a file cannot hold."""

    session: str
    path: str
    num_tokens: int
    num_layers: int
    own_states: tuple[str, ...]
    nbytes: int
    codecs: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


def export_prompt_file(
    store: Store,
    name: str,
    path: str | Path,
    *,
    model: Module | None = None,
    fingerprint: str | None = None,
    overwrite: bool = False,
    memory_budget: int | None = None,
) -> ExportReport:
    """Writes session `name`, decoded, to a new file `path` for `load_prompt_cache`.

    Layers become KVCaches, windowed ones RotatingKVCaches of the last window, in the model's dtype.
    With `model`, whose `fingerprint` must be given, the list is laid out as that model's own;
    sessions with states of layers that are not paged need it, for only the model knows their
    places.  The session's tokens go into the file's metadata, with its textual metadata.

    Raises NotFound, InvalidInput, Incompatible for another model, AlreadyExists unless `overwrite`,
    StoreFull, BackendFailed.  Memory: the whole dense cache.
    """
    resumed = store.resume(name, model=fingerprint, memory_budget=memory_budget)
    if resumed.lost_tokens:
        raise NotFound(resumed.reason, doing=f"exporting session {name!r}")
    if resumed.states and model is None:
        raise InvalidInput(
            f"session {name!r} has states of {len(resumed.states)} layers that are not paged",
            doing="exporting",
            remedy="Give the model (--model PATH): only it knows where in its list they belong",
        )
    layers = [_dense(layer) for layer in resumed.cache.layers]
    if model is None:
        caches = [layer.as_cache() for layer in layers]
    else:
        caches = _model_caches(model, layers, resumed)
    metadata, left_out = _metadata(resumed, _namespace(resumed))
    nbytes = write_prompt_file(path, caches, metadata, overwrite=overwrite)
    return ExportReport(
        session=name,
        path=str(path),
        num_tokens=resumed.num_tokens,
        num_layers=len(layers),
        own_states=tuple(state.class_name for state in resumed.states),
        nbytes=nbytes,
        codecs=tuple((str(page.keys), str(page.values)) for page in resumed.cache.spec.page_specs),
        left_out=tuple(left_out),
    )


def _namespace(resumed: Resumed) -> Namespace:
    pages = resumed.cache.pager.pages
    assert pages is not None, "a resumed cache has a store"
    return pages.namespace


def _dense(layer: LayerCache) -> DenseEntry:
    """What mlx-lm would hold of a layer: all of it, or its sinks and its window."""
    num_tokens, window, keep = layer.num_tokens, layer.spec.window, layer.spec.sink_tokens
    if window is None or num_tokens <= window + keep:
        seen = layer.fetch()
        keys, values = seen.keys, seen.values
    else:
        parts = [layer.fetch(num_tokens - window, num_tokens)]
        if keep:
            parts.insert(0, layer.fetch(0, keep))
        keys = mx.concatenate([part.keys for part in parts], axis=1)
        values = mx.concatenate([part.values for part in parts], axis=1)
    mx.eval(keys, values)
    return DenseEntry(
        layer.layer, None, keys, values, num_tokens, window=window, keep=keep if window else 0
    )


def _model_caches(model: Module, layers: list[DenseEntry], resumed: Resumed) -> list[Any]:
    """The model's own list of caches with the session's state."""
    layout = probe(model)
    _check_layout(layout, layers)
    caches = new_own_cache(model)
    restore(caches, layout, resumed.states)
    for item, layer in zip(layout.paged, layers, strict=True):
        leaf = layer.as_cache()
        leaf.keys = leaf.keys.astype(item.key_dtype)
        leaf.values = leaf.values.astype(item.value_dtype)
        entry = caches[item.entry]
        if isinstance(entry, CacheList):
            parts = list(entry.caches)
            parts[item.part or 0] = leaf
            caches[item.entry] = as_cache_list(parts)
        else:
            caches[item.entry] = leaf
    return caches


def _check_layout(layout: ModelLayout, layers: list[DenseEntry]) -> None:
    stored = [(e.keys.shape[0], e.keys.shape[2], e.values.shape[2], e.window) for e in layers]
    given = [(i.kv_heads, i.key_dim, i.value_dim, i.window) for i in layout.paged]
    if stored != given:
        raise Incompatible(
            "layers' (heads, key dim, value dim, window)", stored, given, doing="exporting"
        )


def _metadata(resumed: Resumed, namespace: Namespace) -> tuple[dict[str, str], list[str]]:
    """The file's metadata, and the keys that cannot be part of it."""
    own: Mapping[str, Any] = resumed.metadata
    metadata = {
        key: value for key, value in own.items() if isinstance(value, str) and _KEY.fullmatch(key)
    }
    left_out = [key for key in own if key not in metadata]
    if resumed.tokens is not None:
        metadata[TOKENS_KEY] = json.dumps(resumed.tokens)
    metadata[FINGERPRINT_KEY] = namespace.fingerprint
    return metadata, left_out
