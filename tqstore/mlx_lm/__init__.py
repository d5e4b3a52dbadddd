"""tqstore inside mlx-lm: caches for any of its models, and sessions that survive the process.

Public here: `make_cache`, `session`, `Session`, `packed_attention`, `fingerprint`, `probe`.  See
docs/mlx-lm.md.
"""

from tqstore.mlx_lm.cache import PagedLayerCache, make_cache
from tqstore.mlx_lm.fingerprint import fingerprint
from tqstore.mlx_lm.packed_attention import packed_attention
from tqstore.mlx_lm.probe import ModelLayout, probe
from tqstore.mlx_lm.session import Session, session

__all__ = [
    "ModelLayout",
    "PagedLayerCache",
    "Session",
    "fingerprint",
    "make_cache",
    "packed_attention",
    "probe",
    "session",
]
