"""Checks of recorded token sequences: score them again with the model, play their answers again in the environment."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from agentkit.envs.frozen_lake import FrozenLake
from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer


@functools.cache
def _model() -> Any:
    return quickstart_model(0)


def assert_scores(ids: Sequence[int], mask: Sequence[Any], logprobs: Sequence[float]) -> None:
    """Compare recorded log-probabilities with those of the quickstart model; where ``mask`` is false, they are 0."""
    chosen = np.array(mask, bool)[1:]
    with torch.no_grad():
        logits = _model()(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float()
    again = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    np.testing.assert_allclose(np.array(logprobs)[1:][chosen], again[chosen], atol=2e-4)
    assert not np.array(logprobs)[~np.array(mask, bool)].any()


def played_again(ids: Sequence[int], mask: Sequence[Any], env: FrozenLake, seed: int, turns: int) -> tuple[float, bool]:
    """Give the answers of a sequence to ``env``; return the reward, with -0.1 for an invalid answer, and the success.

    Each observation must follow the answer before it in the sequence.
    """
    tokenizer = quickstart_tokenizer()
    parts = [
        (said, str(tokenizer.decode([token for _, token in part])))
        for said, part in groupby(zip(map(bool, mask), ids, strict=True), key=lambda pair: pair[0])
    ]
    assert [said for said, _ in parts] == [False, True] * (len(parts) // 2)
    observation, _ = env.reset(seed=seed)
    assert env.instructions.strip() in parts[0][1]
    total, success = 0.0, False
    for turn, ((_, shown), (_, answer)) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        assert observation in shown
        if action := re.fullmatch(r"<answer>(\w+)</answer>.*", answer, re.DOTALL):
            observation, reward, terminated, _, info = env.step(action[1])
            total, success = total + reward, info["success"]
            ended = terminated
        else:
            total, ended = total - 0.1, False
        assert (ended or turn + 1 == turns) == (turn + 1 == len(parts) // 2)
    return total, success
