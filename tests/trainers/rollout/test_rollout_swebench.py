"""The rollout loop on a SWE task, with scripted agents: honest, lazy, cheating, and destructive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import docker
import pytest
from rollout_harness import Harness, configure
from swebench_cases import built, gold

from agentkit.envs.swebench.instance import Instance
from agentkit.sandboxes.reaper import labels as label
from agentkit.sandboxes.reaper.owner import Owner

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1200)]

NAME = "wcwidth__wcwidth-0.2.13"
CHEAT = "bash for f in tests/test_*.py; do echo 'def test_all(): pass' >$f; done"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTKIT_DATA", str(tmp_path_factory.mktemp("data")))
        yield built(NAME)[NAME]


async def play(script: Callable[[str, int], str]) -> tuple[Harness, list[float]]:
    """One training step; its rewards."""
    limits = {"parser": "plain", "max_turns": 4, "step_timeout": 600.0, "reset_timeout": 300.0, "format_penalty": 0.0}
    config = configure(
        {"instance_ids": [NAME]},
        settings={"id": "SWEBench-v0", **limits},
        engine={"max_context": 200_000},
        rollout={"groups": 1, "group_size": 2, "max_tokens": 100_000, "retries": 3},
    )
    harness = Harness(config, script)
    ((group,),) = await harness.run(1)
    harness.check_book()
    return harness, [member.reward for member in group.members]


async def test_the_solution_earns_one(task: Instance) -> None:
    _, rewards = await play(lambda text, seed: "submit" if "END_OF_GOLD" in text else gold(task))
    assert rewards == [1.0, 1.0]


@pytest.mark.usefixtures("task")
async def test_an_empty_submission_earns_nothing() -> None:
    _, rewards = await play(lambda text, seed: "submit")
    assert rewards == [0.0, 0.0]


@pytest.mark.usefixtures("task")
async def test_changed_tests_earn_nothing() -> None:
    _, rewards = await play(lambda text, seed: "submit" if "test_all" in text else CHEAT)
    assert rewards == [0.0, 0.0]


async def test_a_kill_of_every_process_ends_commands_and_not_the_episode(task: Instance) -> None:
    crashes = iter(["bash kill -9 -1; sleep 10"])

    def script(text: str, seed: int) -> str:
        return next(crashes, None) or ("submit" if "END_OF_GOLD" in text else gold(task))

    harness, rewards = await play(script)
    assert rewards == [1.0, 1.0]
    assert [ending for _, ending, _ in harness.ends] == ["trained", "trained"]


async def test_an_episode_whose_sandbox_is_removed_is_voided_and_played_again(task: Instance) -> None:
    client = docker.from_env()
    kills = iter([True])

    def script(text: str, seed: int) -> str:
        if next(kills, False):
            mine = f"{label.OWNER}={Owner.of(os.getpid())}"
            for container in client.containers.list(filters={"label": mine}):
                container.remove(force=True)
        return "submit" if "END_OF_GOLD" in text else gold(task)

    harness, rewards = await play(script)
    client.close()
    assert rewards == [1.0, 1.0]
    voided = [trajectory for trajectory, ending, _ in harness.ends if ending == "voided"]
    assert voided
    assert all((trajectory.reason or "").startswith("EnvCrashed: the sandbox") for trajectory in voided)
