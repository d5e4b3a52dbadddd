"""A model's fingerprint: what must be equal before its keys and values may be used again.

Owns the reduction of a loaded model to one sha256: its configuration, its modules' settings and
every parameter's name, shape, dtype and bytes.  Never a path or a name, so a model swapped under
the same name differs and the same model under two names does not; a LoRA adapter changes
parameters and settings, hence the fingerprint.  Does not own what else is in a namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from tqstore.errors import InvalidInput

VERSION = "tqstore-model-1"
CHUNK_WORDS = 1 << 20  # words under one set of weights, so that the weights take 8 MiB
SAMPLE_ELEMENTS = 1 << 10
EVAL_NBYTES = 32 << 20  # parameter bytes digested in one evaluation; bounds the temporaries

# Keys of a configuration that name where a model came from, not what it is.
_PROVENANCE = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def fingerprint(model: Module) -> str:
    """64 hex digits that stand for `model`: equal models, and only those, have equal ones.

    Reads every parameter once, on the model's device, in pieces of a few MiB.  Two models
    that differ collide by accident with probability below 2^-32 for each differing piece.
    Raises InvalidInput for what is not an MLX module or holds a setting it cannot read.
    """
    digest = hashlib.sha256(description(model))
    for name, array, words in _parameter_digests(parameters(model)):
        digest.update(f"\n{name} {tuple(array.shape)} {array.dtype} ".encode())
        digest.update(words)
    return digest.hexdigest()


def sampled_fingerprint(model: Module) -> str:
    """As `fingerprint`, but of a few thousand elements of each parameter: milliseconds.

    Tells models apart of which whole parameters differ, as by training or a fused adapter; not
    those that differ in single elements.  Never what a namespace is made of.
    """
    digest = hashlib.sha256(b"sampled " + description(model))
    samples = [(name, _sample(array)) for name, array in parameters(model)]
    for name, array, words in _parameter_digests(samples):
        digest.update(f"\n{name} {tuple(array.shape)} {array.dtype} ".encode())
        digest.update(words)
    return digest.hexdigest()


def description(model: Module) -> bytes:
    """The model's class, configuration and modules' settings, and its parameters' shapes."""
    if not isinstance(model, Module):
        raise InvalidInput(
            f"a model must be an mlx.nn.Module, not {type(model).__name__}",
            doing="fingerprinting the model",
        )
    content = {
        "version": VERSION,
        "class": _class_name(model),
        "config": _plain(_config(model), "config"),
        "modules": [_settings(name, module) for name, module in _modules(model)],
        "parameters": [
            [name, list(array.shape), str(array.dtype)] for name, array in parameters(model)
        ],
    }
    return json.dumps(content, sort_keys=True).encode()


def _config(model: Module) -> object:
    for attribute in ("args", "config"):
        if hasattr(model, attribute):
            return getattr(model, attribute)
    return None


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _modules(model: Any) -> list[tuple[str, Module]]:
    return sorted(model.named_modules(), key=lambda item: str(item[0]))


def _settings(name: str, module: Module) -> list[object]:
    """A module's class and its public numbers: a LoRA scale, a norm's epsilon, a rope's base.

    They are not parameters, but they change what the model computes.
    """
    numbers = {
        key: value
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and isinstance(value, int | float | str)
    }
    return [name, _class_name(module), numbers]


def _plain(value: object, where: str) -> object:
    """`value` as JSON can hold it, by content only: never through repr, which shows addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, mx.array | np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, f"{where}.{key}")
            for key, item in value.items()
            if key not in _PROVENANCE
        }
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, where) for item in value), key=str)
    if is_dataclass(value):
        content = {item.name: getattr(value, item.name) for item in fields(value)}
        return [_class_name(value), _plain(content, where)]
    if hasattr(value, "__dict__"):
        return [_class_name(value), _plain(vars(value), where)]
    raise InvalidInput(
        f"{where} holds a {type(value).__name__}, which has no content to compare",
        doing="fingerprinting the model",
        remedy="Pass fingerprint= with 64 hex digits of your own that change with the model",
    )


def parameters(model: Any) -> list[tuple[str, mx.array]]:
    """Name and array of each parameter, by name."""
    return sorted(dict(tree_flatten(model.parameters())).items())


def _sample(array: mx.array) -> mx.array:
    """The first elements of `array` and elements spread evenly over it."""
    flat = array.reshape(-1)
    return mx.concatenate([flat[:SAMPLE_ELEMENTS], flat[:: max(1, flat.size // SAMPLE_ELEMENTS)]])


def _parameter_digests(
    arrays: list[tuple[str, mx.array]],
) -> Iterator[tuple[str, mx.array, bytes]]:
    """(name, array, digest bytes) of each array, evaluated in pieces of bounded size."""
    weights = _weights(max((array.nbytes for _, array in arrays), default=0))
    digests = [(name, array, _word_sums(array, weights)) for name, array in arrays]
    pending: list[mx.array] = []
    pending_nbytes = 0
    for _, array, sums in digests:
        for value in sums:
            pending.append(value)
            pending_nbytes += min(array.nbytes, 4 * CHUNK_WORDS)
            if pending_nbytes >= EVAL_NBYTES:
                mx.eval(pending)
                pending, pending_nbytes = [], 0
    mx.eval(pending)
    for name, array, sums in digests:
        yield name, array, b"".join(_integer(value).to_bytes(8, "little") for value in sums)


def _integer(value: mx.array) -> int:
    return int(value)


def _word_sums(array: mx.array, weights: mx.array) -> list[mx.array]:
    """One uint64 for each CHUNK_WORDS words of the array's bytes, not yet evaluated.

    Multilinear hashing (Carter and Wegman): the sum of word times weight modulo 2^64, where the
    weights depend on the position, so exchanged elements and rows show.
    """
    words = _as_words(array)
    chunks = [words[start : start + CHUNK_WORDS] for start in range(0, words.size, CHUNK_WORDS)]
    return [mx.sum(chunk.astype(mx.uint64) * weights[: chunk.size]) for chunk in chunks]


def _as_words(array: mx.array) -> mx.array:
    """The array's bytes in row-major order as uint32, zero-padded to a whole word."""
    flat = array.reshape(-1)
    missing = -array.nbytes % 4 // array.dtype.size
    if missing:
        flat = mx.concatenate([flat, mx.zeros((missing,), dtype=array.dtype)])
    return flat.view(mx.uint32)


def _weights(nbytes: int) -> mx.array:
    """Odd 64-bit numbers for at most CHUNK_WORDS words of an array of `nbytes`.

    Made by integer mixing alone, hence the same on every device.
    """
    count = min(CHUNK_WORDS, -(-nbytes // 4))
    counter = mx.arange(2 * count, dtype=mx.uint32) + 0x9E3779B9
    mixed = (counter ^ (counter >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    weights = (mixed ^ (mixed >> 16)).view(mx.uint64) | 1
    mx.eval(weights)
    return weights
