"""Attention-rhythm credit of real models, compared with plain loops over whole attention maps of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rhythm_loops
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    Qwen2Config,
)

from agentkit.config import AlgorithmConfig
from agentkit.errors import LearnerError
from agentkit.trainers.algorithms.rhythm import rhythm
from agentkit.trainers.batch import Batch, flatten
from agentkit.trainers.learner import attention, training
from agentkit.trainers.learner.attention import check_readable, reading
from agentkit.trainers.learner.credit import Credit, Heads
from agentkit.trainers.learner.microbatches import Layout, lay_out, share
from agentkit.trainers.learner.ranks import Ranks
from agentkit.trainers.learner.training import Training
from agentkit.trainers.models.quickstart import quickstart_model
from agentkit.types import Group, Trajectory, Turn

CPU = torch.device("cpu")
VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # attention that is far from uniform
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=6, n_head=6, initializer_range=0.3),
    # Capped scores, and every other layer sees 16 tokens.
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=16, query_pre_attn_scalar=8),
    # Attention sinks: rows of a map add up to less than 1.
    "gpt-oss": lambda: GptOssConfig(**SIZES, sliding_window=16, num_local_experts=2, num_experts_per_tok=1),
}


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return quickstart_model(0) if name == "quickstart" else AutoModelForCausalLM.from_config(MODELS[name]()).eval()


def episodes(seed: int, groups: int = 2) -> Batch:
    """Long answers in several turns; some episodes end with an observation."""
    rng = np.random.default_rng(seed)

    def turn() -> Turn:
        prompt, action = rng.integers(1, 12), rng.integers(1, 50)
        ids = rng.integers(0, VOCABULARY, prompt + action).astype(np.int32)
        logprobs = (-3.9 + 0.3 * rng.normal(size=action)).astype(np.float32)
        return Turn(ids[:prompt], ids[prompt:], logprobs, ((0, int(action)),), reward=float(rng.normal()))

    def episode(group: int, member: int) -> Trajectory:
        after = rng.integers(0, VOCABULARY, 3 * member).astype(np.int32)
        turns = [turn() for _ in range(rng.integers(1, 4))]
        return Trajectory(group, member, "test", 0, 0, turns, after, "truncated")

    return flatten([Group(g, 0, 0, [episode(g, m) for m in range(2)]) for g in range(groups)])


def slices(batch: Batch) -> Iterator[slice]:
    return (slice(a, b) for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True))


def whole_maps(model: PreTrainedModel, batch: Batch, layers: list[int]) -> list[np.ndarray]:
    """``[len(layers) * heads, T, T]`` of each sequence alone, by eager attention."""
    previous = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    maps = []
    for part in slices(batch):
        ids = torch.from_numpy(batch.tokens[part].astype(np.int64))[None]
        with torch.no_grad():
            found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
        maps.append(torch.cat([found[layer][0] for layer in layers]).double().numpy())
    model.set_attn_implementation(previous)
    return maps


class Expected:
    """Head sets, scores and factors by plain loops."""

    def __init__(self, model: PreTrainedModel, batch: Batch, kind: str = "coupled"):
        layers = rhythm_loops.middle_layers(model.config.get_text_config().num_hidden_layers)
        maps = whole_maps(model, batch, layers)
        heads = len(maps[0]) // len(layers)
        sums = [rhythm_loops.span_sums(each, batch.mask[p]) for each, p in zip(maps, slices(batch), strict=True)]
        local, far = rhythm_loops.head_sets([sum(of_head) for of_head in zip(*sums, strict=True)])
        self.local, self.far = ([(layers[i // heads], i % heads) for i in chosen] for chosen in (local, far))
        self.waad, self.fai, self.gamma = (np.full(batch.num_tokens, start) for start in (np.nan, np.nan, 1.0))
        for each, part in zip(maps, slices(batch), strict=True):
            mask, start = batch.mask[part], part.start
            near, wide = each[local].mean(0), each[far].mean(0)
            at = [int(t) for t in np.flatnonzero(mask)]
            waads = {t: rhythm_loops.waad(near, t) for t in at}
            rows = {s: rhythm_loops.fai_rows(mask, s) for s in at}
            fais = {s: float(np.mean([wide[t, s] for t in rows[s]])) for s in at if rows[s]}
            turns = {t: int(batch.turn_ids[start + t]) for t in at}
            for scores, target in ((waads, self.waad), (fais, self.fai)):
                for t, score in scores.items():
                    target[start + t] = score
            for t, factor in rhythm_loops.gamma(waads, fais, turns, kind).items():
                self.gamma[start + t] = factor


def credit_of(
    model: PreTrainedModel, batch: Batch, max_tokens: int = 10**6, kind: str = "coupled"
) -> tuple[Credit, Callable[[], Iterator[Layout]], Callable[[Layout], Any]]:
    config = AlgorithmConfig.model_validate({"credit": kind})
    giver = Credit(config, model, Ranks(0, 1, None, CPU))
    plan = share(batch, np.flatnonzero(batch.action_counts), 0, 1, max_tokens)

    def layouts() -> Iterator[Layout]:
        return (lay_out(batch, micro, CPU) for micro in plan)

    return giver, layouts, lambda layout: model(input_ids=layout.ids, use_cache=False)


@pytest.mark.parametrize("name", ["quickstart", *MODELS])
def test_scores_and_factors_of_models(name, monkeypatch):
    """One map per query head; the same in one padded micro-batch, in several, and in blocks of a few rows."""
    model, batch = build(name), episodes(3)
    implementation = model.config._attn_implementation
    expected = Expected(model, batch)
    for max_tokens, max_scores in ((10**6, 2**26), (200, 10_000)):
        monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
        giver, layouts, forward = credit_of(model, batch, max_tokens)
        gamma, metrics = giver.factors(batch, layouts, forward, 0)
        assert giver.heads is not None
        assert (giver.heads.local, giver.heads.global_) == (expected.local, expected.far)
        marks = rhythm(batch, *giver.read(batch, layouts(), forward), 0.4)
        np.testing.assert_allclose(marks.waad, expected.waad, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(marks.fai, expected.fai, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gamma, expected.gamma, rtol=1e-6)
        assert metrics["credit/gamma"] == pytest.approx(expected.gamma[batch.mask].mean())
        assert metrics["credit/anchor_share"] == pytest.approx(marks.anchors[batch.mask].mean())
    assert model.config._attn_implementation == implementation


def test_other_kinds_and_text_after_the_last_action():
    model, batch = build("qwen2"), episodes(4)
    after = ~batch.mask & (np.flip(np.maximum.accumulate(np.flip(batch.mask))) == 0)
    assert after.any()  # the observation that ends the batch
    changed = replace(batch, tokens=np.where(after, VOCABULARY - 1 - batch.tokens, batch.tokens).astype(np.int32))
    for kind in ("local", "global"):
        giver, layouts, forward = credit_of(model, batch, kind=kind)
        gamma, _ = giver.factors(batch, layouts, forward, 0)
        np.testing.assert_allclose(gamma, Expected(model, batch, kind).gamma, rtol=1e-6)
        assert torch.equal(gamma, credit_of(model, changed, kind=kind)[0].factors(changed, layouts, forward, 0)[0])


def test_maps_are_float32_in_blocks_of_bounded_size_under_bfloat16():
    """At most one layer's block exists, whatever the length; under autocast the maps stay float32."""
    model, seen = build("llama"), []
    ids = torch.arange(200)[None] % VOCABULARY
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        reading(model, [2, 4], lambda *block: seen.append(block), max_scores=6 * 200 * 16),
    ):
        model(input_ids=ids, use_cache=False)
    assert {layer for layer, _, _ in seen} == {2, 4}
    assert [(first, *maps.shape) for layer, first, maps in seen if layer == 4] == [
        (first, 1, 6, min(16, 200 - first), min(200, first + 16)) for first in range(0, 200, 16)
    ]
    for _, _, maps in seen:
        assert maps.dtype == torch.float32
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:3]))  # bfloat16 would be 1e-2 off


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=3, state_size=4), "compute no softmax attention"),
        (BloomConfig(vocab_size=48, hidden_size=16, n_layer=3, n_head=2), "compute no softmax attention"),
    ],
    ids=["state-space", "own-attention"],
)
def test_models_without_readable_maps_are_refused(config, reason):
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(LearnerError, match=f"needs attention maps, and layers 1, 2 of .* {reason}.*credit=none"):
        check_readable(model, [1, 2])


def test_a_model_whose_eager_attention_differs_is_refused(monkeypatch):
    """Here eager attention ignores the mask that the fused one applies."""
    model = build("llama")
    module: Any = __import__(type(model).__module__, fromlist=["_"])
    eager = module.eager_attention_forward
    monkeypatch.setattr(module, "eager_attention_forward", lambda *a, **k: eager(*a[:4], a[4] * 0, **k))
    with pytest.raises(LearnerError, match="something else"):
        check_readable(model, [2, 3, 4])


def test_heads_are_classified_again_every_20_batches(monkeypatch):
    model, batch, calls = build("gpt2"), episodes(5, groups=1), []
    giver, layouts, forward = credit_of(model, batch)
    classified = giver.classified
    monkeypatch.setattr(giver, "classified", lambda *a: calls.append(number) or classified(*a))
    for number in (3, 4, 19, 20, 21, 39, 40):  # the first of a resumed run that had no credit
        giver.factors(batch, layouts, forward, number)
    assert calls == [3, 20, 40]


# --- in training ------------------------------------------------------------------------------------------------------


def weights(learner: Training) -> np.ndarray:
    return torch.cat([part.detach().reshape(-1) for part in learner.backend.parameters.values()]).numpy().copy()


def trained(config, batches) -> tuple[Training, list[dict[str, float]]]:
    learner = Training(config, 0, 1, None)
    return learner, [learner.train(batch, step) for step, batch in enumerate(batches)]


ALGORITHM = {"advantage": "gae", "loss": "decoupled_ppo", "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01}


def sections(**algorithm: Any) -> dict[str, Any]:
    learner = {"minibatches": 2, "epochs": 2, "activation_checkpointing": True}
    return {
        "algorithm": ALGORITHM | algorithm,
        "critic": {},
        "learner": learner,
        "rollout": {"groups": 4, "group_size": 2},
    }


def test_amplification_1_changes_nothing(configure):
    """The extra pass leaves random numbers, attention and everything else as they were."""
    batches = [episodes(seed, groups=4) for seed in (6, 7)]
    without, metrics = trained(configure(**sections()), batches)
    neutral, same = trained(configure(**sections(credit="coupled", credit_amplification=1.0)), batches)
    assert np.array_equal(weights(without), weights(neutral))
    assert [{k: v for k, v in step.items() if not k.startswith("credit/")} for step in same] == metrics


def test_training_uses_the_factors_of_the_weights_before_the_update(configure, tiny_model, monkeypatch):
    """Over minibatches and epochs, factors stay those of the loops; critic, KL and entropy keep their terms."""
    batch = episodes(8, groups=4)
    actual, metrics = trained(configure(**sections(credit="coupled")), [batch])
    gamma = Expected(AutoModelForCausalLM.from_pretrained(tiny_model).eval(), batch).gamma.astype(np.float32)
    assert (gamma[batch.mask] > 1).any()
    plain = training.estimate

    def amplified(*arguments: Any) -> Any:
        estimated = plain(*arguments)
        assert {-1, 1} <= set(np.sign(estimated.advantages[gamma > 1]))  # both signs are amplified
        return estimated._replace(advantages=estimated.advantages * gamma)

    monkeypatch.setattr(training, "estimate", amplified)
    expected, same = trained(configure(**sections()), [batch])
    assert np.array_equal(weights(actual), weights(expected))
    assert [{k: v for k, v in step.items() if not k.startswith("credit/")} for step in metrics] == same


def test_no_pass_while_only_the_critic_trains(configure):
    batches = [episodes(seed, groups=4) for seed in (10, 11)]
    config = configure(**(sections(credit="local") | {"critic": {"warmup_steps": 1}}))
    learner, metrics = trained(config, batches)
    assert "credit/gamma" not in metrics[0]
    assert metrics[1]["credit/gamma"] > 1
    assert learner.credit is not None
    assert learner.credit.heads is not None


def test_heads_are_in_checkpoints(configure, tmp_path):
    """A run that goes on between two classifications uses the heads of the earlier weights."""
    config = configure(algorithm={"credit": "coupled"}, rollout={"groups": 2, "group_size": 2})
    first, _ = trained(config, [episodes(0)])
    assert first.credit is not None
    assert first.credit.heads is not None
    heads = first.credit.heads
    first.credit.heads = Heads(heads.layers, heads.global_, heads.local)  # others than a new classification finds
    first.save(tmp_path)
    expected = first.train(episodes(1), 1)
    again = Training(config, 0, 1, None)
    again.load(tmp_path)
    assert again.credit is not None
    assert again.credit.state() == first.credit.state()
    actual = again.train(episodes(1), 1)
    for metrics in (expected, actual):
        assert metrics.pop("credit/seconds") > 0
    assert actual == expected
    assert np.array_equal(weights(first), weights(again))
