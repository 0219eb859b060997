"""Play an episode with mini-swe-agent: the policy works in a shell, and what it submits is the answer.

As ``agent.command`` of a run, with the Python of an environment that has mini-swe-agent. The shell is that of the place
where this program runs: give it a sandbox (``agent.sandbox``).
"""

import json
import os
import sys

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")  # the run repeats what fails without the policy
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices, which are not downloaded

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = """{{instructions}}

Work with a shell. Each of your messages ends with one command in a block. To end the task, print a line that says \
that it is complete, and then the answer:
```mswea_bash_command
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER
```"""


def play(task: dict[str, str]) -> str:
    """Return the submission; it is empty if there is none after ten commands."""
    endpoint = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = LitellmTextbasedModel(
        model_name=f"openai/{os.environ['OPENAI_MODEL']}", model_kwargs=endpoint, cost_tracking="ignore_errors"
    )
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{task}}", step_limit=10, cost_limit=0
    )
    return agent.run(task["text"], instructions=task["instructions"]).get("submission", "")


if __name__ == "__main__":
    print(play(json.load(sys.stdin)))
