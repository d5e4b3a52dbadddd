"""The configuration of VeloxQuant's `TurboQuantKVCache`, checked.

Owns names, defaults and limits; builds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tqstore.errors import InvalidInput
from tqstore.seeds.bounds import check_integer

METHODS = {"turboquant_prod": "prod", "prod": "prod", "turboquant_mse": "mse", "mse": "mse"}
DEFAULT_CALIBRATION_TOKENS = 200


@dataclass(frozen=True)
class VeloxConfig:
    """The seed's configuration, checked when it is made.

    `bit_width_inlier` counts every bit of a key coordinate, the sign bit of `prod` included.
    `jl_dim` is the sign sketch's rows, None for as many as there are rotated channels.  `capacity`
    is the most tokens held, None for no limit.  With `enable_outlier_two_stream` the keys'
    `n_outlier_channels` largest channels, chosen from the first `n_calib_tokens`, stay at int8.
    `enable_vectorized_attend` and `enable_fused_query_dot` change nothing: attend is always both.
    Not the seed's: `unbiased_scores` has `prod` estimate inner products without bias, as the paper
    does, instead of with the least squared error (docs/seeds.md: a third more error of attention).
    """

    head_dim: int = 128
    bit_width_inlier: int = 2
    method: str = "turboquant_prod"
    jl_dim: int | None = None
    seed: int = 42
    capacity: int | None = None
    enable_vectorized_attend: bool = True
    enable_outlier_two_stream: bool = False
    n_outlier_channels: int | None = None
    n_calib_tokens: int | None = None
    enable_fused_query_dot: bool = False
    unbiased_scores: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            raise InvalidInput(f"method must be one of {known}, not {self.method!r}")
        check_integer("head_dim", self.head_dim, 1, 1 << 14)
        check_integer("bit_width_inlier", self.bit_width_inlier, 1, 8)
        check_integer("seed", self.seed, 0, (1 << 63) - 1)
        for name in ("jl_dim", "capacity", "n_calib_tokens"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, 1 << 31)
        if self.enable_outlier_two_stream:
            check_integer("n_outlier_channels", self.n_outlier_channels, 1, self.head_dim - 1)

    @classmethod
    def of(cls, config: object) -> VeloxConfig:
        """The fields of any object that has some of them, such as VeloxQuant's `KVCacheConfig`."""
        if isinstance(config, cls):
            return config
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        if "head_dim" not in names:
            raise InvalidInput(f"{config!r} is not a cache configuration: it has no head_dim")
        return cls(**{name: getattr(config, name) for name in names})

    @property
    def kind(self) -> str:
        """`prod` or `mse`."""
        return METHODS[self.method]

    @property
    def calibration_tokens(self) -> int:
        """How many keys the choice of outlier channels waits for; 0 without them."""
        if not self.enable_outlier_two_stream:
            return 0
        wanted = self.n_calib_tokens or DEFAULT_CALIBRATION_TOKENS
        return wanted if self.capacity is None else min(wanted, self.capacity)
