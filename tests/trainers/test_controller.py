"""Complete runs with all real components, small enough to take seconds, under many settings."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentkit
from agentkit.config import RunConfig
from agentkit.envs.base import TextEnv
from agentkit.errors import CheckpointError, ConfigError, EnvFailureBudgetExceeded
from agentkit.records import iterate_trajectories
from agentkit.results import RunResult
from agentkit.run_directory import RunDirectory
from agentkit.trainers import controller
from agentkit.trainers.models.load import load_policy
from agentkit.types import Trajectory

SMALL: dict[str, Any] = {
    "steps": 2,
    "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
    "engine": {"max_context": 256, "max_batch": 8},
    "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6},
    "learner": {"lr": 1e-3},
    "evaluation": {"episodes": 2},
}


class Watcher:
    """A view that records its calls, and may act on them."""

    def __init__(self, on_event: Callable[[int | str], None] = lambda event: None) -> None:
        self.metrics: list[dict[str, float]] = []
        self.messages: list[str] = []
        self.on_event = on_event

    def start(self, config: RunConfig) -> None: ...

    def stop(self) -> None: ...

    def stage(self, name: str) -> None:
        self.on_event(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))
        self.on_event(step)

    def message(self, text: str) -> None:
        self.messages.append(text)


def small(directory: Path, **changes: Any) -> RunConfig:
    """``SMALL`` with ``changes``: a section is merged, anything else replaced."""
    merged = {
        key: {**SMALL[key], **value} if isinstance(SMALL.get(key), dict) else value for key, value in changes.items()
    }
    return RunConfig.model_validate({**SMALL, **merged, "dir": directory})


async def go(
    config: RunConfig, *, resume: bool = False, stop_after: int | str | None = None
) -> tuple[RunResult, Watcher]:
    stop = asyncio.Event()
    watcher = Watcher(lambda event: stop.set() if event == stop_after else None)
    directory = RunDirectory.resume(config.dir, config) if resume else RunDirectory.create(config)
    try:
        return await controller.run(config, directory, resume=resume, view=watcher, stop=stop), watcher
    finally:
        directory.release()


def episodes(directory: Path, ending: str | None = None) -> list[Trajectory]:
    return [trajectory for _, trajectory in iterate_trajectories(directory / "episodes.sqlite", ending=ending)]


def training_episodes(directory: Path) -> list[Trajectory]:
    return [
        trajectory for row, trajectory in iterate_trajectories(directory / "episodes.sqlite") if row.ending != "eval"
    ]


def evaluation_episodes(directory: Path) -> list[tuple[int, Trajectory]]:
    """Return the evaluation episodes, each with its step."""
    return [(row.step, played) for row, played in iterate_trajectories(directory / "episodes.sqlite", ending="eval")]


def recorded_events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def tokens(trajectory: Trajectory) -> tuple[Any, ...]:
    """Return all token data of an episode's record, for bitwise comparison."""
    return (
        trajectory.group_id,
        trajectory.member,
        trajectory.reward,
        *(
            (turn.prompt_ids.tolist(), turn.action_ids.tolist(), turn.action_logprobs.tobytes())
            for turn in trajectory.turns
        ),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout": {"async_ratio": 1.0, "extra_groups": 1, "extra_members": 1}},
        {"rollout": {"async_ratio": 0.5, "in_flight": "continue"}, "gate": {"policy": "drop"}},
        {"rollout": {"dynamic_sampling": True}, "learner": {"minibatches": 2, "epochs": 2}},
        {"algorithm": {"advantage": "gae"}, "critic": {"count": 2, "layers": 1, "hidden_size": 16}},
    ],
    ids=["sync", "async-redundant", "drop-continue", "dynamic-sampling", "critics"],
)
async def test_a_run_trains_its_steps_and_accounts_for_every_episode(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small(tmp_path / "run", **changes)
    summary, watcher = await go(config)
    assert summary.finished
    assert summary.steps == config.steps == len(watcher.metrics)
    for metrics in watcher.metrics:
        assert metrics["staleness/max"] <= np.ceil(config.rollout.async_ratio)
        assert np.isfinite(metrics["policy/loss"])
    played = Counter((t.group_id, t.member, t.attempt) for t in training_episodes(config.dir))
    assert set(played.values()) == {1}, "an episode has two endings"
    trained = episodes(config.dir, "trained")
    assert len(trained) == config.steps * config.rollout.groups * config.rollout.group_size
    per_group = Counter(trajectory.group_id for trajectory in trained)
    assert set(per_group.values()) == {config.rollout.group_size}
    lines = [json.loads(line) for line in (config.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "policy/loss" in line] == [1, 2]


async def test_a_step_without_signal_is_reported_with_the_reason(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=2)  # a model that was never trained
    _, watcher = await go(config)
    reason = "no answer was valid"
    assert any(text.startswith(f"step 1 had no signal to learn from: {reason}") for text in watcher.messages)
    assert "step 2 had no signal either" in watcher.messages
    events = recorded_events(config.dir)
    event, again = [event for event in events if event["event"] == "no_signal"]
    assert (event["step"], again["step"], again["reason"]) == (1, 2, event["reason"])
    assert event["reason"].startswith(reason)


async def test_recorded_logprobs_are_those_of_the_model_that_sampled(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=1)
    await go(config)
    model = load_policy(config.model, config.seed)
    for trajectory in episodes(config.dir, "trained"):
        ids = np.concatenate([part for turn in trajectory.turns for part in (turn.prompt_ids, turn.action_ids)])
        recorded = np.concatenate([turn.action_logprobs for turn in trajectory.turns])
        lengths = [(len(turn.prompt_ids), len(turn.action_ids)) for turn in trajectory.turns]
        chosen = np.concatenate([np.arange(prompt + action) >= prompt for prompt, action in lengths])
        with torch.inference_mode():
            logits = model(torch.tensor(ids[None].astype(np.int64))).logits[0, :-1].log_softmax(-1)
        scored = logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:].astype(np.int64))].numpy()
        np.testing.assert_allclose(scored[chosen[1:]], recorded, atol=2e-4)


async def test_deterministic_runs_are_equal_bit_for_bit_and_sharing_weights_changes_nothing(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {}, {"engine": {"share_weights": True}}]
    results = []
    for number, variant in enumerate(variants):
        config = small(tmp_path / str(number), deterministic=True, **variant)
        await go(config)
        weights = next((config.dir / "model").glob("*.safetensors")).read_bytes()
        results.append((sorted(map(tokens, episodes(config.dir, "trained"))), weights))
    assert results[0] == results[1] == results[2]
    config = small(tmp_path / "other", deterministic=True, seed=1)
    await go(config)
    assert sorted(map(tokens, episodes(config.dir, "trained"))) != results[0][0]


@pytest.mark.slow
async def test_a_stop_leaves_a_checkpoint_and_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    whole, parts = small(tmp_path / "whole", deterministic=True), small(tmp_path / "parts", deterministic=True)
    await go(whole)
    summary, _ = await go(parts, stop_after=1)
    assert (summary.finished, summary.steps) == (False, 1)
    (parts.dir / "weights").mkdir()  # earlier releases published weights through a file in it
    (parts.dir / "weights" / "policy.safetensors").write_bytes(b"of an earlier release")
    summary, watcher = await go(parts, resume=True)
    assert summary.finished
    assert (summary.steps, len(watcher.metrics)) == (2, 1)
    assert sorted(map(tokens, episodes(parts.dir, "trained"))) == sorted(map(tokens, episodes(whole.dir, "trained")))
    final = [next((config.dir / "model").glob("*.safetensors")).read_bytes() for config in (whole, parts)]
    assert final[0] == final[1]


async def test_a_run_with_adapters_saves_them_alone_and_the_whole_model_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"deterministic": True, "steps": 3, "model": {"lora": {"rank": 2}}}
    common |= {"checkpoint": {"every": 1, "keep": 10}, "imitation": {"episodes": 32, "batch_episodes": 16, "lr": 3e-3}}

    def contents(config: RunConfig) -> dict[str, bool]:
        """Return each checkpoint, and whether it holds the whole model."""
        folders = {path.name: {item.name for item in path.iterdir()} for path in config.dir.glob("checkpoints/*")}
        for path in config.dir.glob("checkpoints/*"):
            assert (path / "learner" / "adapter" / "adapter_model.safetensors").is_file()
            assert folders[path.name] - {"model"} == {"learner", "rollout.bin", "state.json"}
        return {name: "model" in items for name, items in sorted(folders.items())}

    def weights(config: RunConfig, name: str = "") -> dict[str, torch.Tensor]:
        model = config.model.model_copy(update={"path": str(config.dir / name), "lora": None})
        return load_policy(model, seed=99).state_dict()

    whole, parts = small(tmp_path / "whole", **common), small(tmp_path / "parts", **common)
    await go(whole)
    steps = [f"step-{step:06d}" for step in range(4)]
    assert contents(whole) == dict(zip(steps, [False, False, False, True], strict=True))
    assert (whole.dir / "model" / "config.json").is_file()
    final = weights(whole)
    merged = weights(whole, f"checkpoints/{steps[3]}/learner/adapter")
    assert all(torch.equal(value, final[name]) for name, value in merged.items())

    # A stopped run has an adapter, which is evaluated as a model is.
    await go(parts, stop_after=2)
    assert contents(parts) == dict.fromkeys(steps[:3], False)
    assert (parts.dir / "model" / "adapter_config.json").is_file()
    fresh = load_policy(parts.model, parts.seed).state_dict()
    assert any(not torch.equal(value, fresh[name]) for name, value in weights(parts).items())
    evaluated = await asyncio.to_thread(agentkit.evaluate, parts.dir, episodes=2)
    assert evaluated.episodes == 2

    # A run that dies while it exports the model does so when it is resumed.
    with monkeypatch.context() as patch:
        patch.setattr(controller.checkpoint, "add_model", lambda *arguments, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await go(parts, resume=True)
    assert (parts.dir / "checkpoints" / "partial-000003" / "model" / "config.json").is_file()
    await go(parts, resume=True)
    assert contents(parts) == contents(whole)
    resumed = weights(parts)
    assert all(torch.equal(value, final[name]) for name, value in resumed.items())

    # More steps continue from the adapter.
    more = small(parts.dir, **common | {"steps": 4})
    await go(more, resume=True)
    assert contents(more) == contents(whole) | {"step-000004": True}
    assert (more.dir / "model").resolve() == more.dir.resolve() / "checkpoints" / "step-000004" / "model"


async def test_a_stopped_run_with_adapters_is_finished_at_its_step(tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": {"lora": {"rank": 2}}}
    await go(small(tmp_path / "run", steps=5, **common), stop_after=1)
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    result, watcher = await go(small(tmp_path / "run", steps=1, **common), resume=True)
    assert result.finished
    assert (result.steps, watcher.metrics) == (1, [])
    assert (tmp_path / "run" / "model" / "config.json").is_file()


async def test_there_is_nothing_to_resume_without_a_checkpoint(tmp_path: Path) -> None:
    config = small(tmp_path / "run")
    RunDirectory.create(config).release()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await go(config, resume=True)


async def test_imitation_teaches_the_experts_words(tmp_path: Path) -> None:
    imitation = {"episodes": 256, "batch_episodes": 16, "lr": 3e-3, "schedule": "linear"}
    config = small(tmp_path / "run", steps=0, imitation=imitation, env={"num_tasks": 8})
    summary, _ = await go(config)
    assert summary.demonstrated_success == 1.0
    losses = [json.loads(line) for line in (config.dir / "metrics.jsonl").read_text().splitlines()]
    imitated = [(line["imitation/loss"], line["imitation/lr"]) for line in losses if "imitation/loss" in line]
    assert len(imitated) == 16
    assert imitated[-1][0] < 0.5 * imitated[0][0]
    # Up in ten updates, then down to zero just after the last one.
    assert [rate for _, rate in imitated] == pytest.approx(
        [3e-3 * (k + 1) / 10 for k in range(10)] + [3e-3 * (16 - k) / 6 for k in range(10, 16)]
    )


async def test_a_stop_in_imitation_keeps_what_was_imitated(tmp_path: Path) -> None:
    config = small(tmp_path / "run", imitation={"episodes": 64, "batch_episodes": 16, "lr": 3e-3})
    summary, _ = await go(config, stop_after="imitation")
    assert (summary.steps, summary.finished) == (0, False)
    updates = [line for line in (config.dir / "metrics.jsonl").read_text().splitlines() if "imitation/loss" in line]
    assert len(updates) == 1
    saved = config.model.model_copy(update={"path": str(config.dir)})
    imitated, fresh = (load_policy(model, config.seed).state_dict() for model in (saved, config.model))
    assert any(not torch.equal(imitated[name], fresh[name]) for name in fresh)
    resumed, _ = await go(config, resume=True)
    assert (resumed.steps, resumed.finished, resumed.demonstrated_success) == (2, True, 1.0)


async def test_evaluations_are_recorded_once_after_any_resume(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=2, evaluation={"episodes": 3, "every": 1}, checkpoint={"every": 1})
    await go(config)
    found = evaluation_episodes(config.dir)
    first = config.evaluation.first_seed
    expected = [(step, first + index) for step in (0, 1, 2) for index in range(3)]
    assert sorted((step, trajectory.seed) for step, trajectory in found) == expected
    for step, trajectory in found:
        assert trajectory.version_started == step
        assert trajectory.turns[0].versions[0][0] == step
        assert "frozen lake" in trajectory.system
    assert all(trajectory.seed < first for trajectory in training_episodes(config.dir))
    # The last evaluation is done again, and two more follow.
    longer = config.model_copy(update={"steps": 4})
    await go(longer, resume=True)
    expected += [(step, first + index) for step in (3, 4) for index in range(3)]
    found = evaluation_episodes(config.dir)
    assert sorted((step, trajectory.seed) for step, trajectory in found) == expected
    played = Counter((t.group_id, t.member, t.attempt) for t in training_episodes(config.dir))
    assert set(played.values()) == {1}


class Fragile(TextEnv):
    """One step to success; every third instance breaks."""

    instructions = "Say anything."
    max_turns = 1
    concurrency = "inline"
    made = itertools.count()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if next(self.made) % 3 == 0:
            raise RuntimeError("broken on arrival")
        return "go", {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "done", 1.0, True, False, {"success": True, "action_valid": True}


class FragileAndRandom(Fragile):
    """An environment whose episodes cannot be replayed."""

    deterministic = False


class Hopeless(Fragile):
    """An environment that never starts."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        raise RuntimeError("never works")


async def test_broken_environments_are_replaced_and_counted_but_never_scored(tmp_path: Path) -> None:
    agentkit.register("FragileAndRandom-v0", FragileAndRandom)
    config = small(tmp_path / "run", env={"id": "FragileAndRandom-v0", "kwargs": {}, "parser": "plain"})
    summary, watcher = await go(config)
    assert summary.success_after == 1.0
    assert sum(metrics["env/failures"] for metrics in watcher.metrics) > 0
    assert all(metrics["rollout/success"] == 1.0 for metrics in watcher.metrics)
    assert all("broken on arrival" in trajectory.reason for trajectory in episodes(config.dir, "voided"))
    evaluated = [trajectory for _, trajectory in evaluation_episodes(config.dir)]
    failed = [trajectory for trajectory in evaluated if trajectory.outcome == "voided"]
    assert len(evaluated) - len(failed) == 2 * config.evaluation.episodes
    assert all("broken on arrival" in trajectory.reason for trajectory in failed)


async def test_episodes_of_broken_environments_are_replayed_and_reported(tmp_path: Path) -> None:
    agentkit.register("Fragile-v0", Fragile)
    config = small(tmp_path / "run", env={"id": "Fragile-v0", "kwargs": {}, "parser": "plain"})
    summary, watcher = await go(config)
    assert summary.success_after == 1.0
    replays = sum(metrics["rollout/env_replays"] for metrics in watcher.metrics)
    assert replays == sum(metrics.get("rollout/env_replays/EnvCrashed", 0) for metrics in watcher.metrics) > 0
    assert sum(metrics["env/failures"] for metrics in watcher.metrics) == 0
    recovered = [event for event in recorded_events(config.dir) if event["event"] == "env_recovered"]
    assert recovered
    assert all("broken on arrival" in event["error"] for event in recovered)


async def test_an_environment_that_never_works_stops_the_run_with_its_own_error(tmp_path: Path) -> None:
    agentkit.register("Hopeless-v0", Hopeless)
    config = small(tmp_path / "run", env={"id": "Hopeless-v0", "kwargs": {}, "parser": "plain"})
    with pytest.raises(EnvFailureBudgetExceeded, match="never works"):
        await go(config)


async def test_imitating_an_environment_without_expert_is_refused(tmp_path: Path) -> None:
    agentkit.register("Fragile-v0", Fragile)
    config = small(tmp_path / "run", env={"id": "Fragile-v0", "kwargs": {}}, imitation={})
    with pytest.raises(ConfigError, match="has none"):
        await go(config)
