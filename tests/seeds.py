"""Seeds of the simulations: a share of them per run, which rotates daily, or all with ``--all-seeds``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

SEEDS = 1000
SHARE = 100
"""Seeds per run; divides ``SEEDS``."""
_BLOCK = 50

Test = TypeVar("Test", bound=Callable[..., None])


def over_all_seeds(test: Test) -> Test:
    """Pass blocks of seeds to a test as ``seeds``, a range, and mark it ``seeds``; each block is one test."""
    return pytest.mark.seeds(pytest.mark.timeout(1200)(test))


def start_of_today() -> int:
    """Return the first seed of the share of today; the shares of consecutive days cover all seeds."""
    return int(time.time() // 86400) * SHARE % SEEDS


def blocks(start: int, all_seeds: bool) -> list[range]:
    """Return the blocks of one run; blocks run in parallel with ``-n``."""
    first, last = (0, SEEDS) if all_seeds else (start, start + SHARE)
    return [range(begin, min(begin + _BLOCK, last)) for begin in range(first, last, _BLOCK)]
