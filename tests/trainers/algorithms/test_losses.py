"""Losses equal per-token implementations of their formulas: values, gradients, masks, denominators."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.losses import (
    POLICY_LOSSES,
    TokenInputs,
    kl_estimate,
    kl_loss,
    needed_logprobs,
    policy_objective,
    value_loss,
)

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25, deadline=None)
LOSSES = sorted(POLICY_LOSSES)
AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]
CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "is_cap": 1.5}


def configured(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def random_inputs(seed: int, tokens: int = 12) -> TokenInputs:
    """Ratios on both sides of every clip, advantages of both signs, a few masked tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    behaviour = -normal(1.0).abs()
    sequence_ids = torch.randint(0, 3, (tokens,), generator=generator).sort().values
    return TokenInputs(
        logprobs={
            "policy": (behaviour + normal(0.5)).requires_grad_(),
            "behaviour": behaviour,
            "proximal": behaviour + normal(0.5),
            "reference": behaviour + normal(0.5),
        },
        advantages=normal(1.0),
        policy_weight=(torch.rand(tokens, generator=generator) < 0.8).double(),
        entropy=normal(1.0).abs().requires_grad_(),
        entropy_weight=torch.rand(tokens, generator=generator, dtype=torch.float64),
        mask=torch.rand(tokens, generator=generator) < 0.8,
        turn_ids=torch.arange(tokens),
        sequence_ids=sequence_ids,
    )


def slow_clip(ratio, advantage, config):
    """Clipped surrogate and its derivative with respect to log policy (d ratio / d log policy = ratio)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    through = ratio * advantage if objective == ratio * advantage else 0.0
    if config.dual_clip is not None and advantage < 0 and objective < config.dual_clip * advantage:
        return -config.dual_clip * advantage, 0.0
    return -objective, -through


def slow_token(name, policy, behaviour, proximal, advantage, config):
    """Loss of one token and its derivative with respect to log policy."""
    if name == "pg":
        return -advantage * policy, -advantage
    if name == "ppo":
        return slow_clip(math.exp(policy - behaviour), advantage, config)
    if name == "cispo":
        weight = min(max(math.exp(policy - behaviour), 1 - config.clip_low), 1 + config.clip_high)
        return -weight * advantage * policy, -weight * advantage
    weight = math.exp(proximal - behaviour)
    beyond = 0.0 if name == "decoupled_ppo" else config.is_cap
    weight = beyond if weight > config.is_cap else weight
    loss, slope = slow_clip(math.exp(policy - proximal), advantage, config)
    return weight * loss, weight * slope


def share(config, inputs, index, divisor):
    """Weight of one token in the aggregated loss."""
    if config.aggregation == "sequence_mean":
        same = inputs.sequence_ids == inputs.sequence_ids[index]
        return 1 / int((same & inputs.mask).sum()) / divisor
    return 1 / divisor


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, dual_clip=st.sampled_from([None, 1.4]), aggregation=st.sampled_from(AGGREGATIONS))
def test_policy_losses(name, dual_clip, aggregation, seed):
    config = configured(loss=name, dual_clip=dual_clip, aggregation=aggregation, **CLIPS)
    inputs, divisor = random_inputs(seed), 7.0
    loss, _ = policy_objective(inputs, config, divisor)
    loss.backward()
    expected, slopes = 0.0, []
    columns = [inputs.logprobs[key].tolist() for key in ("policy", "behaviour", "proximal")]
    for index, (policy, behaviour, proximal) in enumerate(zip(*columns, strict=True)):
        value, slope = slow_token(name, policy, behaviour, proximal, float(inputs.advantages[index]), config)
        weight = float(inputs.policy_weight[index]) if inputs.mask[index] else 0.0
        weight *= share(config, inputs, index, divisor) if weight else 0.0
        expected += weight * value
        slopes.append(weight * slope)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient(inputs.logprobs["policy"]), slopes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(
    seed=SEEDS, kl=st.sampled_from(["k1", "k2", "k3"]), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_garbage_where_masked_changes_nothing(name, kl, seed, garbage):
    config = configured(loss=name, kl=kl, kl_coef=0.1, entropy_coef=0.2, aggregation="sequence_mean", **CLIPS)
    inputs = random_inputs(seed)

    def dirty(tensor):
        return torch.where(inputs.mask, tensor.detach(), torch.full_like(tensor, garbage))

    soiled = replace(
        inputs,
        logprobs={key: dirty(value) for key, value in inputs.logprobs.items()},
        **{key: dirty(getattr(inputs, key)) for key in ("advantages", "policy_weight", "entropy", "entropy_weight")},
    )
    soiled.logprobs["policy"].requires_grad_()
    soiled.entropy.requires_grad_()
    results = []
    for each in (inputs, soiled):
        loss, sums = policy_objective(each, config, 5.0)
        loss.backward()
        results.append((loss, sums, gradient(each.logprobs["policy"]), gradient(each.entropy)))
    (loss, sums, slope, entropy_slope), (loss2, sums2, slope2, entropy_slope2) = results
    assert torch.equal(loss, loss2)
    assert all(torch.equal(sums[key], sums2[key]) for key in sums)
    assert torch.equal(slope, slope2)
    assert torch.equal(entropy_slope, entropy_slope2)
    assert not slope2[~inputs.mask].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@FEW
@given(seed=SEEDS)
def test_entropy_bonus_and_kl_are_aggregated_like_the_loss(aggregation, seed):
    inputs = random_inputs(seed)
    base = configured(loss="ppo", aggregation=aggregation)
    config = base.model_copy(update={"kl": "k2", "kl_coef": 0.3, "entropy_coef": 0.2})
    plain, _ = policy_objective(inputs, base, 5.0)
    full, _ = policy_objective(inputs, config, 5.0)
    expected = 0.0
    for index in torch.nonzero(inputs.mask)[:, 0].tolist():
        policy, behaviour, reference = (inputs.logprobs[k][index].item() for k in ("policy", "behaviour", "reference"))
        kl = min(math.exp(policy - behaviour), config.is_cap) * (policy - reference) ** 2 / 2
        bonus = (inputs.entropy_weight[index] * inputs.entropy[index]).item()
        expected += share(config, inputs, index, 5.0) * (0.3 * kl - 0.2 * bonus)
    assert (full - plain).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@FEW
@given(seed=SEEDS)
def test_metric_sums(seed):
    inputs = random_inputs(seed)
    config = configured(loss="decoupled_ppo", kl="k3", **CLIPS)
    _, sums = policy_objective(inputs, config, 1.0)
    expected = dict.fromkeys(sums, 0.0)
    for index in torch.nonzero(inputs.mask)[:, 0].tolist():
        policy, behaviour, proximal, reference = (
            inputs.logprobs[key][index].item() for key in ("policy", "behaviour", "proximal", "reference")
        )
        advantage = float(inputs.advantages[index])
        ratio, x = math.exp(policy - behaviour), policy - reference
        _, slope = slow_clip(math.exp(policy - proximal), advantage, config)
        expected["clip_fraction"] += slope == 0
        expected["mask_fraction"] += (
            math.exp(proximal - behaviour) > config.is_cap or float(inputs.policy_weight[index]) == 0
        )
        expected["kl_reference"] += math.exp(-x) - 1 + x
        expected["kl_behaviour"] += ratio - 1 - math.log(ratio)
        expected["entropy"] += inputs.entropy[index].item()
        expected["weight"] += ratio
        expected["weight_squared"] += ratio**2
    for key, value in expected.items():
        assert float(sums[key]) == pytest.approx(value, rel=1e-6, abs=1e-9), key


def categorical(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, and log-probabilities of a behaviour and a reference near it, over 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    policy, behaviour, reference = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), torch.log_softmax(behaviour, 0), torch.log_softmax(reference, 0)


def every_token(logprobs: dict[str, torch.Tensor]) -> TokenInputs:
    some = logprobs["policy"].detach()
    ones = torch.ones_like(some)
    index = torch.zeros(len(some), dtype=torch.int64)
    return TokenInputs(logprobs, ones, ones, ones, ones, ones > 0, index, index)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@FEW
@given(seed=SEEDS)
def test_expected_gradient_of_the_kl_loss_is_that_of_the_kl_divergence(kl, seed):
    """Even from samples of another policy: the sum over all tokens, weighted by their behaviour probability."""
    logits, behaviour, reference = categorical(seed)
    policy = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    inputs = every_token({"policy": policy, "behaviour": behaviour, "reference": reference})
    (actual,) = torch.autograd.grad((behaviour.exp() * kl_loss(kl, inputs, 1e9)).sum(), logits)
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)


@FEW
@given(seed=SEEDS)
def test_k1_and_k3_are_unbiased_estimates(seed):
    logits, _, reference = categorical(seed)
    policy = torch.log_softmax(logits.detach(), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        estimate = (policy.exp() * kl_estimate(kind, policy - reference)).sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=1e-9)
    assert (kl_estimate("k3", policy - reference) >= 0).all()
    assert torch.equal(kl_estimate("k2", policy - reference), (policy - reference) ** 2 / 2)


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(seed=SEEDS)
def test_on_policy_every_loss_is_the_policy_gradient(name, seed):
    inputs = random_inputs(seed)
    policy = inputs.logprobs["policy"]
    same = policy.detach()
    inputs = replace(inputs, logprobs={"policy": policy, "behaviour": same, "proximal": same})
    loss, _ = policy_objective(inputs, configured(loss=name), 1.0)
    loss.backward()
    expected = torch.where(inputs.mask, -inputs.policy_weight * inputs.advantages, 0.0)
    np.testing.assert_allclose(gradient(policy), expected, rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    inputs = random_inputs(1)
    inputs = replace(inputs, logprobs={**inputs.logprobs, "behaviour": inputs.logprobs["behaviour"] - 500})
    loss, sums = policy_objective(inputs, configured(loss=name, kl="k3", kl_coef=0.1), 1.0)
    loss.backward()
    assert torch.isfinite(gradient(inputs.logprobs["policy"])).all()
    assert all(torch.isfinite(value) for value in sums.values())


def test_logprobs_needed_by_each_loss():
    assert needed_logprobs(configured(loss="pg")) == {"policy", "behaviour"}  # behaviour: for the metrics
    assert needed_logprobs(configured(loss="tis")) == {"policy", "behaviour", "proximal"}
    assert needed_logprobs(configured(loss="ppo", kl="k3")) == {"policy", "behaviour", "reference"}


@pytest.mark.parametrize("clip", [None, 0.3])
@FEW
@given(seed=SEEDS, garbage=st.sampled_from([math.nan, math.inf, 3.0]))
def test_value_loss(clip, seed, garbage):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(8, generator=generator) < 0.7
    expected = []
    for v, o, r, kept in zip(values.tolist(), old.tolist(), returns.tolist(), mask.tolist(), strict=True):
        error = (v - r) ** 2
        if clip is not None:
            error = max(error, (min(max(v, o - clip), o + clip) - r) ** 2)
        expected.append(0.5 * error if kept else 0.0)
    values, old, returns = (torch.where(mask, x, torch.full_like(x, garbage)) for x in (values, old, returns))
    values.requires_grad_()
    loss = value_loss(values, old, returns, mask, clip)
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-12)
    loss.sum().backward()
    assert torch.isfinite(gradient(values)).all()
    assert not gradient(values)[~mask].any()


@pytest.mark.parametrize("kind", AGGREGATIONS)
@FEW
@given(seed=SEEDS)
def test_aggregation_does_not_depend_on_the_split(kind, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 6)
    ids = torch.from_numpy(np.repeat(np.arange(6), counts + 1))  # each sequence also has one masked token
    mask = torch.from_numpy(np.concatenate([[False] + [True] * count for count in counts]).astype(bool))
    losses = torch.from_numpy(rng.normal(size=len(ids)))
    divisor = denominator(kind, counts, constant_length=11)
    whole = aggregate(kind, losses, mask, ids, divisor)

    sums = [losses[(ids == i) & mask].sum().item() for i in range(6)]
    sequences = max(int((counts > 0).sum()), 1)
    expected = {
        "token_mean": sum(sums) / max(counts.sum(), 1),
        "sequence_mean": sum(s / c for s, c in zip(sums, counts, strict=True) if c) / sequences,
        "constant": sum(sums) / (11 * sequences),
    }[kind]
    assert whole.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)

    half = ids < 3
    parts = [aggregate(kind, losses[part], mask[part], ids[part], divisor) for part in (half, ~half)]
    assert sum(part.item() for part in parts) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_part_without_action_tokens_adds_nothing(kind):
    none = torch.zeros(3, dtype=torch.bool)
    assert aggregate(kind, torch.full((3,), math.nan), none, torch.zeros(3, dtype=torch.int64), 4.0).item() == 0
    assert denominator(kind, np.zeros(3, np.int64), 5) > 0
