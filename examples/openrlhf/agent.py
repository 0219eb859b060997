"""The file that OpenRLHF's option --train.agent_func_path names."""

from agentkit.integrations.openrlhf import RolloutExecutor


class AgentExecutor(RolloutExecutor):
    def __init__(self):
        super().__init__(
            "FrozenLake-v1",
            max_turns=10,
            max_tokens=32,  # of one answer
            retries=2,
            kwargs={"split": "train"},
            # sandbox="docker",
            # standbys=1,
        )
