"""The public interfaces of the two seed systems, on tqstore's own quantizers.

`VeloxTurboQuantKVCache` is VeloxQuant's per-head cache, `TurboQuantKVCache` ESML's per-model one.
Both are whole and right (docs/seeds.md), and neither is paged or stored: `tqstore.KVCache` is.
"""

from tqstore.seeds.esml import CacheStats, TurboQuantKVCache
from tqstore.seeds.uncompressed import UncompressedKVCache
from tqstore.seeds.velox import UPPER_MSE_FACTOR, VeloxTurboQuantKVCache
from tqstore.seeds.velox_config import VeloxConfig

__all__ = [
    "UPPER_MSE_FACTOR",
    "CacheStats",
    "TurboQuantKVCache",
    "UncompressedKVCache",
    "VeloxConfig",
    "VeloxTurboQuantKVCache",
]
