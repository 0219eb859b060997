"""Agents from the package index, unchanged, play recorded episodes as commands. A script is the policy."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from requiring import require
from rollout_harness import Harness, configure

from agentkit.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.published, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
QUESTION = re.compile(r"What is (\d+) \+ (\d+)\?")


def packages_of(name: str) -> Path:
    """The environment with the package ``name``."""
    home = ROOT / f".venv-{name}"
    require((home / "bin" / "python").exists(), f"run .ci/agents --install-only, which makes {home.name}")
    return home


async def play(script: Any, agent: dict[str, Any]) -> list[Trajectory]:
    """One group of two episodes."""
    config = configure(
        {"operations": "+"},
        settings={"id": "Arithmetic-v0", "parser": "number"},
        agent={"timeout": 300.0, **agent},
        rollout={"groups": 1, "group_size": 2, "max_tokens": 200},
        engine={"max_context": 4096},
    )
    harness = Harness(config, script)
    ((group,),) = await harness.run(1)
    harness.check_book()
    assert harness.endings == {("trained", ""): 2}
    return group.members


def check(member: Trajectory, observation: str) -> None:
    """Two requests became one sequence, and what the agent submitted was scored."""
    assert (member.outcome, len(member.turns), member.rerendered) == ("terminated", 2, False), member.reason
    first, second = member.turns
    asked = QUESTION.findall(first.observation)[-1]
    total = str(sum(map(int, asked)))
    assert second.observation == observation.format(total)
    (answer,) = second.actions
    assert answer in second.response
    assert member.reward == float(answer == total)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_openai_agents_plays_with_its_own_tools() -> None:
    python = packages_of("openai-agents") / "bin" / "python"

    def script(text: str, seed: int) -> str:
        """Calculate first, then submit the right or a wrong answer."""
        *_, question = QUESTION.finditer(text)
        first, second = map(int, question.groups())
        if "calculate" not in text[question.end() :]:
            return call("calculate", expression=f"{first} + {second}")
        return call("submit", answer=str(first + second + seed % 2))

    agent = {"command": (str(python), str(ROOT / "examples/agents/openai_agents.py"))}
    for member in await play(script, agent):
        check(member, "{}")
        assert "calculate" in member.turns[0].response


async def test_mini_swe_agent_plays_with_a_shell_in_a_sandbox() -> None:
    home = packages_of("mini-swe-agent")

    def script(text: str, seed: int) -> str:
        """Look at the result first, then submit the right or a wrong answer."""
        *_, question = QUESTION.finditer(text)
        first, second = map(int, question.groups())
        looked = "mswea_bash_command" in text[question.end() :]
        done = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {first + second + seed % 2}"
        return f"```mswea_bash_command\n{done if looked else f'echo $(({first} + {second}))'}\n```"

    shown = [str(home), sys.base_prefix, str(ROOT / "examples" / "agents")]
    agent = {
        "command": (str(home / "bin" / "python"), str(ROOT / "examples/agents/mini_swe_agent.py")),
        "sandbox": "local",
        "sandbox_spec": {
            "mounts": [{"source": path, "target": path} for path in shown],
            "env": {"HOME": "/tmp"},
            "resources": {"memory": "2g"},
        },
    }
    for member in await play(script, agent):
        check(member, "<returncode>0</returncode>\n<output>\n{}\n</output>")
