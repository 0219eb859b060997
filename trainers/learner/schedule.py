"""Learning-rate schedules. This module does not import torch."""

from __future__ import annotations

import math
from typing import Literal


def schedule_factor(step: int, schedule: Literal["constant", "linear", "cosine"], warmup: int, total: int) -> float:
    """Return the share of the peak learning rate for optimiser step ``step`` (from 0) of ``total``.

    Linear from ``1 / warmup`` to 1 over ``warmup`` steps; then constant, or down to 0 just after the last step, along
    a line or half a cosine.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
