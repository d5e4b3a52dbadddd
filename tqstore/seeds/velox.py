"""VeloxQuant's `TurboQuantKVCache`: one head's keys and values, attended to where they lie packed.

Owns the configuration and behaviour that VeloxQuant-MLX 0.94.15 made public; all of the mathematics
is tqstore.quant's.  Where that package was wrong this differs on purpose: docs/seeds.md has the
list.  Not paged and not stored: that is tqstore.KVCache.
"""

from __future__ import annotations

from math import pi, sqrt

import mlx.core as mx
import numpy as np

from tqstore.errors import InvalidInput
from tqstore.quant.bitpack import unpack
from tqstore.quant.channels import largest_channels
from tqstore.quant.codec import Codec
from tqstore.quant.exact import ExactCodec
from tqstore.quant.registry import value_codec
from tqstore.quant.scale import clip_to
from tqstore.seeds.key_codecs import TwoStreamCodec, vector_codec
from tqstore.seeds.token_streams import TokenStreams
from tqstore.seeds.velox_config import VeloxConfig
from tqstore.spec import CodecSpec, PageSpec

# TurboQuant, theorem 1: the squared error of a unit vector at b bits is at most this times 4^-b.
UPPER_MSE_FACTOR = sqrt(3) * pi / 2
FLOATS = (mx.float16, mx.bfloat16, mx.float32)
# Products of two vectors within it stay finite in float32 up to 2^14 channels.
LARGEST = 2.0**56


class VeloxTurboQuantKVCache:
    """One head's cache: keys at `mse` or `prod`, values at int8, a ring at capacity.

    Token i is the i-th key and the i-th value, whichever was appended first.  While outlier
    channels are not chosen yet the keys are held exact, so that no token is ever stored without
    protection.  What is stored does not depend on how appends were split.  One thread at a time;
    deep copies share memory until they differ.

    >>> import mlx.core as mx
    >>> from tqstore.seeds import VeloxConfig, VeloxTurboQuantKVCache
    >>> cache = VeloxTurboQuantKVCache(VeloxConfig(head_dim=64, bit_width_inlier=3))
    >>> keys, values = mx.random.normal((2, 10, 64)).astype(mx.float16)
    >>> cache.append(keys, values)
    >>> cache.attend(keys[0]).shape, len(cache)
    ((64,), 10)
    """

    def __init__(self, config: object | None = None) -> None:
        self.config = VeloxConfig() if config is None else VeloxConfig.of(config)
        int8 = CodecSpec("int8", 8)
        dim = self.config.head_dim
        page = PageSpec(1, dim, dim, 1, keys=int8, values=int8, dtype="float32")
        self._values = self._rows(value_codec(page, self.config.seed))
        self.reset()

    def reset(self) -> None:
        """Forgets every token, and the chosen channels with them."""
        self._values.clear()
        self._value_dtype: str | None = None  # by name: mx.Dtype cannot be deep-copied
        self.outlier_channels: tuple[int, ...] | None = None
        is_calibrating = self.config.calibration_tokens > 0
        exact: Codec = ExactCodec(mx.float32)
        self._keys = self._rows(exact if is_calibrating else self._key_codec(None))

    def append(self, k: mx.array, v: mx.array) -> None:
        """`append_key` and `append_value` of the same tokens; neither if either is refused."""
        keys, values = self._checked("key", k), self._checked("value", v)
        if keys.shape != values.shape:
            raise InvalidInput(
                f"{keys.shape[1]} keys but {values.shape[1]} values", doing="appending a token"
            )
        self._append_keys(keys)
        self._append_values(values, v.dtype)

    def append_key(self, k: mx.array) -> None:
        """One key [head_dim] or the next n keys [n, head_dim]: float16, bfloat16 or float32.

        InvalidInput for any other shape or dtype and for what is not finite; nothing changes then.
        """
        self._append_keys(self._checked("key", k))

    def append_value(self, v: mx.array) -> None:
        """The same for values; the first value's dtype is `attend`'s until `reset`."""
        self._append_values(self._checked("value", v), v.dtype)

    def attend(self, q: mx.array) -> mx.array:
        """softmax(q k / sqrt(head_dim)) v over all tokens held, for [head_dim] or [n, head_dim].

        Scores, weights and sums are float32; the result has the values' dtype.  Zeros of an empty
        cache.  InvalidInput if some token has a key and no value, or the other way round.
        """
        queries = self._checked("query", q)
        num_keys, num_values = self._keys.num_appended, self._values.num_appended
        if num_keys != num_values:
            raise InvalidInput(
                f"{num_keys} keys and {num_values} values were appended",
                doing="attending",
                remedy="Append both sides of every token first",
            )
        dtype = getattr(mx, self._value_dtype or "float16")
        if num_keys == 0:
            return mx.zeros(q.shape, dtype=dtype)
        return clip_to(self._attended(queries), dtype).astype(dtype).reshape(q.shape)

    def get_keys(self) -> mx.array:
        """float32 [len, head_dim], decoded, the oldest first: what `attend` takes them for."""
        return self._decoded(self._keys)

    def get_values(self) -> mx.array:
        """The same of the values."""
        return self._decoded(self._values)

    def memory_bytes(self) -> int:
        """Bytes of what is held: packed codes, signs, norms, scales, chosen channels.

        Of a token: its key ceil(d b / 8) and 3 for the scale (`prod`: (b-1) bits and jl_dim more,
        and 2 for the residual's norm), its value d + 3.
        """
        channels = 0 if self.outlier_channels is None else 2 * len(self.outlier_channels)
        return self._keys.nbytes + self._values.nbytes + channels

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers: `memory_bytes` and the slots that are not taken yet."""
        spare = self._keys.allocated_nbytes - self._keys.nbytes
        spare += self._values.allocated_nbytes - self._values.nbytes
        return self.memory_bytes() + spare

    def __len__(self) -> int:
        """Tokens held, those with only one side included."""
        return max(self._keys.num_tokens, self._values.num_tokens)

    def __repr__(self) -> str:
        config = self.config
        limit = "" if config.capacity is None else f"/{config.capacity}"
        return (
            f"VeloxTurboQuantKVCache(d={config.head_dim}, n_tokens={len(self)}{limit}, "
            f"method={config.kind}, b={config.bit_width_inlier}, {self.memory_bytes()} bytes)"
        )

    def _attended(self, queries: mx.array) -> mx.array:
        """[1, rows, dim] -> float32 [1, rows, dim]."""
        keys, values = self._keys, self._values
        scores = keys.codec.scores(keys.codec.prepare(queries), keys.streams())
        visible = keys.visible()[:, None, None]  # [blocks, 1, 1, tokens]
        scores = mx.where(visible, scores * self.config.head_dim**-0.5, -mx.inf)
        weights = mx.exp(scores - scores.max(axis=(0, 3), keepdims=True))
        total = weights.sum(axis=(0, 3))[..., None]  # [1, rows, 1]
        return values.codec.finish(values.codec.weighted_sum(weights, values.streams())) / total

    def _decoded(self, side: TokenStreams) -> mx.array:
        return side.decode()[0] if side.num_tokens else mx.zeros((0, self.config.head_dim))

    def _append_keys(self, keys: mx.array) -> None:
        """[1, n, dim]; the one that completes the calibration has all encoded."""
        missing = self.config.calibration_tokens - self._keys.num_appended
        if self.outlier_channels is not None or not self.config.calibration_tokens:
            self._keys.append(keys)
            return
        self._keys.append(keys[:, :missing])
        if keys.shape[1] >= missing:
            self._choose_channels()
        if keys.shape[1] > missing:
            self._keys.append(keys[:, missing:])

    def _choose_channels(self) -> None:
        calibration = self._keys.decode()
        count = self.config.n_outlier_channels or 0
        bits = largest_channels(calibration[None], count)  # a bit a channel
        channels = np.flatnonzero(np.array(unpack(bits, 1, self.config.head_dim)))
        self.outlier_channels = tuple(channels.tolist())
        self._keys = self._rows(self._key_codec(channels))
        self._keys.append(calibration)

    def _append_values(self, values: mx.array, dtype: mx.Dtype) -> None:
        self._values.append(values)
        if self._value_dtype is None:
            self._value_dtype = str(dtype).removeprefix("mlx.core.")

    def _key_codec(self, channels: np.ndarray | None) -> Codec:
        config = self.config
        dim = config.head_dim if channels is None else config.head_dim - len(channels)
        rest = vector_codec(
            config.kind,
            config.bit_width_inlier,
            dim,
            config.seed,
            config.jl_dim,
            is_unbiased=config.unbiased_scores,
        )
        return rest if channels is None else TwoStreamCodec(rest, channels, config.head_dim)

    def _rows(self, codec: Codec) -> TokenStreams:
        return TokenStreams(codec, heads=1, capacity=self.config.capacity)

    def _checked(self, what: str, x: mx.array) -> mx.array:
        """[head_dim] or [n, head_dim] -> float32 [1, n, head_dim]."""
        dim = self.config.head_dim
        if not isinstance(x, mx.array) or x.dtype not in FLOATS:
            kind = x.dtype if isinstance(x, mx.array) else type(x).__name__
            raise InvalidInput(f"a {what} must be a float16, bfloat16 or float32 array, not {kind}")
        if x.ndim not in (1, 2) or x.shape[-1] != dim or x.size == 0:
            raise InvalidInput(f"a {what} must be [{dim}] or [n, {dim}], not {list(x.shape)}")
        rows = x.astype(mx.float32).reshape(1, -1, dim)
        if not mx.all(mx.abs(rows) <= LARGEST).item():  # false for NaN too
            raise InvalidInput(f"a {what} has inf, NaN or a magnitude above 2^56")
        return rows
