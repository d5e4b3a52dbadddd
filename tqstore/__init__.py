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
    from tqstore.kv_cache import KVCache
    from tqstore.session import Store
    from tqstore.spec import CacheSpec, LayerSpec

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "BackendFailed",
    "CacheSpec",
    "Conflict",
    "Corrupt",
    "Incompatible",
    "InvalidInput",
    "KVCache",
    "LayerSpec",
    "NotFound",
    "PoolExhausted",
    "Store",
    "StoreFull",
    "TqStoreError",
    "__version__",
]

_ELSEWHERE = {
    "CacheSpec": "tqstore.spec",
    "KVCache": "tqstore.kv_cache",
    "LayerSpec": "tqstore.spec",
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
