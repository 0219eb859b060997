"""Values of critics that the dashboard reads from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentkit.config_io import parse_config
from agentkit.dashboard.readings import critic_values
from agentkit.errors import CheckpointError
from agentkit.trainers.batch import flatten
from agentkit.trainers.checkpoint import Checkpoint
from agentkit.trainers.learner.critic import ValueModel
from agentkit.trainers.learner.files import write_tensors
from agentkit.trainers.models.quickstart import critic_config, fresh_model, quickstart_config
from agentkit.types import Group, Trajectory, Turn

CONFIG = parse_config(
    "{env: {id: FrozenLake-v1}, algorithm: {advantage: gae}, critic: {count: 2, layers: 1, hidden_size: 32}}"
)
assert CONFIG.critic is not None
SIZE = CONFIG.critic.fresh


def turn(prompt: list[int], answer: list[int]) -> Turn:
    logprobs = np.zeros(len(answer), np.float32)
    return Turn(np.array(prompt, np.int32), np.array(answer, np.int32), logprobs, ((0, len(answer)),))


@pytest.mark.parametrize("rerendered", [False, True])
def test_each_value_is_that_of_the_tokens_before(tmp_path: Path, rerendered: bool) -> None:
    checkpoint = Checkpoint(tmp_path, 3, {})
    assert SIZE is not None
    models = []
    for index in range(2):
        causal_lm = fresh_model(critic_config(quickstart_config().vocab_size, *SIZE), seed=index)
        model = ValueModel(causal_lm.base_model, 32, torch.float32)
        torch.nn.init.normal_(model.output.weight)
        write_tensors(checkpoint.learner / f"critic-{index}" / "weights", model.named_parameters(), write=True)
        models.append(causal_lm.base_model)
        models[-1].output = model.output
    first, second = turn([5, 6, 7], [8, 9]), turn([10, 11], [12])
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "env", 0, 0, [first, second], rerendered=rerendered)])])
    start = [] if rerendered else [5, 6, 7, 8, 9]
    contexts = [[5, 6, 7], [5, 6, 7, 8], [*start, 10, 11]]
    with torch.no_grad():
        expected = [
            [float(model.output(model(torch.tensor([ids])).last_hidden_state[0, -1:])) for ids in contexts]
            for model in models
        ]
    values = critic_values(CONFIG, checkpoint, batch)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert np.abs(values[0] - values[1]).max() > 1e-3


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "env", 0, 0, [turn([5], [6])])])])
    with pytest.raises(CheckpointError, match="critic-0"):
        critic_values(CONFIG, Checkpoint(tmp_path, 3, {}), batch)
