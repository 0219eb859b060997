"""The learner role: published weights, exact continuation, adapters, and an interface that never blocks."""

from __future__ import annotations

import asyncio
import resource

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights_reading import state_of

from agentkit.config import RunConfig
from agentkit.errors import CheckpointError, EngineError, LearnerError, RunDirectoryError
from agentkit.trainers.batch import Batch, flatten
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.learner.torch_learner import Learner
from agentkit.types import Group, Trajectory, Turn

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
RICH = {
    "algorithm": {"advantage": "gae", "kl": "k3", "kl_coef": 0.1},
    "critic": {"count": 2, "layers": 1, "hidden_size": 16, "updates": 2, "schedule": "linear"},
    "learner": {"schedule": "cosine", "warmup_steps": 2, "minibatches": 2},
}


async def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return state_of(await learner.publish(0))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


async def test_published_weights_are_those_of_a_plain_model(configure, make_batch, tiny_model, tmp_path):
    learner = Learner(configure())
    info = await learner.start()
    assert info["parameters"] == info["trainable"] > 10_000
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    staged = await learner.publish(3)
    assert staged.version == 3
    published = state_of(staged)
    missing, unexpected = plain.load_state_dict(published, strict=False)
    assert not unexpected
    assert missing == ["lm_head.weight"]  # tied to the embeddings, so it is published once
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in published.items())

    await learner.train(make_batch(0), 0)
    staged = await learner.publish(4)
    assert not same(state_of(staged), published)
    await learner.close()
    with pytest.raises(EngineError, match="publish them again"):
        state_of(staged)


@pytest.mark.filterwarnings("error::FutureWarning")
async def test_lora_trains_adapters_alone_and_publishes_them_merged(configure, make_batch, tiny_model, tmp_path):
    batch = make_batch(1)
    learner = Learner(configure(model={"lora": LORA}, learner={"lr": 1e-2}))
    info = await learner.start()
    assert info["trainable"] < info["parameters"]
    training = learner._ready
    assert all(".lora_" in name for name in training.backend.parameters)
    frozen = {n: p.clone() for n, p in training.policy.scorer.named_parameters() if ".lora_" not in n}
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = await weights(learner)
    assert all(torch.allclose(value, plain.state_dict()[name]) for name, value in before.items())
    for step in range(3):
        await learner.train(batch, step)
    for name, parameter in training.policy.scorer.named_parameters():
        assert ".lora_" in name or torch.equal(parameter, frozen[name])

    published = await weights(learner)
    assert not same(published, before)
    plain.load_state_dict(published, strict=False)
    ids = torch.from_numpy(batch.tokens[:20].astype(np.int64))[None]
    with torch.no_grad():
        expected = training.policy.causal_lm(input_ids=ids).logits
        np.testing.assert_allclose(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    await learner.export(tmp_path / "model")
    await learner.close()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        np.testing.assert_allclose(exported(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


async def test_lora_reference_is_the_policy_before_training(configure, make_batch):
    batch = make_batch(2)
    lora = LORA | {"dropout": 0.0}
    learner = Learner(configure(model={"lora": lora}, learner={"lr": 1e-2}, algorithm={"kl": "k2"}))
    await learner.start()
    first, second = await learner.train(batch, 0), await learner.train(batch, 1)
    assert first["policy/kl_reference"] == pytest.approx(0, abs=1e-9)
    assert second["policy/kl_reference"] > 1e-9
    await learner.close()


@pytest.mark.parametrize(
    "sections",
    [
        RICH,
        {"model": {"lora": LORA}, "algorithm": {"kl": "k1", "kl_in": "reward", "kl_coef": 0.1}},
        {"learner": {"optimizer": "muon", "weight_decay": 0.1}},
    ],
    ids=["full", "lora", "muon"],
)
async def test_continuation_is_exact(configure, make_batch, tmp_path, sections):
    config = configure(**sections)
    batches = [make_batch(seed) for seed in range(4)]
    learner = Learner(config)
    await learner.start()
    await learner.imitate(batches[0], 1e-3)
    for step in (0, 1):
        await learner.train(batches[step], step)
    await learner.save(tmp_path / "checkpoint")
    expected = [await learner.train(batches[step], step) for step in (2, 3)]
    final = await weights(learner)
    await learner.close()

    torch.manual_seed(999)
    resumed = Learner(config)
    await resumed.start()
    await resumed.load(tmp_path / "checkpoint")
    assert [await resumed.train(batches[step], step) for step in (2, 3)] == expected
    assert same(await weights(resumed), final)
    await resumed.close()


async def test_another_number_of_critics_is_refused(configure, make_batch, tmp_path):
    algorithm = {"advantage": "gae"}
    learner = Learner(configure(algorithm=algorithm, critic={"count": 2}))
    await learner.start()
    await learner.train(make_batch(0), 0)
    await learner.save(tmp_path)
    await learner.close()
    for count in (1, 3):
        other = Learner(configure(algorithm=algorithm, critic={"count": count}))
        await other.start()
        with pytest.raises(CheckpointError, match=rf"has 2 critics, and critic.count asks for {count}: set .*count=2"):
            await other.load(tmp_path)
        await other.close()


async def test_continuation_within_imitation_is_exact(configure, make_batch, tmp_path):
    batch = make_batch(0)
    learner = Learner(configure())
    await learner.start()
    for _ in range(2):
        await learner.imitate(batch, 1e-3)
    await learner.save(tmp_path)
    expected = await learner.imitate(batch, 1e-3)
    final = await weights(learner)
    await learner.close()
    resumed = Learner(configure())
    await resumed.start()
    await resumed.load(tmp_path)
    assert await resumed.imitate(batch, 1e-3) == expected
    assert same(await weights(resumed), final)
    await resumed.close()


async def test_an_incompatible_checkpoint_is_an_error(configure, tmp_path):
    learner = Learner(configure())
    await learner.start()
    with pytest.raises(CheckpointError, match="is missing"):
        await learner.load(tmp_path)
    await learner.save(tmp_path)
    other = Learner(configure(model={"lora": LORA}))
    await other.start()
    with pytest.raises(CheckpointError, match="of another model"):
        await other.load(tmp_path)
    await other.close()
    (tmp_path / "learner.pt").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        await learner.load(tmp_path)
    await learner.close()


async def test_export_of_the_quickstart_model_loads_in_transformers(tmp_path):
    config = RunConfig.model_validate({"env": {"id": "Test-v0"}, "model": {"device": "cpu"}})
    learner = Learner(config)
    await learner.start()
    published = await weights(learner)
    await learner.export(tmp_path / "model")
    await learner.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in published.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


async def test_recorded_logprobs_equal_those_of_the_learner(configure, tmp_path):
    """After an update, at a temperature other than 1: the recorded log-probabilities are the learner's own."""
    config = configure(rollout={"temperature": 0.8}, learner={"lr": 1e-2})
    learner, engine = Learner(config), HFEngine(config.model, config.engine, seed=0)
    await learner.start()
    await engine.start()
    try:

        async def sample(version: int) -> Batch:
            members = []
            for member in range(4):
                prompt = np.arange(1, 5 + member, dtype=np.int32)
                sampling = Sampling(max_tokens=12, temperature=0.8, seed=member)
                made = await engine.generate(prompt, sampling, session=f"{version}-{member}")
                turn = Turn(prompt, made.ids, made.logprobs, made.versions, reward=float(member))
                members.append(Trajectory(0, member, "test", 0, version, [turn]))
            return flatten([Group(0, 0, version, members)])

        for version in (1, 2):
            metrics = await learner.train(await sample(version - 1), version - 1)
            assert metrics["policy/kl_behaviour"] == pytest.approx(0, abs=1e-8)
            assert metrics["policy/ess"] == pytest.approx(1, abs=1e-5)
            staged = await learner.publish(version)
            await engine.pause("abort")
            assert await engine.update_weights(staged) == version
            await engine.resume()
    finally:
        await engine.close()
        await learner.close()


async def test_two_runs_of_one_seed_are_equal_bit_for_bit(configure, make_batch, tmp_path):
    results = []
    for _ in range(2):
        learner = Learner(configure(deterministic=True, model={"lora": LORA}, **RICH))
        await learner.start()
        assert torch.are_deterministic_algorithms_enabled()
        metrics = [await learner.train(make_batch(step), step) for step in range(2)]
        results.append((metrics, await weights(learner)))
        await learner.close()
    assert not torch.are_deterministic_algorithms_enabled()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


async def test_the_event_loop_stays_free_while_it_trains(configure, make_batch):
    learner = Learner(configure())
    await learner.start()
    ticks = 0
    training = asyncio.create_task(learner.train(make_batch(0, groups=8, members=6), 0))
    while not training.done():
        await asyncio.sleep(0.002)
        ticks += 1
    assert ticks > 3
    await learner.close()


async def test_life_cycle_errors(configure, make_batch, monkeypatch):
    learner = Learner(configure())
    with pytest.raises(LearnerError, match="call start"):
        await learner.train(make_batch(0), 0)
    await learner.close()
    await learner.close()
    with pytest.raises(LearnerError, match="closed"):
        await learner.start()


async def test_a_failed_write_is_reported(configure, tmp_path):
    learner = Learner(configure())
    await learner.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # to the libraries, what a full disk is
    try:
        for write in (learner.save(tmp_path / "save"), learner.export(tmp_path / "export")):
            with pytest.raises(RunDirectoryError, match=r"cannot be written .*: make room"):
                await write
        with pytest.raises(LearnerError, match="cannot be staged"):
            await learner.publish(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob("*.partial"))
    assert state_of(await learner.publish(1))
    await learner.close()
