"""What is simulated over many seeds: in blocks, which run side by side (``pytest -m seeds -n logical``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

SEEDS = 1000
_BLOCK = 125

Test = TypeVar("Test", bound=Callable[..., None])


def over_all_seeds(test: Test) -> Test:
    """Gives a test its ``seeds``, a range, and takes it out of the everyday suite."""
    blocks = [range(first, first + _BLOCK) for first in range(0, SEEDS, _BLOCK)]
    for mark in (
        pytest.mark.seeds,
        pytest.mark.timeout(1200),
        pytest.mark.parametrize("seeds", blocks, ids=lambda block: f"{block.start}-{block.stop - 1}"),
    ):
        test = mark(test)
    return test
