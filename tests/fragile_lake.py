"""FrozenLake with failures, for the tests of other trainers; importing this module registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentkit import registry
from agentkit.envs.frozen_lake import FrozenLake


class PaidLake(FrozenLake):
    """FrozenLake with a reward for each step, so that no episode with a step has the reward 0."""

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + 1.0, terminated, truncated, info


class FragileLake(PaidLake):
    """A lake whose first step fails: always with the seed ``always``, and once with each other odd seed.

    ``failed`` is a folder for the seeds that have failed.
    """

    def __init__(self, failed: str, always: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._failed, self._always = Path(failed), always
        self._current = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._current = seed or 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        if self._current == self._always:
            raise OSError("its world is gone")
        if self._current % 2:
            try:
                (self._failed / str(self._current)).touch(exist_ok=False)
            except FileExistsError:
                return super().step(action)
            raise OSError("its world is gone for a moment")
        return super().step(action)


registry.register("FragileLake-v0", FragileLake)
