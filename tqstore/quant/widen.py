"""float16 and bfloat16 to float32, the same numbers.

On a CPU MLX converts float16 one number at a time; the same by integer operations on whole vectors
takes a quarter of the time (docs/performance.md).
"""

from __future__ import annotations

import mlx.core as mx

# Shifting float16's exponent field into float32's leaves it 127 - 15 too low.
_REBIAS = 2.0**112
_SIGN_EXPONENT_AND_FRACTION = 0x8FFFE000 - (1 << 32)  # as int32


def widened(x: mx.array) -> mx.array:
    """Finite numbers of any floating dtype as float32, exactly."""
    if x.dtype != mx.float16 or mx.default_device() != mx.Device(mx.cpu):
        return x.astype(mx.float32)
    return _shifted(x.view(mx.int16))


@mx.compile
def _shifted(bits: mx.array) -> mx.array:
    shifted = (bits.astype(mx.int32) << 13) & _SIGN_EXPONENT_AND_FRACTION
    return shifted.view(mx.float32) * _REBIAS
