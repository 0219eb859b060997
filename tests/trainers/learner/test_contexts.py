"""An episode of several contexts is trained on like one of a single context that shows the model the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rerendering import rerendered
from transformers import AutoModelForCausalLM

from agentkit.errors import LearnerError
from agentkit.trainers.algorithms.losses import POLICY_LOSSES, needs_whole_sequences
from agentkit.trainers.batch import flatten
from agentkit.trainers.learner.backends import replicas
from agentkit.trainers.learner.microbatches import MicroBatch, lay_out, plan, share
from agentkit.trainers.learner.training import Training
from agentkit.types import Group, Trajectory, Turn

CPU = torch.device("cpu")
ALGORITHMS = [
    *({"loss": loss} for loss in POLICY_LOSSES),
    {"advantage": "gigpo", "gamma": 0.9},
    {"advantage": "gae", "loss": "decoupled_ppo", "lam": 0.95, "aggregation": "sequence_mean"},
    {"advantage": "gae", "lam": "length", "entropy_coef": 0.1},
    {"advantage": "bilevel_gae", "loss": "gspo", "overlong_max": 6, "overlong_buffer": 4},
    {"advantage": "rloo", "loss": "tis", "kl": "k3", "kl_coef": 0.1, "aggregation": "constant"},
    {"advantage": "reinforce_pp", "loss": "cispo", "kl": "k1", "kl_coef": 0.1, "kl_in": "reward"},
    {"advantage": "reinforce", "loss": "seq_tis"},
    {"credit": "local"},
]


def started(config) -> Training:
    return Training(config, 0, 1, None)


@pytest.fixture
def gradients(monkeypatch) -> list[tuple[str, np.ndarray]]:
    """The gradient of every step of the policy and of critics, with whose it is."""
    recorded = []
    apply_step = replicas.apply_step

    def recording(optimizer, **kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        recorded.append((kwargs["what"], torch.cat([p.grad.reshape(-1) for p in parameters]).numpy().copy()))
        return apply_step(optimizer, **kwargs)

    monkeypatch.setattr(replicas, "apply_step", recording)
    return recorded


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: "-".join(map(str, algorithm.values())))
def test_contexts_change_nothing_but_what_the_model_reads(configure, make_groups, gradients, algorithm):
    groups = make_groups(3)
    critic = {"critic": {"count": 2}} if algorithm.get("advantage") in ("gae", "bilevel_gae") else {}
    found = []
    for batch, max_tokens, packing in (
        (flatten(groups), 100_000, False),
        (flatten(rerendered(groups)), 100_000, False),
        (flatten(rerendered(groups)), 64, "credit" not in algorithm),
    ):
        learner = {"max_tokens": max_tokens, "packing": packing, "minibatches": 2}
        sections = {"algorithm": algorithm, "rollout": {"groups": 4, "group_size": 3}, "learner": learner} | critic
        metrics = started(configure(**sections)).train(batch, 0)
        metrics.pop("credit/seconds", None)
        found.append((metrics, gradients.copy()))
        gradients.clear()
    (expected_metrics, expected), *others = found
    assert len(expected) == (6 if critic else 2)
    for metrics, steps in others:
        assert metrics == pytest.approx(expected_metrics, rel=2e-3, abs=1e-5)
        for (whose, one), (other_whose, other) in zip(expected, steps, strict=True):
            assert whose == other_whose
            np.testing.assert_allclose(other, one, rtol=1e-2, atol=2e-4 * np.abs(one).max())


@pytest.mark.parametrize("advantage", ["grpo", "gigpo", "reinforce", "chunk_returns"])
def test_without_a_critic_final_observations_change_nothing(configure, make_groups, gradients, advantage):
    groups = make_groups(3)
    batches = flatten(groups), flatten(groups, final_states=False)
    assert batches[0].bootstraps.any()
    assert not batches[1].bootstraps.any()
    assert batches[1].num_tokens < batches[0].num_tokens
    assert batches[1].action_counts.tolist() == batches[0].action_counts.tolist()
    found = []
    for batch in batches:
        sections = {"algorithm": {"advantage": advantage}, "rollout": {"groups": 4, "group_size": 3}}
        metrics = started(configure(**sections)).train(batch, 0)
        found.append((metrics, gradients.copy()))
        gradients.clear()
    (metrics, one), (other_metrics, other) = found
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for (_, gradient), (_, other_gradient) in zip(one, other, strict=True):
        np.testing.assert_allclose(other_gradient, gradient, rtol=1e-3, atol=1e-5 * np.abs(gradient).max())


def test_log_probabilities_are_those_of_each_context_alone(configure, make_groups, tiny_model):
    """Contexts of unrelated tokens, as a template makes that rewrites the history."""
    groups = make_groups(5)
    for episode in (episode for group in groups for episode in group.members):
        episode.rerendered = True
    batch = flatten(groups)
    assert batch.num_contexts > batch.num_sequences
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    scorer = started(configure()).policy.scorer
    for packed in (False, True):
        layout = lay_out(batch, MicroBatch(np.arange(batch.num_contexts), packed=packed), CPU)
        with torch.no_grad():
            logprobs, _ = scorer(layout, 1.0)
        scored = dict(zip(layout.positions.tolist(), logprobs.tolist(), strict=True))
        at = 0
        for episode in (episode for group in groups for episode in group.members):
            for turn in episode.turns:
                ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.action_ids]).astype(np.int64))
                with torch.no_grad():
                    log_probs = torch.log_softmax(plain(input_ids=ids[None]).logits[0], -1)
                for offset in range(len(turn.prompt_ids), len(ids)):
                    expected = log_probs[offset - 1, ids[offset]].item()
                    assert scored.pop(at + offset) == pytest.approx(expected, rel=1e-4, abs=1e-4)
                at += len(ids)
            at += len(episode.final_ids)
        assert not scored


def test_a_critic_values_each_turn_in_its_own_context_and_the_final_observation(configure, make_groups):
    groups = make_groups(8)
    for episode in (episode for group in groups for episode in group.members):
        episode.rerendered = True
    batch = flatten(groups)
    training = started(configure(algorithm={"advantage": "gae"}, critic={}, learner={"max_tokens": 64}))
    training._begin()
    critic = training.critics[0]
    torch.nn.init.normal_(critic.model.output.weight)
    scores = training._scored(batch, np.arange(batch.num_sequences), critic.values_at, states=True)
    finals = 0
    for start, end in zip(batch.cu_contexts[:-1], batch.cu_contexts[1:], strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
            values = critic.model.output(critic.model.trunk(input_ids=ids).last_hidden_state)[0].numpy()
        actions = np.flatnonzero(batch.mask[start:end])
        finals += not len(actions)
        states = [*(actions - 1), end - start - 1]
        np.testing.assert_allclose(scores[start:end][states], values[states], rtol=1e-4, atol=1e-5)
    assert finals == batch.bootstraps.sum() > 0


def test_a_batch_divides_episodes_into_contexts(make_groups):
    groups = make_groups(1)
    groups[0].members[0].turns[0].prompt_ids = np.arange(5, dtype=np.int32)
    appended, apart = flatten(groups), flatten(rerendered(groups))
    assert appended.cu_contexts.tolist() == appended.cu_seqlens.tolist()
    assert apart.num_sequences == appended.num_sequences
    lengths, owners = [], []
    for index, episode in enumerate(episode for group in rerendered(groups) for episode in group.members):
        for turn in episode.turns:
            lengths.append(len(turn.prompt_ids) + len(turn.action_ids))
        lengths += [len(episode.final_ids)] * (episode.outcome == "truncated")
        owners += [index] * (len(episode.turns) + (episode.outcome == "truncated"))
    assert apart.context_lengths.tolist() == lengths
    assert apart.context_sequences.tolist() == owners
    assert apart.action_counts.tolist() == appended.action_counts.tolist()
    assert np.array_equal(apart.rewards[apart.mask], appended.rewards[appended.mask])


def test_a_context_cannot_begin_with_an_action():
    def turn(prompt: int) -> Turn:
        ids = np.zeros(2, np.int32)
        return Turn(np.zeros(prompt, np.int32), ids, np.zeros(2, np.float32), ((0, 2),))

    episode = Trajectory(0, 0, "test", 0, 0, [turn(1), turn(0)])
    assert flatten([Group(0, 0, 0, [episode])]).num_contexts == 1
    episode.rerendered = True
    with pytest.raises(LearnerError, match="begins with an action token"):
        flatten([Group(0, 0, 0, [episode])])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 3), max_tokens=st.integers(1, 300), packed=st.booleans())
def test_contexts_of_one_sequence_stay_together_where_the_loss_needs_it(seed, ranks, max_tokens, packed):
    rng = np.random.default_rng(seed)
    sequences = np.sort(rng.integers(0, 6, 15))
    lengths, contexts = rng.integers(1, 60, 15), np.flatnonzero(rng.random(15) < 0.8)
    plans = plan(lengths, contexts, ranks, max_tokens, packed=packed, together=sequences)
    assert len({len(share) for share in plans}) == 1
    counted = [micro.contexts for of_rank in plans for micro in of_rank if not micro.filler]
    assert sorted(int(i) for held in counted for i in held) == contexts.tolist()
    homes = [set(sequences[held]) for held in counted]
    assert sum(map(len, homes)) == len(set(sequences[contexts]))
    for held, home in zip(counted, homes, strict=True):
        tokens = lengths[held].sum() if packed else len(held) * lengths[held].max()
        assert tokens <= max_tokens or len(home) == 1


def test_only_coupled_losses_keep_long_episodes_in_one_forward_pass(configure, make_groups):
    batch = flatten(rerendered(make_groups(3)))
    everything = np.arange(batch.num_sequences)
    split, whole, states = (
        share(batch, everything, 0, 1, 64, whole=whole, states=states)
        for whole, states in ((False, False), (True, False), (False, True))
    )
    assert all(len(micro.contexts) * batch.context_lengths[micro.contexts].max() <= 64 for micro in split)
    assert len(whole) < len(split)
    held = [int(index) for micro in states for index in micro.contexts]
    assert sorted(held) == list(range(batch.num_contexts))
    assert sum(len(micro.contexts) for micro in split) == np.count_nonzero(batch.context_action_counts)
    coupled = {loss for loss in POLICY_LOSSES if needs_whole_sequences(configure(algorithm={"loss": loss}).algorithm)}
    assert coupled == {"gspo", "sapo", "seq_tis", "seq_mis", "topr", "flash_reinforce"}
