"""Shares of the lowest and highest scores, without interpolation.

Invariant: the result depends on the values alone, never on their order. Equal scores on both sides of the boundary are
all left out, so a share is reached exactly only without ties.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9
"""Added before rounding down, so that 0.2 of 5 scores is one of them."""


def lowest(scores: np.ndarray, share: float) -> NDArray[np.bool_]:
    """Return which scores are below ``a[c]``, where ``a`` are the ``n`` scores in ascending order and
    ``c = floor(share * n)``; all of them if ``c = n``."""
    count = math.floor(share * len(scores) + ROUNDING)
    if count >= len(scores):
        return np.ones(len(scores), np.bool_)
    return scores < np.partition(scores, count)[count]


def highest(scores: np.ndarray, share: float) -> NDArray[np.bool_]:
    """As ``lowest``, for the highest scores."""
    return lowest(-scores, share)
