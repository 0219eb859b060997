"""Contexts with common prefixes are computed once there, and trained on as if each was computed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rerendering import rerendered
from test_contexts import ALGORITHMS, gradients, started  # noqa: F401
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from agentkit.config_io import ConfigError
from agentkit.errors import LearnerError
from agentkit.trainers.batch import flatten
from agentkit.trainers.learner.forward import why_not_shared
from agentkit.trainers.learner.microbatches import lay_out, share
from agentkit.trainers.learner.prefixes import merge, merged_rows

CPU = torch.device("cpu")
PADDED = [algorithm for algorithm in ALGORITHMS if "credit" not in algorithm]
TOKENS = st.lists(st.integers(0, 2) | st.just(70_000), min_size=1, max_size=12)


def with_common_prompts(groups, length=40):
    """The same episodes, whose first prompt is that of their group, as a task's is."""
    for number, group in enumerate(groups):
        prompt = np.random.default_rng(number).integers(0, 48, length).astype(np.int32)
        for episode in group.members:
            episode.turns[0].prompt_ids = prompt
    return groups


@settings(max_examples=200, deadline=None)
@given(contexts=st.lists(TOKENS, min_size=1, max_size=10))
def test_a_tree_has_one_node_for_each_distinct_prefix(contexts):
    tree = merge([np.array(tokens, np.int32) for tokens in contexts])
    prefixes = {tuple(tokens[: k + 1]) for tokens in contexts for k in range(len(tokens))}
    assert len(tree.ids) == len(tree.depths) == len(prefixes)
    node_of = {}
    for tokens, path in zip(contexts, tree.paths, strict=True):
        for k, node in enumerate(path.tolist()):
            assert (tree.ids[node], tree.depths[node]) == (tokens[k], k)
            assert node_of.setdefault(tuple(tokens[: k + 1]), node) == node
            assert set(np.flatnonzero(tree.visible[node])) == set(path[: k + 1].tolist())
    assert len(set(node_of.values())) == len(node_of)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 3),
    max_tokens=st.integers(1, 400),
    prompt=st.integers(1, 60),
    hidden_size=st.sampled_from([1, 32, 4096]),
)
def test_every_context_is_in_one_row_within_the_budget(make_groups, seed, ranks, max_tokens, prompt, hidden_size):
    batch = flatten(with_common_prompts(make_groups(seed), prompt))
    everything = np.arange(batch.num_sequences)
    held = []
    for rank in range(ranks):
        for micro in share(batch, everything, rank, ranks, max_tokens, share_prefixes_of=hidden_size):
            layout = lay_out(batch, micro, CPU)
            assert micro.shared_rows is not None
            assert layout.ids.numel() <= max_tokens or not micro.shared_rows.any()
            held += [] if micro.filler else micro.contexts.tolist()
    assert sorted(held) == everything.tolist()


def test_prefixes_are_shared_where_this_is_less_work(make_groups):
    batch = flatten(with_common_prompts(make_groups(0, groups=4, members=8), 200))
    contexts = np.arange(batch.num_contexts)
    rows = merged_rows(batch, contexts, 100_000, hidden_size=576)
    assert sorted(len(row.contexts) for row in rows) == [8] * 4
    assert all(len(set(batch.group_ids[row.contexts])) == 1 for row in rows)
    assert sum(row.nodes for row in rows) < batch.num_tokens / 3
    assert all(row.nodes <= 300 for row in merged_rows(batch, contexts, 300, hidden_size=576) if len(row.contexts) > 1)
    short = flatten(with_common_prompts(make_groups(0, groups=4, members=8), 2))
    assert len(merged_rows(short, np.arange(short.num_contexts), 100_000, hidden_size=1)) > 4


@pytest.mark.parametrize("turns", ["one context", "a context per turn"])
def test_log_probabilities_are_those_of_each_context_alone(configure, make_groups, tiny_model, turns):
    groups = with_common_prompts(make_groups(5))
    batch = flatten(groups if turns == "one context" else rerendered(groups))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    training = started(configure(learner={"max_tokens": 400}))
    scores = training._scored(batch, np.arange(batch.num_sequences), training._logprobs_at)
    assert any(layout.visible is not None for layout, _ in training._layouts(batch, np.arange(batch.num_sequences)))
    for start, end in zip(batch.cu_contexts[:-1], batch.cu_contexts[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(input_ids=ids[None]).logits[0], -1)
        for offset in np.flatnonzero(batch.mask[start:end]):
            assert scores[start + offset] == pytest.approx(logprobs[offset - 1, ids[offset]].item(), abs=1e-5)


@pytest.mark.parametrize("algorithm", PADDED, ids=lambda algorithm: "-".join(map(str, algorithm.values())))
def test_shared_prefixes_change_no_gradient(configure, make_groups, gradients, algorithm):  # noqa: F811
    groups = with_common_prompts(make_groups(3))
    critic = {"critic": {"count": 2}} if algorithm.get("advantage") in ("gae", "bilevel_gae") else {}
    found = []
    for batch, shared, max_tokens in (
        (flatten(groups), False, 100_000),
        (flatten(groups), True, 100_000),
        (flatten(groups), True, 200),
        (flatten(rerendered(groups)), True, 300),
    ):
        learner = {"max_tokens": max_tokens, "share_prefixes": shared, "minibatches": 2}
        sections = {"algorithm": algorithm, "rollout": {"groups": 4, "group_size": 3}, "learner": learner} | critic
        found.append((started(configure(**sections)).train(batch, 0), gradients.copy()))
        gradients.clear()
    if algorithm.get("loss") == "chunk_topr":  # it clips ratios above 1, and these are 1 up to rounding
        for metrics, _ in found:
            metrics.pop("policy/clip_fraction")
    (expected_metrics, expected), *others = found
    for metrics, steps in others:
        assert metrics == pytest.approx(expected_metrics, rel=2e-3, abs=1e-5)
        for (whose, one), (other_whose, other) in zip(expected, steps, strict=True):
            assert whose == other_whose
            np.testing.assert_allclose(other, one, rtol=1e-2, atol=2e-4 * np.abs(one).max())


@pytest.fixture
def sliding(tmp_path) -> MistralForCausalLM:
    """A model whose layers see the last 8 tokens, saved in ``tmp_path``."""
    config = MistralConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    model = MistralForCausalLM(config)
    model.save_pretrained(tmp_path)
    return model


def test_models_without_full_attention_compute_every_context_alone(configure, tiny_model, sliding, tmp_path):
    assert "without full attention" in str(why_not_shared(sliding, None))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert why_not_shared(plain, None) is None
    assert "with eager" in str(why_not_shared(plain, "eager"))
    there = {"path": str(tmp_path)}
    assert not started(configure(model=there)).share_prefixes
    with pytest.raises(LearnerError, match=r"share_prefixes=true is impossible: Mistral.*share_prefixes=null"):
        started(configure(model=there, learner={"share_prefixes": True}))


def test_a_critic_that_cannot_share_prefixes_stops_the_policy_from_it(configure, make_groups, sliding, tmp_path):
    training = started(configure(algorithm={"advantage": "gae"}, critic={"path": str(tmp_path)}))
    assert training.share_prefixes
    training.train(flatten(with_common_prompts(make_groups(0))), 0)
    assert not training.share_prefixes


@pytest.mark.parametrize("other", [{"learner": {"packing": True}}, {"algorithm": {"credit": "local"}}])
def test_other_layouts_contradict(configure, other):
    with pytest.raises((ConfigError, ValueError), match=r"share_prefixes=true and .* contradict"):
        configure(**(other | {"learner": {"share_prefixes": True} | other.get("learner", {})}))
