"""What `--train.agent_func_path` names in the test of OpenRLHF."""

from __future__ import annotations

import os

import fragile_lake  # noqa: F401

from agentkit.integrations.openrlhf import RolloutExecutor


class AgentExecutor(RolloutExecutor):
    """Plays FragileLake without retries."""

    def __init__(self) -> None:
        failures = {"failed": os.environ["FRAGILE_LAKE"], "always": 5, "size": 2}
        super().__init__(
            "FragileLake-v0",
            max_turns=4,
            max_tokens=24,
            retries=0,
            recovery="void",
            max_failure_share=0.9,
            kwargs=failures,
        )
