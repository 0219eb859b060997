"""The Ray cluster of the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from requiring import require


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """The module ``ray_cluster``, connected to a new cluster. Its CPUs are the processes that Ray starts in advance."""
    require("ray", "pip install 'agentkit-rl[ray]'")
    from agentkit.trainers.cluster import ray_cluster

    with ray_cluster.local_cluster(3):
        yield ray_cluster
