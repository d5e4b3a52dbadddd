"""Which hot pages to drop when room is needed.  Pure: arrays in, an order out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def choose_victims(
    candidates: npt.NDArray[np.int64],
    last_used: npt.NDArray[np.int64],
    num_references: npt.NDArray[np.int32],
    count: int,
) -> npt.NDArray[np.int64]:
    """At most `count` of `candidates`: pages that few sequences share first, then oldest use first.

    `last_used` and `num_references` are indexed like `candidates`.
    """
    order = np.lexsort((last_used, num_references > 1))
    return candidates[order[:count]]
