"""Which kind of device work goes to now.

CPU kernels of MLX are plain code, so what is fast differs (docs/quantization.md).
"""

from __future__ import annotations

import mlx.core as mx


def is_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    return bool(mx.default_device() == mx.Device(mx.cpu))
