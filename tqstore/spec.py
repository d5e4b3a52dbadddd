"""What fixes a page's bytes: page, layer and cache specifications.

Pure values over the standard library.  Both the store (which never knows what a codebook is) and
the quantizers (which never see a file) read page layouts from here; this is their only meeting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tqstore.codec_spec import CodecSpec, stream_shapes
from tqstore.errors import InvalidInput
from tqstore.presets import codec_for

__all__ = [
    "DTYPE_NBYTES",
    "MODEL_DTYPES",
    "PAGE_HEADER_NBYTES",
    "STREAM_ALIGNMENT",
    "CacheSpec",
    "CodecSpec",
    "LayerSpec",
    "PageSpec",
    "StreamSpec",
    "align",
    "has_hadamard",
    "rotation_of",
]

DTYPE_NBYTES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}
MODEL_DTYPES = ("float16", "bfloat16", "float32")
STREAM_ALIGNMENT = 64
PAGE_HEADER_NBYTES = 64
MAX_SEED = (1 << 63) - 1
MAX_HEADS = 1 << 12
MAX_DIM = 1 << 14
MAX_PAGE_TOKENS = 1 << 14
MAX_PAGE_NBYTES = 1 << 30  # what a reader may be made to allocate by a spec it finds
# Streams of a few bytes lie behind one another: only what kernels read needs more.
SIDE_DATA_ALIGNMENT = 4


def align(nbytes: int, alignment: int = STREAM_ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """InvalidInput unless `value` is an integer from `low` to `high`, which may be open."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidInput(f"{name} must be an integer {wanted}, not {value!r}")


def _check_dtype(dtype: object) -> None:
    if isinstance(dtype, str) and dtype in MODEL_DTYPES:
        return
    meant = str(dtype).rpartition(".")[2].rstrip("'>")  # of mlx.core.float16 and the like
    remedy = f"Give the text {meant!r}" if meant in MODEL_DTYPES else ""
    known = ", ".join(MODEL_DTYPES)
    raise InvalidInput(f"dtype must be one of {known}, not {dtype!r}", remedy=remedy)


@dataclass(frozen=True)
class StreamSpec:
    """One named array inside a page record: C order, little-endian, `offset` bytes into it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class PageSpec:
    """Everything that fixes the bytes of a page: one layer's keys and values of one block."""

    kv_heads: int
    key_dim: int
    value_dim: int
    page_tokens: int
    keys: CodecSpec
    values: CodecSpec
    dtype: str
    rotation: str = "auto"

    def __post_init__(self) -> None:
        check_int("kv_heads", self.kv_heads, 1, MAX_HEADS)
        check_int("key_dim", self.key_dim, 1, MAX_DIM)
        check_int("value_dim", self.value_dim, 1, MAX_DIM)
        check_int("page_tokens", self.page_tokens, 1, MAX_PAGE_TOKENS)
        _check_dtype(self.dtype)
        if self.rotation not in ("auto", "haar", "hadamard"):
            raise InvalidInput(f"rotation must be auto, haar or hadamard, not {self.rotation!r}")
        for role, codec, dim in self._sides:
            codec.check_dim(role, dim)
            if self.rotation == "hadamard":
                for size in {dim, *codec.rotated_dims(dim)}:
                    _require_hadamard(size)
        if self.page_nbytes > MAX_PAGE_NBYTES:
            raise InvalidInput(
                f"a page would take {self.page_nbytes} bytes, more than {MAX_PAGE_NBYTES}",
                remedy="Use fewer page_tokens",
            )

    @cached_property
    def streams(self) -> tuple[StreamSpec, ...]:
        """Streams in file order after the 64-byte header.

        Each starts on a 64-byte boundary, but side data right behind the stream before it.
        """
        end = PAGE_HEADER_NBYTES
        streams = []
        for role, codec, dim in self._sides:
            for one in stream_shapes(codec, self.kv_heads, self.page_tokens, dim, self.dtype):
                offset = align(end, SIDE_DATA_ALIGNMENT if one.is_side_data else STREAM_ALIGNMENT)
                streams.append(StreamSpec(f"{role}_{one.name}", one.dtype, one.shape, offset))
                end = offset + streams[-1].nbytes
        return tuple(streams)

    @property
    def _sides(self) -> tuple[tuple[str, CodecSpec, int], ...]:
        return (("key", self.keys, self.key_dim), ("value", self.values, self.value_dim))

    @property
    def key_bits(self) -> float:
        """Bits a key element takes in memory and on disk, all side data and padding included."""
        return self._side_bits("key", self.key_dim)

    @property
    def value_bits(self) -> float:
        """Bits a value element takes in memory and on disk, all side data and padding included."""
        return self._side_bits("value", self.value_dim)

    @property
    def page_bits(self) -> float:
        """Bits an element of either takes, the page's header included."""
        elements = self.kv_heads * self.page_tokens * (self.key_dim + self.value_dim)
        return 8 * self.page_nbytes / elements

    def _side_bits(self, role: str, dim: int) -> float:
        own = [stream for stream in self.streams if stream.name.startswith(f"{role}_")]
        nbytes = align(own[-1].offset + own[-1].nbytes) - own[0].offset
        return 8 * nbytes / (self.kv_heads * self.page_tokens * dim)

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of a page record, header included: a multiple of 64."""
        last = self.streams[-1]
        return align(last.offset + last.nbytes)

    @property
    def dense_nbytes(self) -> int:
        """Bytes the same keys and values take in the model's own dtype."""
        elements = self.kv_heads * self.page_tokens * (self.key_dim + self.value_dim)
        return elements * DTYPE_NBYTES[self.dtype]

    @property
    def fields(self) -> dict[str, str | int]:
        """Plain values, in the order that fingerprints and error messages use."""
        return {
            "kv_heads": self.kv_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "page_tokens": self.page_tokens,
            "keys": str(self.keys),
            "values": str(self.values),
            "dtype": self.dtype,
            "rotation": self.rotation,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, str | int]) -> PageSpec:
        """Inverse of `fields`; InvalidInput if a field is missing, unknown or out of range."""
        try:
            values = dict(fields)
            codecs = {side: CodecSpec.parse(str(values.pop(side))) for side in ("keys", "values")}
            return cls(**codecs, **values)  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"page spec {fields!r} has missing or unknown fields") from error

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for this spec in page headers."""
        text = ";".join(f"{name}={value}" for name, value in self.fields.items())
        return hashlib.sha256(text.encode()).digest()[:16]

    @property
    def name(self) -> str:
        """A readable, path-safe, unique name: the folder of this spec's packs."""
        shape = f"h{self.kv_heads}-d{self.key_dim}"
        return f"{self.keys}-{self.values}-{shape}-{self.digest.hex()[:12]}"


def has_hadamard(dim: int) -> bool:
    """Sizes at which MLX's Hadamard transform was verified self-inverse: 2^k and 12 * 2^k."""
    for base in (1, 12):
        quotient, rest = divmod(dim, base)
        if rest == 0 and quotient >= 1 and quotient & (quotient - 1) == 0:
            return True
    return False


def _require_hadamard(dim: int) -> None:
    if not has_hadamard(dim):
        raise InvalidInput(
            f"no self-inverse Hadamard transform of size {dim}",
            remedy="Use rotation='haar' or 'auto'",
        )


def rotation_of(rotation: str, dim: int) -> str:
    """The rotation `auto` stands for: Hadamard stages where they are correct and mix well."""
    if rotation != "auto":
        return rotation
    return "hadamard" if dim >= 32 and has_hadamard(dim) else "haar"


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, checked when it is made.

    `window` counts tokens a query sees, itself included; None is all.  The first `sink_tokens` stay
    visible whatever the window.  `dtype` is the model's own.  `keys` and `values` name codecs or
    presets.
    """

    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    sink_tokens: int = 0
    keys: str | CodecSpec = "prod4"
    values: str | CodecSpec = "int8"
    dtype: str = "float16"

    def __post_init__(self) -> None:
        check_int("kv_heads", self.kv_heads, 1, MAX_HEADS)
        check_int("head_dim", self.head_dim, 1, MAX_DIM)
        if self.value_dim is not None:
            check_int("value_dim", self.value_dim, 1, MAX_DIM)
        if self.window is not None:
            check_int("window", self.window, 1)
        check_int("sink_tokens", self.sink_tokens, 0)
        _check_dtype(self.dtype)
        codec_for("keys", self.keys).check_dim("key", self.head_dim)
        codec_for("values", self.values).check_dim("value", self.value_dim or self.head_dim)

    def sink_blocks(self, page_tokens: int) -> int:
        """Blocks at a sequence's start that hold the sinks."""
        return -(-self.sink_tokens // page_tokens)

    def page_spec(self, page_tokens: int, rotation: str) -> PageSpec:
        return PageSpec(
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim if self.value_dim is None else self.value_dim,
            page_tokens=page_tokens,
            keys=codec_for("keys", self.keys),
            values=codec_for("values", self.values),
            dtype=self.dtype,
            rotation=rotation,
        )


@dataclass(frozen=True)
class CacheSpec:
    """A whole cache: its paged layers and what they share.  Checked when it is made.

    The newest `recent_tokens` behind a block stay exact before it is sealed.  With
    `window_history` pages that leave a layer's window are stored too, so that the cache can go
    back to any block; without it only those that the window needs when it is saved.
    """

    layers: tuple[LayerSpec, ...]
    page_tokens: int = 64
    recent_tokens: int = 32
    seed: int = 0
    rotation: str = "auto"
    window_history: bool = True
    page_specs: tuple[PageSpec, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        check_int("recent_tokens", self.recent_tokens, 0)
        check_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.window_history, bool):
            raise InvalidInput(f"window_history must be a bool, not {self.window_history!r}")
        specs = tuple(layer.page_spec(self.page_tokens, self.rotation) for layer in self.layers)
        object.__setattr__(self, "page_specs", specs)


def _checked_layers(layers: object) -> tuple[LayerSpec, ...]:
    found = tuple(layers) if isinstance(layers, Iterable) else None
    if found is None or not all(isinstance(layer, LayerSpec) for layer in found):
        raise InvalidInput(f"layers must be a list of LayerSpec, not {layers!r}")
    if not found:
        raise InvalidInput("a cache needs at least one layer")
    return found
