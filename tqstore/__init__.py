"""tqstore: a KV cache for MLX that is paged, TurboQuant-packed and survives the process.

The public names, loaded when they are first used: `import tqstore` alone imports neither mlx nor
zarr, so that the command line answers at once and works where MLX does not run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqstore.errors import (
        AlreadyExists,
        BackendFailed,
        Conflict,
        Corrupt,
        Incompatible,
        InvalidInput,
        NotFound,
        PoolExhausted,
        StoreFull,
        TqStoreError,
    )
    from tqstore.kv_cache import CacheStats, KVCache
    from tqstore.resuming import Match, Resumed
    from tqstore.saved_state import NamedState
    from tqstore.session import SaveReport, Store
    from tqstore.spec import CacheSpec, LayerSpec
    from tqstore.store.gc_plan import GcOptions

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "BackendFailed",
    "CacheSpec",
    "CacheStats",
    "Conflict",
    "Corrupt",
    "GcOptions",
    "Incompatible",
    "InvalidInput",
    "KVCache",
    "LayerSpec",
    "Match",
    "NamedState",
    "NotFound",
    "PoolExhausted",
    "Resumed",
    "SaveReport",
    "Store",
    "StoreFull",
    "TqStoreError",
    "__version__",
]

_ELSEWHERE = {
    "CacheSpec": "tqstore.spec",
    "CacheStats": "tqstore.kv_cache",
    "GcOptions": "tqstore.store.gc_plan",
    "KVCache": "tqstore.kv_cache",
    "LayerSpec": "tqstore.spec",
    "Match": "tqstore.resuming",
    "NamedState": "tqstore.saved_state",
    "Resumed": "tqstore.resuming",
    "SaveReport": "tqstore.session",
    "Store": "tqstore.session",
}


def __getattr__(name: str) -> Any:
    """PEP 562: the module of a public name is imported at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'tqstore' has no attribute {name!r}")
    value = getattr(import_module(_ELSEWHERE.get(name, "tqstore.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
