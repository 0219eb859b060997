"""Agents from the package index, unchanged, play recorded episodes as commands, and runs train on such episodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from requiring import require
from rollout_harness import Harness, configure
from transformers import AutoModelForCausalLM

from agentkit.jsonl import read_jsonl
from agentkit.records import EVALUATION, TRAINED, iterate_trajectories
from agentkit.rollout import sequences
from agentkit.trainers.models.smollm2 import smollm2_directory
from agentkit.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.published, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "agents.md"
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


# -- a script is the policy --------------------------------------------------------------------------------------------


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


# -- the policy is trained ---------------------------------------------------------------------------------------------


def carry_out(name: str, directory: Path, *overrides: str) -> Path:
    """Run the commands of the page that train ``examples/agents/NAME.yaml``, and return the run's directory.

    ``overrides`` make that run shorter.
    """
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if f"agentkit run examples/agents/{name}.yaml" in block)
    for part in ("examples", f".venv-{name.replace('_', '-')}"):
        (directory / part).symlink_to(ROOT / part)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", " ".join([block.rstrip("\n"), *overrides])]
    result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return directory / "runs" / name


def weights(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def check_training(run: Path, start: Path) -> list[dict[str, Any]]:
    """Groups differ in their rewards, the weights changed, and transformers gives what was recorded at first the
    recorded log-probabilities. Returns the metrics of the steps."""
    steps = [line for line in read_jsonl(run / "metrics.jsonl") if "policy/kl_behaviour" in line]
    assert len(steps) >= 5
    assert abs(steps[0]["policy/kl_behaviour"]) < 1e-5
    rewards: dict[int, list[float]] = {}
    first, compared = weights(start), 0
    for row, episode in iterate_trajectories(run / "episodes.sqlite", ending=TRAINED):
        rewards.setdefault(row.group_id, []).append(episode.reward)
        if any(version for turn in episode.turns for version, _ in turn.versions):
            continue
        for ids, mask, logprobs, _ in sequences(episode):
            with torch.no_grad():
                scores = first(torch.tensor(ids[None]).long()).logits[0].log_softmax(-1)
            again = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:]).long()].numpy()
            assert abs(again - logprobs[1:])[mask[1:]].max() < 1e-3
            compared += 1
    assert compared >= 8
    assert {len(group) for group in rewards.values()} == {4}
    assert any(max(group) == 1 > min(group) for group in rewards.values()), rewards
    pairs = zip(first.parameters(), weights(run / "model").parameters(), strict=True)
    assert sum(not torch.equal(old, new) for old, new in pairs) > 20
    return steps


def first_prompts(run: Path, ending: str) -> set[tuple[int, ...]]:
    """The ids that the model was shown at the start of each episode."""
    episodes = iterate_trajectories(run / "episodes.sqlite", ending=ending)
    return {tuple(episode.turns[0].prompt_ids.tolist()) for _, episode in episodes}


@pytest.mark.timeout(1800)
def test_a_pretrained_model_is_trained_with_openai_agents(tmp_path: Path) -> None:
    packages_of("openai-agents")
    run = carry_out("openai_agents", tmp_path, "steps=5", "rollout.groups=2", "evaluation.episodes=1")
    steps = check_training(run, smollm2_directory())
    assert all(abs(line["policy/kl_behaviour"]) < 1e-5 for line in steps)  # synchronous


@pytest.mark.timeout(1800)
def test_a_small_model_is_trained_with_mini_swe_agent(tmp_path: Path) -> None:
    """With an async ratio of 1 and redundant members."""
    packages_of("mini-swe-agent")
    run = carry_out("mini_swe_agent", tmp_path, "evaluation.episodes=1")
    steps = check_training(run, tmp_path / "runs" / "imitate_shell" / "model")
    assert max(line["staleness/max"] for line in steps) == 1
    assert any(row.ending == "cancelled" for row, _ in iterate_trajectories(run / "episodes.sqlite"))
    assert first_prompts(run, TRAINED) <= first_prompts(tmp_path / "runs" / "imitate_shell", EVALUATION)
