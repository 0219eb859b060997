"""Training steps of the learner: their results, and changes that must not affect them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from agentkit.errors import LearnerError
from agentkit.trainers.algorithms.losses import POLICY_LOSSES
from agentkit.trainers.batch import flatten
from agentkit.trainers.learner.backends import replicas
from agentkit.trainers.learner.forward import check_packing
from agentkit.trainers.learner.microbatches import MicroBatch, lay_out
from agentkit.trainers.learner.schedule import schedule_factor
from agentkit.trainers.learner.training import Training
from agentkit.types import Group, Trajectory, Turn

CPU = torch.device("cpu")


def started(config) -> Training:
    return Training(config, 0, 1, None)


@pytest.fixture
def gradients(monkeypatch) -> list[np.ndarray]:
    """The whole gradient of every policy step that the test makes."""
    recorded = []
    apply_step = replicas.apply_step

    def recording(optimizer, **kwargs):
        if kwargs["what"] == "policy's":
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            recorded.append(torch.cat([p.grad.reshape(-1) for p in parameters]).numpy().copy())
        return apply_step(optimizer, **kwargs)

    monkeypatch.setattr(replicas, "apply_step", recording)
    return recorded


def weights(training: Training) -> np.ndarray:
    return torch.cat([part.detach().reshape(-1) for part in training.backend.parameters.values()]).numpy().copy()


def slow_logprobs(model, batch, temperature):
    """Log-probabilities and entropies by one unpadded pass per sequence over all logits."""
    logprobs, entropies = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / temperature
        scored = torch.log_softmax(logits, -1)
        for offset in range(1, len(ids)):
            logprobs[start + offset] = scored[offset - 1, ids[offset]]
            entropies[start + offset] = -(scored[offset - 1].exp() * scored[offset - 1]).sum()
    return logprobs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunked", [False, True])
def test_logprobs_are_those_of_the_plain_model(configure, make_batch, tiny_model, monkeypatch, temperature, chunked):
    if chunked:
        monkeypatch.setattr("agentkit.trainers.learner.forward.MAX_LOGITS", 48 * 5)
    training, batch = started(configure()), make_batch(1)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    expected, entropies = slow_logprobs(plain, batch, temperature)
    layout = lay_out(batch, MicroBatch(np.arange(batch.num_sequences)), CPU)
    logprobs, entropy = training.policy.scorer(layout, temperature)
    assert logprobs.dtype == torch.float32
    assert not entropy.requires_grad
    np.testing.assert_allclose(logprobs.detach(), expected[layout.positions], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, entropies[layout.positions], rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert all(p.grad is not None for p in training.policy.scorer.parameters())


def test_a_model_that_changes_logits_after_its_head_is_scored_by_its_own_forward(configure, make_batch):
    training, batch = started(configure()), make_batch(1)
    scorer, model = training.policy.scorer, training.policy.causal_lm
    assert scorer.head_is_last
    plain_forward = model.forward

    def capped(*args, **kwargs):
        output = plain_forward(*args, **kwargs)
        output.logits = 0.5 * torch.tanh(output.logits / 0.5)
        return output

    model.forward = capped
    scorer.head_is_last = scorer._head_is_last()
    assert not scorer.head_is_last
    layout = lay_out(batch, MicroBatch(np.arange(batch.num_sequences)), CPU)
    expected, _ = slow_logprobs(model, batch, 1.0)
    logprobs, _ = scorer(layout, 1.0)
    np.testing.assert_allclose(logprobs.detach(), expected[layout.positions], rtol=1e-5, atol=1e-5)


ALGORITHMS = [
    {"advantage": "grpo", "loss": "ppo"},
    {"advantage": "gae", "loss": "decoupled_ppo", "lam": 0.95, "aggregation": "sequence_mean"},
    {"advantage": "rloo", "loss": "tis", "kl": "k3", "kl_coef": 0.1, "aggregation": "constant"},
    {"advantage": "reinforce_pp", "loss": "cispo", "kl": "k1", "kl_coef": 0.1, "kl_in": "reward", "entropy_coef": 0.1},
    {"advantage": "bilevel_gae", "loss": "gspo", "overlong_max": 6, "overlong_buffer": 4},
    {"advantage": "chunk_returns", "loss": "chunk_topr", "gamma": 0.9},
]


def sections(algorithm, **learner):
    critic = {"critic": {}} if algorithm["advantage"] in ("gae", "bilevel_gae") else {}
    return {"algorithm": algorithm, "rollout": {"groups": 4, "group_size": 3}, "learner": learner} | critic


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_trains_from_one_line_of_configuration(configure, make_batch, gradients, loss):
    training = started(configure(algorithm={"loss": loss}, rollout={"groups": 4, "group_size": 3}))
    metrics = training.train(make_batch(2), 0)
    assert all(np.isfinite(value) for value in metrics.values())
    (gradient,) = gradients
    assert np.abs(gradient).max() > 0 or metrics["policy/mask_fraction"] == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a["loss"])
def test_micro_batches_and_packing_change_nothing(configure, make_batch, gradients, algorithm):
    batches, metrics, grads = [make_batch(2), make_batch(3)], [], []
    for max_tokens, packing in ((64, False), (150, False), (100_000, False), (150, True)):
        training = started(configure(**sections(algorithm, max_tokens=max_tokens, minibatches=2, packing=packing)))
        metrics.append([training.train(batch, step) for step, batch in enumerate(batches)])
        grads.append(gradients.copy())
        gradients.clear()
    for other_metrics, other_grads in zip(metrics[1:], grads[1:], strict=True):
        for step in range(2):
            assert other_metrics[step] == pytest.approx(metrics[0][step], rel=1e-3, abs=1e-5)
        assert len(other_grads) == 4
        for expected, actual in zip(grads[0], other_grads, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a["loss"])
def test_garbage_where_masked_changes_nothing(configure, make_batch, algorithm):
    batch = make_batch(4)
    dirty = replace(
        batch,
        logprobs=np.where(batch.mask, batch.logprobs, np.nan).astype(np.float32),
        rewards=np.where(batch.mask, batch.rewards, np.inf).astype(np.float32),
        versions=np.where(batch.mask, batch.versions, 10**6).astype(np.int32),
    )
    results = []
    for each in (batch, dirty):
        training = started(configure(**sections(algorithm, minibatches=2)))
        results.append((training.train(each, 0), weights(training)))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])


def test_metrics_and_gradient_of_one_step(configure, make_batch, gradients, tiny_model):
    """PPO with GRPO advantages, written out over the plain model."""
    batch = make_batch(5)
    training = started(configure(**sections({"advantage": "grpo", "loss": "ppo"})))
    metrics = training.train(batch, 0)

    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    returns = [batch.rewards[a:b].sum() for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    loss, clipped, divergence, ratios = torch.zeros(()), 0, 0.0, []
    for index, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        group = [r for r, g in zip(returns, batch.group_ids, strict=True) if g == batch.group_ids[index]]
        advantage = float((returns[index] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6))
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        scored = torch.log_softmax(plain(input_ids=ids[None]).logits[0], -1)
        for offset in np.flatnonzero(batch.mask[start:end]):
            log_ratio = scored[offset - 1, ids[offset]] - float(batch.logprobs[start + offset])
            ratio = log_ratio.exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            clipped += bool(objective < ratio * advantage)
            loss = loss - objective
            divergence += (ratio - 1 - log_ratio).item()
            ratios.append(ratio.item())
    tokens = int(batch.mask.sum())
    (loss / tokens).backward()
    matrices_first = sorted(plain.parameters(), key=lambda p: p.ndim == 1)
    expected = torch.cat([p.grad.reshape(-1) for p in matrices_first if p.grad is not None]).numpy()
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-2, atol=1e-4 * np.abs(expected).max())

    _, entropies = slow_logprobs(AutoModelForCausalLM.from_pretrained(tiny_model), batch, 1.0)
    ratios = np.array(ratios)
    assert metrics == pytest.approx(
        {
            "policy/loss": loss.item() / tokens,
            "policy/entropy": entropies[batch.mask].mean(),
            "policy/kl_behaviour": divergence / tokens,
            "policy/clip_fraction": clipped / tokens,
            "policy/mask_fraction": 0.0,
            "policy/ess": ratios.sum() ** 2 / (tokens * (ratios**2).sum()),
            "policy/grad_norm": np.linalg.norm(expected),
            "policy/lr": 1e-3,
        },
        rel=1e-3,
        abs=1e-5,
    )


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4, "dropout": 0.1}}], ids=["full", "lora"])
def test_activation_checkpointing_changes_nothing(configure, make_batch, gradients, model):
    calls, algorithm = [], {"advantage": "gae", "loss": "tis"}
    for activation_checkpointing in (False, True):
        learner = {"activation_checkpointing": activation_checkpointing}
        training = started(configure(**sections(algorithm, **learner), model=model))
        trunk: Any = training.policy.causal_lm.base_model
        trunk.layers[0].mlp.register_forward_pre_hook(lambda *_, kind=activation_checkpointing: calls.append(kind))
        training.train(make_batch(6), 0)
    assert np.array_equal(*gradients)
    assert calls.count(True) == calls.count(False) + 1  # computed again in the backward pass


def test_attention_implementations_agree(configure, make_batch, gradients):
    for attention in ("eager", "sdpa"):
        training = started(configure(learner={"attention": attention}))
        assert training.policy.causal_lm.config._attn_implementation == attention
        training.train(make_batch(6), 0)
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=0, atol=1e-6)
    with pytest.raises(LearnerError, match=r"learner\.attention='flash_attention_2' cannot be used"):
        started(configure(learner={"attention": "flash_attention_2"}))


def test_equal_returns_leave_the_policy_alone(configure, make_batch):
    batch = make_batch(6)
    batch = replace(batch, rewards=np.zeros_like(batch.rewards))
    training = started(configure(learner={"weight_decay": 0.0}))
    before = weights(training)
    assert training.train(batch, 0)["policy/grad_norm"] == 0
    assert np.array_equal(weights(training), before)


@pytest.mark.parametrize("loss", ["ppo", "decoupled_ppo", "tis", "cispo", "pg"])
def test_a_bandit_is_learnt(configure, loss):
    """One state, one token an episode, reward for one token of 48; sampled from the policy that is trained."""
    training = started(
        configure(
            algorithm={"advantage": "grpo", "loss": loss},
            rollout={"groups": 2, "group_size": 32},
            learner={"lr": 1e-2, "minibatches": 2},
        )
    )
    rng = np.random.default_rng(0)
    prompt = np.array([1, 2], np.int32)

    def probabilities() -> np.ndarray:
        with torch.no_grad():
            logits = training.policy.causal_lm(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
        return torch.softmax(logits.double(), -1).numpy()

    for step in range(20):
        p = probabilities()
        groups = []
        for group in range(2):
            tokens = rng.choice(len(p), 32, p=p / p.sum())
            turns = [
                Turn(
                    prompt, np.array([t], np.int32), np.log(p[[t]]).astype(np.float32), ((0, 1),), reward=float(t == 7)
                )
                for t in tokens
            ]
            groups.append(Group(group, 0, 0, [Trajectory(group, m, "b", 0, 0, [turn]) for m, turn in enumerate(turns)]))
        training.train(flatten(groups), step)
    assert probabilities()[7] > 0.9


def test_a_critic_learns_the_return_and_warms_up_alone(configure, make_batch):
    batch = make_batch(7)
    batch = replace(batch, rewards=np.where(batch.mask, batch.rewards * 0, 0).astype(np.float32))
    ends = [np.flatnonzero(batch.mask[: batch.cu_seqlens[i + 1]])[-1] for i in range(batch.num_sequences)]
    batch.rewards[ends] = 2.0
    batch = replace(batch, bootstraps=np.zeros_like(batch.bootstraps))
    config = configure(
        algorithm={"advantage": "gae"}, critic={"lr": 3e-3, "warmup_steps": 40, "value_clip": None}, steps=50
    )
    training = started(config)
    before = weights(training)
    first = training.train(batch, 0)
    assert first["critic/loss"] == pytest.approx(2.0, rel=1e-3)  # the head starts at zero: 0.5 * 2^2
    assert not any(name.startswith("policy/") and name != "policy/lr" for name in first)
    losses = [training.train(batch, step)["critic/loss"] for step in range(1, 40)]
    assert losses[-1] < 0.05
    assert np.array_equal(weights(training), before)
    assert "policy/loss" in training.train(batch, 40)
    assert not np.array_equal(weights(training), before)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_critic_is_read_one_position_before_each_action(configure, make_batch, packing):
    learner = {"max_tokens": 64, "packing": packing}
    training, batch = started(configure(algorithm={"advantage": "gae"}, critic={}, learner=learner)), make_batch(8)
    training._begin()
    critic = training.critics[0]
    torch.nn.init.normal_(critic.model.output.weight)
    scores = training._scored(batch, np.arange(batch.num_sequences), critic.values_at)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
            values = critic.model.output(critic.model.trunk(input_ids=ids).last_hidden_state)[0].numpy()
        states = [*(np.flatnonzero(batch.mask[start:end]) - 1), end - start - 1]
        np.testing.assert_allclose(scores[start:end][states], values[states], rtol=1e-4, atol=1e-5)


def test_the_reference_is_the_policy_after_imitation(configure, make_batch):
    config = configure(algorithm={"kl": "k3", "kl_coef": 0.1})
    training, batch = started(config), make_batch(9)
    for _ in range(3):
        training.imitate(batch, 1e-2)
    assert training.train(batch, 0)["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert training.train(batch, 1)["policy/kl_reference"] > 1e-6


def test_a_reference_is_kept_only_for_a_kl(configure, make_batch):
    training = started(configure())
    training.train(make_batch(9), 0)
    assert training.reference is None


def test_imitation_fits_the_actions(configure, make_batch):
    training, batch = started(configure()), make_batch(10, groups=1)
    batch = replace(batch, logprobs=np.full_like(batch.logprobs, np.nan))
    losses = [training.imitate(batch, 1e-2)["imitation/loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(np.log(48), rel=0.05)
    assert losses[-1] < 0.3 * losses[0]


def test_proximal_is_the_first_forward_pass(configure, make_batch, gradients, monkeypatch):
    """With one step per batch no scoring pass runs, and the result is the same."""
    algorithm = {"advantage": "grpo", "loss": "decoupled_ppo"}
    batch = make_batch(11)
    training = started(configure(**sections(algorithm)))
    training.train(batch, 0)
    monkeypatch.setattr(Training, "_steps_per_batch", 2)
    started(configure(**sections(algorithm))).train(batch, 0)
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_loss_is_not_applied(configure, make_batch, bad):
    training, batch = started(configure(algorithm={"advantage": "reinforce"})), make_batch(12)
    training.train(batch, 0)
    before = weights(training)
    rewards = batch.rewards.copy()
    rewards[np.flatnonzero(batch.mask)[0]] = bad
    with pytest.raises(LearnerError, match="the step was not applied"):
        training.train(replace(batch, rewards=rewards), 1)
    assert np.array_equal(weights(training), before)
    assert np.isfinite(training.train(batch, 1)["policy/loss"])


def test_a_batch_without_actions_is_refused(configure):
    turn = Turn(np.array([1], np.int32), np.empty(0, np.int32), np.empty(0, np.float32), ())
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "test", 0, 0, [turn])])])
    with pytest.raises(LearnerError, match="no action token"):
        started(configure()).train(batch, 0)


def test_minibatches_hold_whole_groups(configure, make_batch):
    training, batch = started(configure(rollout={"groups": 4}, learner={"minibatches": 2, "epochs": 3})), make_batch(13)
    parts = list(training._minibatches(batch, np.arange(batch.num_sequences), 0))
    assert len(parts) == 6
    for epoch in range(3):
        first, second = parts[2 * epoch : 2 * epoch + 2]
        assert sorted([*first, *second]) == list(range(batch.num_sequences))
        assert not set(batch.group_ids[first]) & set(batch.group_ids[second])


def test_schedules():
    assert [schedule_factor(s, "constant", 4, 10) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [schedule_factor(s, "linear", 0, 4) for s in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [schedule_factor(s, "cosine", 2, 6) for s in (1, 2, 4, 6, 9)] == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_are_trained_in_float32_and_leave_in_the_configured_type(configure, make_batch, dtype, expected):
    training = started(configure(model={"dtype": dtype}))
    assert np.isfinite(training.train(make_batch(14), 0)["policy/loss"])
    assert {p.dtype for p in training.policy.scorer.parameters()} == {torch.float32}
    assert {value.dtype for _, value in training.policy.plain_tensors(training.backend.whole)} == {expected}


def test_a_model_that_mixes_packed_sequences_is_refused():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(LearnerError, match=r"MambaForCausalLM does not keep packed sequences apart.*packing=false"):
        check_packing(MambaForCausalLM(config))
