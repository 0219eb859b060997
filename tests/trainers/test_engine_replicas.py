"""Several engines as actors: one that is killed or frozen costs no request and no episode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentkit.config import RunConfig
from agentkit.records import iterate_trajectories
from agentkit.run_directory import RunDirectory
from agentkit.trainers import controller, roles
from agentkit.trainers.cluster import place, reserve
from agentkit.trainers.inference.base import Generation, InferenceEngine, Sampling
from agentkit.trainers.inference.replicas import Replicas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def configuration(directory: Path, **engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "dir": directory,
            "cluster": {},
            "steps": 1000,
            "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
            "engine": {"max_context": 256, "max_batch": 8, "threads": 1, **engine},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6},
            "learner": {"lr": 1e-3, "threads": 1},
            "evaluation": {"episodes": 2},
        }
    )


@pytest.fixture
def actors(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The latest actor of each name."""
    latest: dict[str, Any] = {}

    async def recorded(*args: Any, name: str, **kwargs: Any) -> Any:
        latest[name] = await place(*args, name=name, **kwargs)
        return latest[name]

    monkeypatch.setattr(roles, "place", recorded)
    return latest


async def play(engine: InferenceEngine) -> list[Generation]:
    """Generate the answers of 32 episodes of two turns."""

    async def episode(number: int) -> list[Generation]:
        history = np.random.default_rng(number // 4).integers(3, 300, 40).tolist()
        answers = []
        for turn in range(2):
            answers.append(await engine.generate(history, Sampling(60, seed=number + 100 * turn), session=str(number)))
            history += answers[-1].ids.tolist()
        return answers

    return [answer for episode in await asyncio.gather(*map(episode, range(32))) for answer in episode]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
async def test_an_engine_lost_in_generation_costs_no_request(
    tmp_path: Path, actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    config = configuration(tmp_path, replicas=2)
    async with roles.start_engine(configuration(tmp_path)) as single:
        expected = await play(single)
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(roles, "Replicas", partial(Replicas, heartbeat_s=1, silence_s=15))
    async with (
        reserve(config) as slots,
        roles.start_engine(config, lambda kind, **fields: events.append((kind, fields)), slots["engine"]) as engine,
    ):
        playing = asyncio.ensure_future(play(engine))
        while (await engine.stats()).engines[1].generated_tokens < 100:  # noqa: ASYNC110 (engines have no event)
            await asyncio.sleep(0.01)
        (pid,) = actors["engine 1"].pids
        os.kill(pid, fault)
        for got, one in zip(await asyncio.wait_for(playing, 300), expected, strict=True):
            np.testing.assert_array_equal(got.ids, one.ids)
            np.testing.assert_allclose(got.logprobs, one.logprobs, atol=1e-4)
            assert (got.versions, got.finish_reason) == (one.versions, one.finish_reason)
        lost = next(fields for kind, fields in events if kind == "engine_lost")
        assert ("has ended" if fault == signal.SIGKILL else "hangs") in lost["text"]
        while events[-1][0] != "engine_joined":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        placed = [fields["pid"] for kind, fields in events if kind == "role_placed" and fields["index"] == 1]
        assert placed == [pid, *actors["engine 1"].pids]
        assert placed[0] != placed[1]
        assert [kind for kind, _ in events if kind != "role_placed"] == ["engine_lost", "engine_joined"]


class View:
    """Kills engine 1 after the first step, and stops the run two steps after its replacement joined."""

    def __init__(self, directory: Path, stop: asyncio.Event, actors: dict[str, Any]) -> None:
        self.events, self.stop, self.actors = directory / "events.jsonl", stop, actors
        self.metrics: list[dict[str, float]] = []
        self.joined_before: int | None = None

    def start(self, config: RunConfig) -> None: ...

    def stage(self, name: str) -> None: ...

    def message(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))
        if step == 1:
            os.kill(self.actors["engine 1"].pids[0], signal.SIGKILL)  # episodes of the next step are being played
        if self.joined_before is None and "engine_joined" in self.events.read_text():
            self.joined_before = step
        if self.joined_before is not None and step >= self.joined_before + 2:
            self.stop.set()


@pytest.mark.parametrize("async_ratio", [0.0, 1.0])
async def test_a_run_loses_an_engine_and_nothing_else(
    tmp_path: Path, actors: dict[str, Any], async_ratio: float
) -> None:
    config = configuration(tmp_path / "run", replicas=2)
    rollout = config.rollout.model_copy(update={"async_ratio": async_ratio})
    config = config.model_copy(update={"rollout": rollout})
    stop, directory = asyncio.Event(), RunDirectory.create(config)
    view: Any = View(config.dir, stop, actors)
    try:
        result = await controller.run(config, directory, resume=False, view=view, stop=stop)
    finally:
        directory.release()
    assert result.ending == "interrupted"
    rows = [
        (row, trajectory)
        for row, trajectory in iterate_trajectories(config.dir / "episodes.sqlite")
        if row.ending != "eval"
    ]
    endings = Counter(row.ending for row, _ in rows)
    assert endings["voided"] == 0
    assert endings["trained"] == 4 * result.steps
    assert set(Counter((t.group_id, t.member, t.attempt) for _, t in rows).values()) == {1}, "two endings"
    for row, trajectory in rows:
        versions = [version for turn in trajectory.turns for version, _ in turn.versions]
        assert versions == sorted(versions)
        assert all(len(turn.versions) == 1 for turn in trajectory.turns)
        assert trajectory.version_started <= min(versions, default=trajectory.version_started)
        if row.ending == "trained":
            assert row.step - 1 - async_ratio <= min(versions)
            assert max(versions) <= row.step - 1
    events = [json.loads(line) for line in (config.dir / "events.jsonl").read_text().splitlines()]
    lost, joined = (next(e for e in events if e["event"] == kind) for kind in ("engine_lost", "engine_joined"))
    assert lost["engine"] == joined["engine"] == 1
    assert "has ended" in lost["text"]
    last = view.metrics[-1]
    assert last["engine/1/restarts"] == 1
    assert last["engine/0/version"] == last["engine/1/version"] == result.steps
    assert sum(last[f"engine/{index}/tokens_per_s"] for index in range(2)) == pytest.approx(last["engine/tokens_per_s"])
