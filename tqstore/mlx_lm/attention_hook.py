"""Standing in for the attention function that mlx-lm's model modules call, undoably.

A model's module binds mlx-lm's `scaled_dot_product_attention` by name, so it is replaced there and
nowhere else: by a function that asks handlers first and otherwise calls what was there.  Owns who
has asked for that and how it is undone; knows no caches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import scaled_dot_product_attention

NAME = scaled_dot_product_attention.__name__

_lock = threading.Lock()


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call: queries [1, heads, n, dim], keys and values as the cache gave
    them, `mask` None, "causal" or an array, `sinks` logits [heads] or None."""

    queries: mx.array
    keys: Any
    values: Any
    cache: Any
    scale: float
    mask: Any
    sinks: mx.array | None = None


# The output [1, heads, n, dim], or None to leave the call to others.  Given: the module's name.
Handler = Callable[[str, AttentionCall], mx.array | None]


class _StandIn:
    """Callable as mlx-lm's function is."""

    def __init__(self, module: str, original: Callable[..., mx.array]) -> None:
        self.module, self.original = module, original
        self.handlers: tuple[Handler, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        call = AttentionCall(*args, **kwargs)
        for handler in self.handlers:
            out = handler(self.module, call)
            if out is not None:
                return out
        return self.original(*args, **kwargs)


def attention_modules(model: Module) -> list[ModuleType]:
    """The modules of the model's layers that bind mlx-lm's attention function."""
    layers: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    classes = {type(layer) for layer in layers}
    names = {base.__module__ for one in classes for base in one.__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [module for module in modules if _is_bound(getattr(module, NAME, None))]


def _is_bound(function: object) -> bool:
    return function is scaled_dot_product_attention or isinstance(function, _StandIn)


@contextmanager
def hooked(modules: Sequence[ModuleType], handler: Handler) -> Iterator[None]:
    """While this lasts `handler` is asked first.  For other callers nothing changes."""
    with _lock:
        for module in modules:
            bound = getattr(module, NAME)
            if not isinstance(bound, _StandIn):
                bound = _StandIn(module.__name__, bound)
                setattr(module, NAME, bound)
            bound.handlers = (handler, *bound.handlers)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _remove(module, handler)


def _remove(module: ModuleType, handler: Handler) -> None:
    bound = getattr(module, NAME)
    if not isinstance(bound, _StandIn):
        return  # someone else has replaced it since, and left ours out
    handlers = list(bound.handlers)
    if handler in handlers:
        handlers.remove(handler)
    bound.handlers = tuple(handlers)
    if not handlers:
        setattr(module, NAME, bound.original)
