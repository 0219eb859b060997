"""Play an episode with mini-swe-agent: the policy works in a shell, and what it submits is the answer.

As ``agent.command`` of a run, with the Python of an environment that has mini-swe-agent. The shell is that of the place
where this program runs: give it a sandbox (``agent.sandbox``).
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")  # the run repeats what fails without the policy
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices, which are not downloaded

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel


def play(task: dict[str, str]) -> str:
    """Return the submission; it is empty if the agent gave up."""
    config = yaml.safe_load(Path(__file__).with_name("mini_swe_agent_config.yaml").read_text(encoding="utf-8"))
    endpoint = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = LitellmTextbasedModel(
        model_name=f"openai/{os.environ['OPENAI_MODEL']}", model_kwargs=endpoint, cost_tracking="ignore_errors"
    )
    agent = DefaultAgent(model, LocalEnvironment(), **config["agent"])
    return agent.run(task["text"], instructions=task["instructions"]).get("submission", "")


if __name__ == "__main__":
    print(play(json.load(sys.stdin)))
