"""Losses equal per-token implementations of their formulas: values, gradients, masks, denominators."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_formulas import FORMULAS, Token

from agentkit.config import AlgorithmConfig
from agentkit.plugins import LOSS
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.importance import binary_kl
from agentkit.trainers.algorithms.interface import TokenInputs
from agentkit.trainers.algorithms.losses import (
    POLICY_LOSSES,
    aggregation,
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
OPTIONS = {
    "clip_low": 0.1,
    "clip_high": 0.15,
    "dual_clip": 1.1,
    "is_cap": 1.3,
    "is_floor": 0.8,
    "kl_gate": 0.05,
    "topr_ratio": "token",
}
"""Settings of losses, all different from their defaults."""


def configured(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def options(name: str) -> dict[str, object]:
    """The settings that this loss uses, different from its defaults."""
    return {key: value for key, value in OPTIONS.items() if key in LOSS.built_in[name].options}


def random_inputs(seed: int, tokens: int = 16, distance: float = 1.0) -> TokenInputs:
    """Ratios on both sides of every clip (if ``distance`` is 1), advantages of both signs, a few masked tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    logits = normal(1.0)
    sequence_ids = torch.randint(0, 4, (tokens,), generator=generator).sort().values
    return TokenInputs(
        logprobs={
            "policy": torch.nn.functional.logsigmoid(logits + normal(distance)).requires_grad_(),
            "behaviour": torch.nn.functional.logsigmoid(logits),
            "proximal": torch.nn.functional.logsigmoid(logits + normal(distance)),
            "reference": torch.nn.functional.logsigmoid(logits + normal(distance)),
        },
        advantages=normal(1.0),
        policy_weight=(torch.rand(tokens, generator=generator) < 0.8).double(),
        entropy=normal(1.0).abs().requires_grad_(),
        entropy_weight=torch.rand(tokens, generator=generator, dtype=torch.float64),
        mask=torch.rand(tokens, generator=generator) < 0.8,
        turn_ids=torch.randint(0, 3, (tokens,), generator=generator, dtype=torch.int32),
        sequence_ids=sequence_ids,
    )


def terms_by_formula(inputs: TokenInputs, config: AlgorithmConfig) -> dict:
    """The formula's term of every action token, by its index."""
    columns = [inputs.logprobs[key].tolist() for key in ("policy", "behaviour", "proximal")]
    rows = list(zip(*columns, inputs.advantages.tolist(), inputs.turn_ids.tolist(), strict=True))
    terms = {}
    for sequence in range(4):
        mine = torch.nonzero(inputs.mask & (inputs.sequence_ids == sequence))[:, 0].tolist()
        if mine:
            terms |= zip(mine, FORMULAS[config.loss]([Token(*rows[i]) for i in mine], config), strict=True)
    return terms


def share(config, inputs, index, divisor):
    """Weight of one token in the aggregated loss."""
    if aggregation(config) == "sequence_mean":
        same = inputs.sequence_ids == inputs.sequence_ids[index]
        return 1 / int((same & inputs.mask).sum()) / divisor
    return 1 / divisor


def test_every_loss_is_listed():
    assert list(POLICY_LOSSES) == list(LOSS.built_in)
    assert set(POLICY_LOSSES) == set(FORMULAS)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    distance=st.sampled_from([2e-4, 0.05, 1.0]),
    own=st.booleans(),
    level=st.sampled_from(["product", "geometric", "token"]),
    kind=st.sampled_from([None, *AGGREGATIONS]),
)
def test_policy_losses(name, seed, distance, own, level, kind):
    """Values, gradients and metrics equal the formulas, with the loss's own settings and with others."""
    settings = {} if own else options(name) | ({"topr_ratio": level} if name == "topr" else {})
    config = configured(loss=name, aggregation=kind, **settings)
    inputs, divisor = random_inputs(seed, distance=distance), 7.0
    loss, sums = policy_objective(inputs, config, divisor)
    loss.backward()
    expected, slopes, clipped, masked = 0.0, np.zeros(len(inputs.mask)), 0, 0
    for index, term in terms_by_formula(inputs, config).items():
        kept = float(inputs.policy_weight[index])
        weight = kept * share(config, inputs, index, divisor)
        expected += weight * term.loss
        slopes[index] = weight * term.slope
        clipped += term.clipped
        masked += term.masked or kept == 0
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient(inputs.logprobs["policy"]), slopes, rtol=1e-9, atol=1e-12)
    assert (float(sums["clip_fraction"]), float(sums["mask_fraction"])) == (clipped, masked)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_uses_exactly_the_options_that_it_declares(name):
    """Others are refused in a configuration, so they must not matter."""
    used = set()
    for seed in range(8):
        inputs = random_inputs(seed, distance=0.5)
        if name == "raft_pp":  # whose advantages are never negative
            inputs = replace(inputs, advantages=inputs.advantages.abs())
        plain, _ = policy_objective(inputs, configured(loss=name), 1.0)
        for option, value in OPTIONS.items():
            other, _ = policy_objective(inputs, configured(loss=name, **{option: value}), 1.0)
            used |= set() if torch.equal(plain, other) else {option}
    assert used == LOSS.built_in[name].options


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(seed=SEEDS, kind=st.sampled_from([None, "constant"]))
def test_losses_do_not_depend_on_micro_batches(name, kind, seed):
    """Neither values nor gradients nor metrics, if sequences stay whole."""
    config = configured(loss=name, aggregation=kind, entropy_coef=0.1, kl="k3", kl_coef=0.1, **options(name))
    inputs = random_inputs(seed)
    policy = inputs.logprobs["policy"]
    whole, sums = policy_objective(inputs, config, 5.0)
    (expected,) = torch.autograd.grad(whole, policy, retain_graph=True)
    losses, parts = [], []
    for half in (inputs.sequence_ids < 2, inputs.sequence_ids >= 2):
        part = TokenInputs(
            logprobs={key: value[half] for key, value in inputs.logprobs.items()},
            sequence_ids=inputs.sequence_ids[half] % 2,
            **{
                key: getattr(inputs, key)[half]
                for key in ("advantages", "policy_weight", "entropy", "entropy_weight", "mask", "turn_ids")
            },
        )
        loss, of_part = policy_objective(part, config, 5.0)
        losses.append(loss)
        parts.append(of_part)
    total = losses[0] + losses[1]
    assert total.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(torch.autograd.grad(total, policy)[0], expected, rtol=1e-12, atol=1e-14)
    for key, value in sums.items():
        assert float(parts[0][key] + parts[1][key]) == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(
    seed=SEEDS, kl=st.sampled_from(["k1", "k2", "k3"]), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_garbage_where_masked_changes_nothing(name, kl, seed, garbage):
    config = configured(loss=name, kl=kl, kl_coef=0.1, entropy_coef=0.2, aggregation="sequence_mean", **options(name))
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
    base, cap = configured(loss="ppo", aggregation=aggregation), 1.5
    config = base.model_copy(update={"kl": "k2", "kl_coef": 0.3, "entropy_coef": 0.2, "is_cap": cap})
    plain, _ = policy_objective(inputs, base, 5.0)
    full, _ = policy_objective(inputs, config, 5.0)
    expected = 0.0
    for index in torch.nonzero(inputs.mask)[:, 0].tolist():
        policy, behaviour, reference = (inputs.logprobs[k][index].item() for k in ("policy", "behaviour", "reference"))
        kl = min(math.exp(policy - behaviour), cap) * (policy - reference) ** 2 / 2
        bonus = (inputs.entropy_weight[index] * inputs.entropy[index]).item()
        expected += share(config, inputs, index, 5.0) * (0.3 * kl - 0.2 * bonus)
    assert (full - plain).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@FEW
@given(seed=SEEDS)
def test_metric_sums(seed):
    inputs = random_inputs(seed)
    _, sums = policy_objective(inputs, configured(loss="decoupled_ppo", kl="k3"), 1.0)
    expected = dict.fromkeys(sums.keys() - {"clip_fraction", "mask_fraction"}, 0.0)
    for index in torch.nonzero(inputs.mask)[:, 0].tolist():
        policy, behaviour, reference = (inputs.logprobs[k][index].item() for k in ("policy", "behaviour", "reference"))
        ratio, x = math.exp(policy - behaviour), policy - reference
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
    loss, _ = policy_objective(inputs, configured(loss=name, aggregation="token_mean"), 1.0)
    loss.backward()
    expected = torch.where(inputs.mask, -inputs.policy_weight * inputs.advantages, 0.0)
    np.testing.assert_allclose(gradient(policy), expected, rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(
    seed=SEEDS,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    far=st.sampled_from(["policy", "behaviour", "proximal"]),
    certain=st.booleans(),
)
def test_extreme_ratios_stay_finite(name, seed, dtype, far, certain):
    """One policy is 500 nats away; ``certain``: the others give their choices a probability of exactly 1."""
    inputs = random_inputs(seed)
    logprobs = {key: torch.zeros(16) if certain else value.detach() for key, value in inputs.logprobs.items()}
    logprobs[far] = logprobs[far] - 500
    logprobs = {key: value.to(dtype) for key, value in logprobs.items()}
    policy = logprobs["policy"].requires_grad_()
    inputs = replace(inputs, logprobs=logprobs, advantages=inputs.advantages.to(dtype))
    loss, sums = policy_objective(inputs, configured(loss=name, kl="k3", kl_coef=0.1), 1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(policy)).all()
    assert all(torch.isfinite(value) for value in sums.values())


@FEW
@given(p=st.floats(1e-6, 1 - 1e-6), q=st.floats(1e-6, 1 - 1e-6))
def test_binary_kl(p, q):
    logs = (torch.tensor(x, dtype=torch.float64).log() for x in (p, q))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert binary_kl(*logs).item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


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
