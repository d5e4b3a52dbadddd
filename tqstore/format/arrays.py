"""RawArray: an exact array as dtype name, shape and bytes, for what numpy has no dtype for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tqstore.errors import Corrupt, InvalidInput
from tqstore.format.plain import Fields

ARRAY_DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}
MAX_DIMS = 16


@dataclass(frozen=True)
class RawArray:
    """`data` is C order, little-endian; its length must be what dtype and shape say."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ARRAY_DTYPES:
            raise InvalidInput(
                f"unknown dtype {self.dtype!r}", remedy=f"Use one of {', '.join(ARRAY_DTYPES)}"
            )
        if len(self.shape) > MAX_DIMS or any(
            type(n) is not int or not 0 <= n < 1 << 48 for n in self.shape
        ):
            raise InvalidInput(f"impossible array shape {self.shape!r}")
        if type(self.data) is not bytes or len(self.data) != self.nbytes:
            raise InvalidInput(
                f"{self.dtype} {self.shape} takes {self.nbytes} bytes, {len(self.data)} given"
            )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ARRAY_DTYPES[self.dtype]

    @classmethod
    def of(cls, array: npt.NDArray[Any], dtype: str | None = None) -> RawArray:
        """A numpy array, exactly.  Give `dtype="bfloat16"` for bit patterns held as uint16."""
        name = dtype or array.dtype.name
        if name in ARRAY_DTYPES and array.dtype.itemsize != ARRAY_DTYPES[name]:
            raise InvalidInput(f"a {array.dtype} array does not hold {name} elements")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(name, tuple(array.shape), little.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """A read-only view; bfloat16 comes as uint16 bit patterns."""
        dtype = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")
        return np.frombuffer(self.data, dtype).reshape(self.shape)

    def to_plain(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "data": self.data}

    @classmethod
    def from_fields(cls, fields: Fields) -> RawArray:
        try:
            array = cls(
                fields.take("dtype", str),
                tuple(fields.take("shape", list)),
                fields.take("data", bytes),
            )
        except InvalidInput as error:
            raise Corrupt(fields.file, f"{fields.where}: {error}") from error
        fields.done()
        return array
