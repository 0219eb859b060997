"""Roles of a run use the properties that its environment declares."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from requiring import require
from role_batch import batch
from role_envs import Patient

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.errors import EngineUnavailable, LearnerError
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.trainers.learner.training import Training
from agentkit.trainers.roles import start_roles


@pytest.fixture
async def local_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    yield
    await backend.close()


async def gradient(**env: Any) -> float:
    """Return the norm of the first gradient under ``aggregation: constant``."""
    config = RunConfig.model_validate(
        {
            "env": env,
            "rollout": {"groups": 1, "group_size": 2},
            "algorithm": {"advantage": "dr_grpo", "loss": "pg", "aggregation": "constant"},
        }
    )
    async with start_roles(config) as roles:
        return (await roles.learner.train(batch(), 0))["policy/grad_norm"]


@pytest.mark.parametrize(("learner", "engine"), [(3, 2), (2, 3), (3, None), (None, 3)])
async def test_roles_in_one_process_have_their_own_threads(learner: int | None, engine: int | None) -> None:
    default = torch.get_num_threads()
    config = {"env": {"id": "FrozenLake-v1"}, "learner": {"threads": learner}, "engine": {"threads": engine}}
    async with start_roles(RunConfig.model_validate(config)) as roles:
        engines: Any = roles.engine
        for _ in range(2):
            assert await roles.learner._compute(torch.get_num_threads) == (learner or default)
            assert await engines._call("threads", lambda core: torch.get_num_threads()) == (engine or default)
    assert torch.get_num_threads() == default


async def test_the_constant_of_an_aggregation_is_the_length_that_the_environment_declares(tmp_path: Path) -> None:
    registry.register("Patient-v0", Patient)
    once = await gradient(id="Patient-v0")
    assert await gradient(id="Patient-v0", kwargs={"turns": 8}) == pytest.approx(once / 8, rel=1e-4)
    limited = await gradient(id="Patient-v0", kwargs={"turns": 8}, max_turns=2)
    assert limited == pytest.approx(once / 2, rel=1e-4)
    tools = await gradient(id="Math-v0", kwargs={"tools": True})
    assert tools == pytest.approx(once / 8, rel=1e-4)


async def test_the_constant_of_an_environment_in_a_sandbox_is_what_it_declares_there(
    tmp_path: Path, local_sandboxes: None
) -> None:
    registry.register("Patient-v0", Patient)
    there = await gradient(id="Patient-v0", kwargs={"turns": 5}, sandbox="local")
    assert there == pytest.approx(await gradient(id="Patient-v0") / 5, rel=1e-4)


def test_a_learner_without_a_turn_limit_raises_a_clear_error() -> None:
    config = RunConfig.model_validate(
        {
            "env": {"id": "FrozenLake-v1"},
            "rollout": {"groups": 1, "group_size": 2},
            "algorithm": {"aggregation": "constant"},
        }
    )
    with pytest.raises(LearnerError, match=r"set env\.max_turns"):
        Training(config, 0, 1, None).train(batch(), 0)
