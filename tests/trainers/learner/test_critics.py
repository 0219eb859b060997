"""Several critics in the learner: what each trains on, how often, at what rate, and what does not affect them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.config_io import load_config
from agentkit.errors import ConfigError
from agentkit.trainers.algorithms.advantages import estimate
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.metrics import policy_metrics, product_sums
from agentkit.trainers.learner.training import Training

FRESH = {"count": 2, "layers": 1, "hidden_size": 16}
ASYPPO = {"advantage": "gae", "entropy_coef": 0.1}


def started(config) -> Training:
    training = Training(config, 0, 1, None)
    training._begin()
    return training


def weights(module: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().copy()


def critic_weights(training: Training) -> list[np.ndarray]:
    return [weights(critic.model) for critic in training.critics]


def owners(batch: Batch, critics: int) -> list[int]:
    """Critic of each sequence: the j-th smallest member of its group trains critic j mod M."""
    groups, members = batch.group_ids.tolist(), batch.members.tolist()
    pairs = list(zip(groups, members, strict=True))
    return [sum(g == group and m < member for g, m in pairs) % critics for group, member in pairs]


def rewarded(batch: Batch, sequence: int) -> Batch:
    """The batch with another reward at the end of one sequence."""
    rewards = batch.rewards.copy()
    last = (
        batch.cu_seqlens[sequence] + np.flatnonzero(batch.mask[slice(*batch.cu_seqlens[sequence : sequence + 2])])[-1]
    )
    rewards[last] += 3.0
    return replace(batch, rewards=rewards)


def test_each_critic_trains_on_its_own_members_of_every_group(configure, make_batch):
    """Member 1 of each group was dropped, so that places and member indices differ."""
    batch = make_batch(0, groups=2, members=5)
    batch = replace(batch, members=np.where(batch.members > 1, batch.members + 1, batch.members))
    config = configure(algorithm=ASYPPO, critic=FRESH, rollout={"groups": 2})

    def after(batch: Batch) -> list[np.ndarray]:
        training = started(config)
        training.train(batch, 0)
        return critic_weights(training)

    expected, trained_by = after(batch), owners(batch, 2)
    assert trained_by == [0, 1, 0, 1, 0] * 2
    for sequence, owner in enumerate(trained_by):
        changed = after(rewarded(batch, sequence))
        assert not np.array_equal(changed[owner], expected[owner])
        assert np.array_equal(changed[1 - owner], expected[1 - owner])


def test_a_critic_without_members_is_left_as_it_is(configure, make_batch):
    """Where the only other member of a group has no action token."""
    training = started(configure(algorithm=ASYPPO, critic=FRESH))
    before = critic_weights(training)
    metrics = training.train(make_batch(0, members=1), 0)
    first, second = critic_weights(training)
    assert not np.array_equal(first, before[0])
    assert np.array_equal(second, before[1])
    assert metrics["critic/0/loss"] == metrics["critic/loss"]
    assert "critic/1/loss" not in metrics


def test_the_first_losses_are_those_of_the_shards(configure, make_batch):
    """All values are 0 at first: half the mean squared return, over the action tokens of the shard."""
    batch = replace(make_batch(1, members=5), bootstraps=np.zeros(20, bool))
    metrics = started(configure(algorithm=ASYPPO, critic=FRESH | {"count": 3})).train(batch, 0)
    losses: list[list[float]] = [[], [], []]
    for sequence, owner in enumerate(owners(batch, 3)):
        start, end = batch.cu_seqlens[sequence : sequence + 2]
        for t in np.flatnonzero(batch.mask[start:end]):
            losses[owner].append(0.5 * float(batch.rewards[start + t : end].sum()) ** 2)
    for index, of in enumerate(losses):
        assert metrics[f"critic/{index}/loss"] == pytest.approx(np.mean(of), rel=1e-5)
    assert metrics["critic/loss"] == pytest.approx(np.mean([np.mean(of) for of in losses]), rel=1e-5)
    assert metrics["critic/disagreement_p90"] == metrics["critic/advantage_masked"] == 0.0


def test_fresh_critics_differ_and_copies_differ_by_what_they_train_on(configure, make_batch):
    batch = make_batch(2)
    for critic, differ in ((FRESH, True), ({"count": 2}, False)):
        training = started(configure(algorithm=ASYPPO, critic=critic))
        first, second = critic_weights(training)
        assert np.array_equal(first, second) != differ
        training.train(batch, 0)
        metrics = training.train(batch, 1)
        assert metrics["critic/disagreement_p10"] > 0
        tokens = int(batch.mask.sum())
        assert metrics["critic/advantage_masked"] == metrics["critic/entropy_masked"] == (tokens // 5) / tokens
        assert -1 <= metrics["critic/disagreement_entropy_correlation"] <= 1
        assert metrics["critic/0/explained_variance"] != metrics["critic/1/explained_variance"]
    other = started(configure(algorithm=ASYPPO, critic=FRESH, seed=1))
    assert not any(np.array_equal(one, two) for one in critic_weights(other) for two in (first, second))


def test_rates_updates_and_warm_up(configure, make_batch):
    """Two warm-up batches of eight; the critics' schedule covers all of them, the policy's the rest."""
    batch = make_batch(3)
    config = configure(
        algorithm=ASYPPO,
        critic=FRESH | {"lr": 1e-2, "schedule": "linear", "updates": 3, "warmup_steps": 2},
        learner={"lr": 1e-3, "schedule": "linear", "minibatches": 2},
        rollout={"groups": 4},
        steps=8,
    )
    training = started(config)
    start = weights(training.policy.scorer)
    found = []
    for step in range(8):
        found.append(training.train(batch, step))
        assert np.array_equal(weights(training.policy.scorer), start) == (step < 2)
    rates = [1e-2 * (1 - k / 16) for k in range(16)]  # of two minibatches per batch
    assert [m["critic/lr"] for m in found] == pytest.approx([np.mean(rates[k : k + 2]) for k in range(0, 16, 2)])
    assert [m["policy/lr"] for m in found] == pytest.approx([0, 0, *(1e-3 * (1 - k / 12) for k in range(1, 12, 2))])
    for critic in training.critics:
        assert isinstance(critic.backend.optimizer, torch.optim.AdamW)
        state = critic.backend.optimizer.state[next(critic.model.parameters())]
        assert state["step"] == 8 * 2 * 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_and_garbage_change_nothing(configure, make_batch, aggregation):
    batches, results = [make_batch(seed) for seed in (4, 5, 6)], []
    dirty = [
        replace(
            batch,
            rewards=np.where(batch.mask, batch.rewards, np.nan).astype(np.float32),
            logprobs=np.where(batch.mask, batch.logprobs, np.inf).astype(np.float32),
        )
        for batch in batches
    ]
    for given_batches, max_tokens in ((batches, 100_000), (dirty, 100_000), (batches, 64)):
        config = configure(
            algorithm=ASYPPO | {"aggregation": aggregation},
            critic=FRESH | {"updates": 2, "lr": 1e-2},
            learner={"max_tokens": max_tokens, "epochs": 2, "minibatches": 2},
            rollout={"groups": 4},
        )
        training = started(config)
        metrics = [training.train(batch, step) for step, batch in enumerate(given_batches)]
        results.append((metrics, [weights(training.policy.scorer), *critic_weights(training)]))
    (expected, moved), (of_dirty, moved_dirty), (of_small, moved_small) = results
    assert of_dirty == expected
    assert all(map(np.array_equal, moved_dirty, moved))
    for one, two in zip(of_small, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-2, abs=1e-3)
    for one, two in zip(moved_small, moved, strict=True):
        assert np.abs(one - two).mean() < 1e-4


def test_one_critic_is_ppo_whatever_the_masks(configure, make_batch):
    """Bit for bit; two critics are not."""
    results = []
    for critic, mask in (({}, 0.0), ({}, 0.5), ({"count": 2}, 0.5)):
        algorithm = ASYPPO | {"advantage_mask": mask, "entropy_mask": mask}
        training = started(configure(algorithm=algorithm, critic=critic, rollout={"group_size": 3}))
        metrics = [training.train(make_batch(step), step) for step in (7, 8)]
        results.append((metrics, weights(training.policy.scorer)))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])
    assert not np.array_equal(results[0][1], results[2][1])


def test_masked_tokens_do_not_move_the_policy_but_stay_in_the_denominator(configure, make_batch, monkeypatch):
    """The gradient equals that of a batch in which the masked tokens have advantage 0."""
    batch = make_batch(9)
    chosen = np.random.default_rng(0).random(batch.num_tokens) < 0.5
    results = []
    for name in ("policy_weight", "advantages"):

        def masked(*args, name=name):
            result = estimate(*args)
            return result._replace(**{name: np.where(chosen, 0, getattr(result, name)).astype(np.float32)})

        monkeypatch.setattr("agentkit.trainers.learner.training.estimate", masked)
        training = started(configure(algorithm={"advantage": "gae", "dual_clip": 3.0}, critic={"count": 2}))
        metrics = training.train(batch, 0)
        results.append((metrics["policy/grad_norm"], weights(training.policy.scorer)))
    assert results[0][0] == pytest.approx(results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 4))
def test_the_correlation_is_pearsons_over_all_parts(seed, parts):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, 40)) + 5
    mask = rng.random(40) < 0.7
    sums = []
    for part in np.array_split(np.arange(40), parts):
        found = product_sums(*(torch.from_numpy(column[part]) for column in (x, y, mask)))
        of_part = {name: value.item() for name, value in found.items()}
        kept = part[mask[part]]
        others = dict.fromkeys(("weight", "weight_squared", "loss", "grad_norm", "lr"), 1.0)
        rest = dict.fromkeys(("kl_behaviour", "clip_fraction", "mask_fraction"), 0.0)
        sums.append(of_part | others | rest | {"tokens": float(len(kept)), "entropy": y[kept].sum()})
    expected = np.corrcoef(x[mask], y[mask])[0, 1]
    assert policy_metrics(sums)["critic/disagreement_entropy_correlation"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("critic", "problem"),
    [
        ({"path": "small", "layers": 2}, "critic.path=small and critic.layers contradict"),
        ({"path": "small", "hidden_size": 32}, "critic.path=small and critic.hidden_size contradict"),
        ({"count": 9}, "critic.count=9 is more than rollout.group_size=8"),
        ({"warmup_steps": 20}, "critic.warmup_steps=20 leaves no training step for the policy in steps=20"),
    ],
)
def test_contradictions_of_critics_name_both_keys(critic, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config({"env": {"id": "Test-v0"}, "algorithm": {"advantage": "gae"}, "critic": critic})
