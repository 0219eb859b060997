"""SkyRL's generator (0.4), which plays an episode again if its environment fails.

Invariant: an episode that is played again leaves no trace: no token, no reward, no metric.

SkyRL itself ends the run with the first error of an environment.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import itertools
from typing import Any

from loguru import logger
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from agentkit.errors import EnvError


class RetryingGenerator(SkyRLGymGenerator):
    """``SkyRLGymGenerator`` with further attempts of an episode whose environment fails.

    Args:
        episode_retries: further attempts; after them, the error ends the run.
        arguments: those of SkyRL.
    """

    def __init__(self, *arguments: Any, episode_retries: int = 2, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._retries = episode_retries

    async def agent_loop(
        self, prompt: Any, env_class: str, env_extras: dict[str, Any], *arguments: Any, **named: Any
    ) -> Any:
        """Play one episode. Raises ``EnvError`` if its environment failed in all attempts."""
        for attempt in itertools.count():
            try:
                return await super().agent_loop(prompt, env_class, copy.deepcopy(env_extras), *arguments, **named)
            except EnvError as error:
                if attempt >= self._retries or not error.retryable:
                    raise
                logger.warning(f"an environment of {env_class} failed, and its episode is played again: {error}")
        raise AssertionError
