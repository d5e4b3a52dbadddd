"""What a model's cache consists of, found out without computing anything.

One token runs lazily through the model with recording caches in place of its own: shapes and
dtypes are known before evaluation, and nothing is evaluated.  Owns the decision which cache
entries are paged and which stay the model's own objects.  Does not own the paged caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from tqstore.errors import InvalidInput
from tqstore.mlx_lm.attention_hook import AttentionCall, attention_modules, hooked
from tqstore.presets import DEFAULT_PRESET, preset_codecs
from tqstore.spec import MODEL_DTYPES, CacheSpec, LayerSpec

# What a model may ask of a cache that a paged one answers.  Anything else it touches (`keys`,
# `maybe_trim_front`, ...) means that it works on the cache's insides, so the cache stays its own.
PROTOCOL = frozenset(
    {"update_and_fetch", "keys_and_values", "offset", "make_mask", "size", "empty"}
)

Codecs = str | Sequence[str]


@dataclass(frozen=True)
class PagedEntry:
    """A cache entry that becomes a paged layer.

    `entry` is its place in the model's cache list and `part` its place in a CacheList there, or
    None.  `window` and `sink_tokens` are as in LayerSpec.  `is_read_again`: other layers read its
    keys and values after its own update (`keys_and_values`).  `attention` is the model's module in
    which keys and values go straight into mlx-lm's attention function, None if they do not.
    """

    entry: int
    part: int | None
    kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype
    window: int | None
    sink_tokens: int
    is_read_again: bool
    attention: str | None = None

    @property
    def dtype(self) -> str:
        """The narrowest dtype that holds both keys and values exactly."""
        if self.key_dtype == self.value_dtype:
            return _name(self.key_dtype)
        return "float32"


@dataclass(frozen=True)
class OwnEntry:
    """A cache entry that stays an object of the model's own class, and why."""

    entry: int
    part: int | None
    class_name: str
    reason: str


@dataclass(frozen=True)
class ModelLayout:
    """A model's cache list: its paged entries, in order, and its own objects."""

    paged: tuple[PagedEntry, ...]
    own: tuple[OwnEntry, ...]

    def cache_spec(
        self,
        *,
        preset: str = DEFAULT_PRESET,
        keys: Codecs | None = None,
        values: Codecs | None = None,
        page_tokens: int = 64,
        recent_tokens: int = 32,
        seed: int = 0,
        rotation: str = "auto",
    ) -> CacheSpec:
        """The paged layers as a CacheSpec; codecs are one string, or one for each paged layer.

        What of `keys` and `values` is not given is the preset's.
        """
        if not self.paged:
            raise InvalidInput(
                "the model has no attention layer that can be paged: "
                + "; ".join(f"entry {item.entry}: {item.reason}" for item in self.own),
                doing="describing the model's cache",
                remedy="Use the model's own cache",
            )
        chosen = preset_codecs(preset)
        codecs = zip(
            _each("keys", chosen.keys if keys is None else keys, len(self.paged)),
            _each("values", chosen.values if values is None else values, len(self.paged)),
            strict=True,
        )
        layers = [
            LayerSpec(
                kv_heads=item.kv_heads,
                head_dim=item.key_dim,
                value_dim=item.value_dim,
                window=item.window,
                sink_tokens=item.sink_tokens,
                keys=key_codec,
                values=value_codec,
                dtype=item.dtype,
            )
            for item, (key_codec, value_codec) in zip(self.paged, codecs, strict=True)
        ]
        return CacheSpec(
            layers=tuple(layers),
            page_tokens=page_tokens,
            recent_tokens=recent_tokens,
            seed=seed,
            rotation=rotation,
        )


def probe(model: Module) -> ModelLayout:
    """The layout of any mlx-lm model's cache list.

    Raises InvalidInput for what mlx-lm cannot make a cache for.
    """
    recorded = _run(model, 1)
    paged: list[PagedEntry] = []
    own: list[OwnEntry] = []
    for index, (entry, parts) in enumerate(recorded):
        is_list = isinstance(entry, CacheList)
        for part, leaf in enumerate(parts):
            item = _classify(index, part if is_list else None, leaf)
            (paged if isinstance(item, PagedEntry) else own).append(item)  # type: ignore[arg-type]
    if any(item.attention for item in paged):
        # A model may go other ways with several tokens (a prompt, a draft).
        again = _run(model, 2)
        paged = [_confirmed(item, again) for item in paged]
    return ModelLayout(tuple(paged), tuple(own))


def _run(model: Module, num_tokens: int) -> list[tuple[Any, list[Any]]]:
    """The model's cache entries and their leaves, recorders of a lazy run of some tokens."""
    recorded = [_recorded(entry) for entry in new_own_cache(model)]
    recorders = [leaf for _, parts in recorded for leaf in parts if type(leaf) is _Recorder]

    def note(module: str, call: AttentionCall) -> None:
        for recorder in recorders:
            recorder.note_attention(module, call)

    tokens = mx.zeros((1, num_tokens), dtype=mx.int32)
    with hooked(attention_modules(model), note):
        model(tokens, cache=[_for_model(entry, parts) for entry, parts in recorded])
    return recorded


def _confirmed(item: PagedEntry, again: list[tuple[Any, list[Any]]]) -> PagedEntry:
    leaf = again[item.entry][1][item.part or 0]
    is_same = leaf.attention == item.attention
    return item if is_same else replace(item, attention=None)


def new_own_cache(model: Module) -> list[Any]:
    """The cache list that mlx-lm itself would make for `model`, empty."""
    if not isinstance(model, Module) or not callable(model):
        raise InvalidInput(
            f"a model must be a callable mlx.nn.Module, not {type(model).__name__}",
            doing="making a cache for the model",
        )
    if not hasattr(model, "make_cache") and not hasattr(model, "layers"):
        raise InvalidInput(
            f"{type(model).__name__} has neither make_cache() nor layers",
            doing="making a cache for the model",
            remedy="Pass a model that mlx_lm.load returns",
        )
    return list(make_prompt_cache(model))


class _Recorder:
    """Stands in for one KVCache or RotatingKVCache and notes what the model does with it.

    A proxy rather than a subclass: only what comes from outside is noted.  `__class__` keeps
    the model's isinstance checks true.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._updates: list[tuple[mx.array, mx.array]] = []
        self._fetched: tuple[Any, Any] = (None, None)
        self._attended: list[str] = []  # modules that attended to what was fetched
        self._touched: set[str] = set()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._cache)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)  # `hasattr(cache, "bits")` fails here, unrecorded
        self._touched.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_cache", "_updates", "_fetched", "_attended", "_touched"):
            object.__setattr__(self, name, value)
        else:
            self._touched.add(f"{name} =")
            setattr(self._cache, name, value)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._updates.append((keys, values))
        self._fetched = self._cache.update_and_fetch(keys, values)
        return self._fetched

    def note_attention(self, module: str, call: AttentionCall) -> None:
        if call.keys is self._fetched[0] and call.values is self._fetched[1]:
            self._attended.append(module)

    @property
    def attention(self) -> str | None:
        """The module that attended, once, to the very keys and values that were fetched."""
        return self._attended[0] if len(self._attended) == 1 else None


def _recorded(entry: Any) -> tuple[Any, list[Any]]:
    """An entry and its leaves, those that may be paged wrapped in recorders."""
    leaves = list(entry.caches) if isinstance(entry, CacheList) else [entry]
    # Exactly these classes: a subclass of the model's own may do anything.
    return entry, [_Recorder(c) if type(c) in (KVCache, RotatingKVCache) else c for c in leaves]


def as_cache_list(leaves: Sequence[Any]) -> Any:
    """mlx-lm's CacheList of some caches."""
    return CacheList(*leaves)  # type: ignore[no-untyped-call]


def _for_model(entry: Any, leaves: list[Any]) -> Any:
    return as_cache_list(leaves) if isinstance(entry, CacheList) else leaves[0]


def _classify(entry: int, part: int | None, leaf: Any) -> PagedEntry | OwnEntry:
    if type(leaf) is not _Recorder:
        name = type(leaf).__name__
        return OwnEntry(entry, part, name, f"{name} is not a cache of keys and values by position")
    reason = _unpageable(leaf)
    if reason:
        return OwnEntry(entry, part, type(leaf._cache).__name__, reason)
    keys, values = leaf._updates[0]
    keep = getattr(leaf._cache, "keep", 0)
    is_read_again = "keys_and_values" in leaf._touched
    max_size = getattr(leaf._cache, "max_size", None)
    return PagedEntry(
        entry=entry,
        part=part,
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        key_dtype=keys.dtype,
        value_dtype=values.dtype,
        # max_size counts the kept first tokens, a window does not.
        window=None if max_size is None else max_size - keep,
        sink_tokens=keep,
        is_read_again=is_read_again,
        attention=None if is_read_again else leaf.attention,
    )


def _unpageable(leaf: _Recorder) -> str:
    """Why this KVCache or RotatingKVCache cannot be paged; empty if it can."""
    if len(leaf._updates) != 1:
        return f"the model updates it {len(leaf._updates)} times a step"
    inside = sorted(leaf._touched - PROTOCOL)
    if inside:
        return f"the model uses its {', '.join(inside)}"
    keys, values = leaf._updates[0]
    for role, array in (("keys", keys), ("values", values)):
        if array.ndim != 4 or array.shape[0] != 1 or array.shape[2] != 1 or array.shape[3] < 1:
            return f"its {role} have shape {array.shape}, not [1, heads, 1, dim]"
        if _name(array.dtype) not in MODEL_DTYPES:
            return f"its {role} are {_name(array.dtype)}"
    if keys.shape[1] != values.shape[1]:
        return f"keys have {keys.shape[1]} heads and values {values.shape[1]}"
    return ""


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _each(role: str, codecs: Codecs, count: int) -> list[str]:
    if isinstance(codecs, str):
        return [codecs] * count
    if len(codecs) != count:
        raise InvalidInput(
            f"{len(codecs)} codecs for {role} of {count} paged layers",
            doing="describing the model's cache",
            remedy="Pass one codec, or one for each paged layer",
        )
    return list(codecs)
