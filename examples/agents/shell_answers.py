"""Messages as mini-swe-agent expects them: a parser with which a small model learns them by imitation."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from agentkit.trainers.rollout.parser import NumberParser, ParsedAnswer

_SUBMITTED = re.compile(r"```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo (\S+)\n```")


class ShellAnswers:
    """Parser of messages that submit their action with a shell command.

    With it, the built-in loop shows a model what mini-swe-agent shows it as the first message of an episode.
    """

    def __init__(self, actions_per_turn: int) -> None:
        config = yaml.safe_load(Path(__file__).with_name("mini_swe_agent_config.yaml").read_text(encoding="utf-8"))
        template: str = config["agent"]["system_template"]
        self.instructions = template.replace("{{instructions}}", NumberParser.instructions)

    def parse(self, text: str) -> ParsedAnswer:
        """Return what the only command of ``text`` submits."""
        found = _SUBMITTED.findall(text)
        return ParsedAnswer(tuple(found), valid=True) if len(found) == 1 else ParsedAnswer((), valid=False)

    def format(self, actions: Sequence[str]) -> str:
        """Return the message that submits ``actions``, which is one."""
        (action,) = actions
        return f"```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {action}\n```"
