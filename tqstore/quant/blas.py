"""Whether this process multiplies float32 matrices fast on the CPU.

The Linux wheel of MLX carries a plain BLAS that OpenBLAS, loaded before it, takes the place of.
Which kernels are the fastest depends on it.  Decided once, by the symbols of the process.
"""

from __future__ import annotations

import ctypes
import sys


def _has_fast_blas() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # macOS has Accelerate
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


HAS_FAST_BLAS = _has_fast_blas()
