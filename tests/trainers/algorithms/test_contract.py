"""`agentkit algorithm check`: built-in parts keep every rule, and a plug-in that breaks one is caught by that rule."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from plugin_packages import Install
from typer.testing import CliRunner

from agentkit.cli import algorithm
from agentkit.config import AlgorithmConfig
from agentkit.errors import PluginError
from agentkit.trainers.algorithms import contract
from agentkit.trainers.algorithms.advantages import ESTIMATORS, estimate
from agentkit.trainers.algorithms.contract import Result, check_advantage, sample
from agentkit.trainers.algorithms.loss_contract import check_loss
from agentkit.trainers.algorithms.losses import POLICY_LOSSES

HEADER = """
    import os
    import numpy as np
    import torch
    from agentkit.plugins import advantage, loss
    from agentkit.trainers.algorithms.advantages import Estimate, episode_returns
    from agentkit.trainers.algorithms.interface import TokenLoss

    def spread(batch, per_episode):
        return per_episode[batch.sequence_ids].astype(np.float32)

    def ratio(inputs):
        return (inputs.logprobs["policy"] - inputs.logprobs["behaviour"]).clamp(-20, 20).exp()
"""
SHAPE = "shapes, types and finite numbers"
MASKED = "masked positions have no effect"

ADVANTAGES = {
    "keeps": ("return spread(batch, episode_returns(batch))", set()),
    "shapeless": ("return np.zeros(3)", {SHAPE}),
    "listed": ("return [0.0] * batch.num_tokens", {SHAPE}),
    "nan": ("return spread(batch, episode_returns(batch) * float('nan'))", {SHAPE}),
    "unmasked": ("return spread(batch, np.bincount(batch.sequence_ids, weights=batch.rewards))", {MASKED}),
    "random": ("return np.random.random(batch.num_tokens)", {"the same input gives the same result"}),
    "mutating": ("batch.rewards[batch.mask] = 1; return spread(batch, episode_returns(batch))",
                 {"inputs are not changed"}),
    "hashing": ("return spread(batch, episode_returns(batch) * (hash('salt') % 97))", {"all ranks compute the same"}),
    "ordered": ("return np.cumsum(batch.mask).astype(float)", {"the order of groups has no effect"}),
    "overflowing": ("return spread(batch, np.exp(np.minimum(np.abs(episode_returns(batch)), 500.0)))",
                    {"rewards of any scale give finite numbers"}),
    "valued": ("return values[0]", {SHAPE}),
}  # fmt: skip
LOSSES = {
    "keeps": ("return -ratio(inputs) * inputs.advantages", set()),
    "scalar": ("return (-ratio(inputs) * inputs.advantages).mean()", {SHAPE}),
    "integer": ("return TokenLoss(-ratio(inputs) * inputs.advantages, inputs.turn_ids, inputs.mask)", {SHAPE}),
    "nan": ("return -ratio(inputs) * inputs.advantages / 0", {SHAPE}),
    "detached": ("return -inputs.logprobs['behaviour'] * inputs.advantages", {"it has a gradient"}),
    "averaging": ("return -ratio(inputs) * (inputs.advantages - inputs.advantages.mean())",
                  {MASKED, "micro-batches add up to the batch"}),
    "own_mean": ("return -ratio(inputs) * inputs.advantages / inputs.mask.sum().clamp(min=1)",
                 {"micro-batches add up to the batch", "ranks add up to the batch"}),
    "empty_max": ("return -ratio(inputs) * inputs.advantages / inputs.advantages[inputs.mask].max()",
                  {"a micro-batch without action tokens gives 0"}),
    "random": ("return -ratio(inputs) * inputs.advantages * torch.rand(())", {"the same input gives the same result"}),
    "mutating": ("inputs.entropy_weight.zero_(); return -ratio(inputs) * inputs.advantages",
                 {"inputs are not changed"}),
    "secret": ("return -ratio(inputs) * inputs.advantages + inputs.logprobs['reference']",
               {"it reads only the log-probabilities that it declares"}),
    "unbounded": ("return -(inputs.logprobs['policy'] - inputs.logprobs['behaviour']).exp() * inputs.advantages",
                  {"any ratio and advantage gives finite numbers"}),
}  # fmt: skip


def write(install: Install, arguments: str, body: str, decorator: str = "") -> None:
    code = f"{decorator}\ndef part({arguments}):\n    {body}\n"
    install("parts", {}, {"broken_part": textwrap.dedent(HEADER) + code})


def broken(results: object) -> set[str]:
    return {result.rule for result in results if result.problem}  # pyright: ignore[reportGeneralTypeIssues]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with no other process, which takes seconds."""
    monkeypatch.setattr(contract, "_same_elsewhere", lambda config, critics: None)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_built_in_advantages_keep_the_rules(here: None, name: str) -> None:
    results = list(check_advantage(AlgorithmConfig(advantage=name, gamma=0.9, lam=0.9)))
    assert results == [Result(result.rule, "") for result in results]
    assert len(results) >= 8


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_built_in_losses_keep_the_rules(name: str, aggregation: str) -> None:
    results = list(check_loss(AlgorithmConfig.model_validate({"loss": name, "aggregation": aggregation})))
    assert results == [Result(result.rule, "") for result in results]
    assert len(results) >= 10


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "hashing"])
def test_an_advantage_that_breaks_a_rule_is_caught(install: Install, here: None, name: str) -> None:
    body, rules = ADVANTAGES[name]
    write(install, "batch, values, config", body)
    found = broken(check_advantage(AlgorithmConfig(advantage="broken_part:part")))
    assert found >= rules if rules else not found


@pytest.mark.slow
def test_an_advantage_that_differs_between_processes_is_caught(install: Install) -> None:
    write(install, "batch, values, config", ADVANTAGES["hashing"][0])
    assert broken(check_advantage(AlgorithmConfig(advantage="broken_part:part"))) == ADVANTAGES["hashing"][1]


def test_a_group_baseline_that_is_none_is_caught(install: Install, here: None) -> None:
    write(install, "batch, values, config", ADVANTAGES["keeps"][0], "@advantage(group_baseline=True)")
    found = broken(check_advantage(AlgorithmConfig(advantage="broken_part:part")))
    assert found == {"a group without signal has advantages of 0"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_breaks_a_rule_is_caught(install: Install, name: str) -> None:
    body, rules = LOSSES[name]
    write(install, "inputs, config", body)
    found = broken(check_loss(AlgorithmConfig(loss="broken_part:part")))
    assert found >= rules if rules else not found


def test_the_command_prints_what_breaks_and_fails(install: Install, here: None) -> None:
    write(install, "inputs, config", LOSSES["own_mean"][0])
    result = CliRunner().invoke(algorithm.app, ["check", "broken_part:part"], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "8 of 10 rules are kept" in result.output
    (line,) = [line for line in result.output.splitlines() if "ranks add up" in line]
    assert "BROKEN" in line
    assert "the sum of the losses differs by up to" in line
    assert CliRunner().invoke(algorithm.app, ["check", "rloo", "gamma=0.5"]).exit_code == 0


def test_a_plugin_that_computes_the_same_gives_the_same_estimate(install: Install) -> None:
    write(install, "batch, values, config", "return spread(batch, episode_returns(batch))")
    one = sample(3, critics=0)
    mine = estimate(one.batch, one.values, AlgorithmConfig(advantage="broken_part:part", advantage_clip=0.75))
    reference = estimate(one.batch, one.values, AlgorithmConfig(advantage="reinforce", gamma=1.0))
    last = np.flatnonzero(np.diff(one.batch.turn_ids, append=99) != 0)
    assert mine.advantages.dtype == np.float32
    assert np.abs(mine.advantages).max() <= 0.75
    np.testing.assert_array_equal(mine.policy_weight, reference.policy_weight)
    assert not mine.returns.any()
    assert len(last)


@pytest.mark.parametrize("name", ["shapeless", "listed", "nan"])
def test_a_run_names_the_plugin_and_what_it_returned(install: Install, name: str) -> None:
    write(install, "batch, values, config", ADVANTAGES[name][0])
    one = sample(3, critics=0)
    with pytest.raises(PluginError, match=r"^advantage 'broken_part:part' returned "):
        estimate(one.batch, one.values, AlgorithmConfig(advantage="broken_part:part"))
