"""Codec strings such as `prod4` or `mse4+mean+out16`, and the streams a page has for each.

Pure values over the standard library.  Owns what may be combined with what and how many bits of
what it takes; the mathematics is `tqstore.quant`'s, the place in a page `tqstore.spec`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from tqstore.errors import InvalidInput

# A page's mean vector is coded in these many bits a coordinate.
MEAN_BITS = 4
# The paper's split gives one more bit to a quarter of the channels: 32 of 128.  Its names count
# half a bit for that, and so do ours; what a page really takes is PageSpec.key_bits.
SPLIT_PARTS = 4
_CODEC = re.compile(
    r"(?:(?P<kind>prod|mse|uni)(?P<bits>[1-8])|split(?P<split>[1-7])\.5|(?P<plain>int8|exact))"
    r"(?P<options>(\+[a-z0-9]+)*)"
)
_OUTLIERS = re.compile(r"out([1-9][0-9]{0,4})")
_OPTIONS = "+gauss is for prod, +out1 and more for prod, mse, uni and int8, +mean for all but exact"
_NAMES = "prod1..prod8, mse1..mse8, uni1..uni8, split1.5..split7.5, int8 or exact"


@dataclass(frozen=True)
class CodecSpec:
    """How keys or values become streams.

    `bits` counts every bit of a coordinate, the sign bit of `prod` included; for `split`, whose
    outlier channels have one more, it is that of the rest.  `projection` is the sign sketch's
    matrix: orthogonal (the default) or Gaussian (the QJL paper's), `prod` only.  `outliers`
    channels of each page and head are kept at int8 beside the rest (`+out16`); `is_centred` codes
    differences to the page's mean vector (`+mean`).
    """

    kind: str
    bits: int
    projection: str = "orthogonal"
    outliers: int = 0
    is_centred: bool = False

    @classmethod
    def parse(cls, text: str | CodecSpec) -> CodecSpec:
        """Raises InvalidInput for a string that names no codec."""
        if isinstance(text, CodecSpec):
            return text
        match = _CODEC.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInput(f"unknown codec {text!r}", remedy=f"Use {_NAMES}; {_OPTIONS}")
        kind = match["kind"] or match["plain"] or "split"
        bits = match["bits"] or match["split"] or (8 if kind == "int8" else 0)
        return cls(kind, int(bits))._with_options(text, match["options"].split("+")[1:])

    def _with_options(self, text: str, options: list[str]) -> Self:
        fields: dict[str, object] = {}
        name: str
        value: object
        for option in options:
            outliers = _OUTLIERS.fullmatch(option)
            if option == "gauss" and self.kind == "prod":
                name, value = "projection", "gaussian"
            elif option == "mean" and self.kind != "exact":
                name, value = "is_centred", True
            elif outliers and self.kind not in ("exact", "split"):
                name, value = "outliers", int(outliers[1])
            else:
                raise InvalidInput(
                    f"codec {text!r}: option +{option} is not one of {self.kind}'s",
                    remedy=_OPTIONS,
                )
            if name in fields:
                raise InvalidInput(f"codec {text!r}: option +{option} is given twice")
            fields[name] = value
        return type(self)(self.kind, self.bits, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        name = self.kind if self.kind in ("int8", "exact") else f"{self.kind}{self.bits}"
        options = [
            ".5" if self.kind == "split" else "",
            "+gauss" if self.projection == "gaussian" else "",
            "+mean" if self.is_centred else "",
            f"+out{self.outliers}" if self.outliers else "",
        ]
        return name + "".join(options)

    @property
    def is_rotated(self) -> bool:
        return self.kind in ("prod", "mse", "uni", "split")

    @property
    def code_bits(self) -> int:
        """Bits of the packed index codes of a coordinate: `prod` spends one bit on the sign."""
        return self.bits - 1 if self.kind == "prod" else self.bits

    @property
    def outlier_bits(self) -> int:
        """Bits of a code of an outlier channel."""
        return self.bits + 1 if self.kind == "split" else 8

    def num_outliers(self, dim: int) -> int:
        """Channels of `dim` that are coded apart from the rest."""
        return dim // SPLIT_PARTS if self.kind == "split" else self.outliers

    def check_dim(self, role: str, dim: int) -> None:
        """InvalidInput where the channels apart do not fit into `dim`."""
        if self.kind == "split" and dim % SPLIT_PARTS:
            raise InvalidInput(
                f"{role} codec {self} splits off a quarter of the channels, and {dim} is not a "
                f"multiple of {SPLIT_PARTS}",
                remedy="Use +out with a number of channels",
            )
        if self.outliers >= dim:
            raise InvalidInput(
                f"{role} codec {self} keeps {self.outliers} channels apart, of only {dim}",
                remedy=f"Use at most +out{dim - 1}" if dim > 1 else "Leave +out away",
            )

    def rotated_dims(self, dim: int) -> tuple[int, ...]:
        """Sizes of all rotations that vectors of `dim` take."""
        if not self.is_rotated:
            return (dim,) if self.is_centred else ()
        apart = self.num_outliers(dim)
        split = (apart,) if self.kind == "split" else ()
        return (dim - apart, *split, *((dim,) if self.is_centred else ()))

    def code_layout(self, stream: str, dim: int) -> tuple[int, int] | None:
        """(bits, codes a row) of a stream of packed codes without its role, None for numbers."""
        rest = dim - self.num_outliers(dim)
        layouts = {
            "codes": (self.code_bits, rest),
            "signs": (1, rest),
            "outlier_codes": (self.outlier_bits, dim - rest),
            "outlier_channels": (1, dim),
            "mean_codes": (MEAN_BITS, dim),
        }
        return layouts.get(stream)


@dataclass(frozen=True)
class StreamShape:
    """One array of one side of a page.  `is_side_data`: a few bytes, packed behind one another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_side_data: bool = False


def stream_shapes(
    codec: CodecSpec, heads: int, tokens: int, dim: int, dtype: str
) -> Iterator[StreamShape]:
    """The streams of one side of a page in file order, without the side's name.

    `dtype` is the model's, that of `exact`.
    """
    if codec.kind == "exact":
        yield StreamShape("exact", dtype, (heads, tokens, dim))
        return

    def codes(name: str, *outer: int, is_side_data: bool = False) -> StreamShape:
        layout = codec.code_layout(name, dim)
        assert layout is not None
        bits, count = layout
        return StreamShape(name, "uint8", (heads, *outer, -(-count * bits // 8)), is_side_data)

    apart = codec.num_outliers(dim)
    if codec.code_bits:
        yield codes("codes", tokens)
    if codec.kind == "prod":
        yield codes("signs", tokens)
        yield StreamShape("residual_norms", "float16", (heads, tokens))
    if apart:
        yield codes("outlier_codes", tokens)
        yield StreamShape("outlier_scales", "float16", (heads, tokens))
    if codec.is_centred:
        yield codes("mean_codes")
    yield StreamShape("scales", "float16", (heads, tokens))
    yield StreamShape("units", "float32", (heads,))
    if apart:
        yield StreamShape("outlier_units", "float32", (heads,), is_side_data=True)
        yield codes("outlier_channels", is_side_data=True)
    if codec.is_centred:
        yield StreamShape("mean_units", "float32", (heads,), is_side_data=True)
        yield StreamShape("mean_scales", "float16", (heads,), is_side_data=True)
