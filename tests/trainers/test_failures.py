"""Faults in runs on three simulated nodes: the run goes on, no group is lost or repeated, no version is mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import gone, runs
from requiring import require
from run_audit import audit, read_lines
from transformers import Qwen3ForCausalLM

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.config_io import dump_config
from agentkit.errors import LearnerError, RoleError
from agentkit.results import RunResult
from agentkit.run_directory import RunDirectory
from agentkit.trainers import controller
from agentkit.trainers.models.quickstart import quickstart_config, quickstart_tokenizer

# A busy machine needs minutes to start Ray and the processes of its actors.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PATIENCE_S = 600.0
STORE_BYTES = 80_000_000
"""Object store of each node: the smallest that Ray accepts."""


class Nodes:
    """A cluster whose first node is that of this process. A rank needs the resource ``rank``, an engine ``engine``."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self.add(rank=1.0, engine=1.0)
        self.address = str(self._cluster.address)

    def add(self, **resources: float) -> Any:
        """Start a node; it has this process' environment."""
        return self._cluster.add_node(
            num_cpus=0, resources=resources, object_store_memory=STORE_BYTES, include_dashboard=False
        )

    def remove(self, node: Any) -> None:
        """Kill all processes of a node."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    require("ray", "pip install 'agentkit-rl[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        # On a busy machine, a node that lives may be silent for seconds.
        patch.setenv("RAY_health_check_timeout_ms", "10000")
        patch.setenv("RAY_health_check_failure_threshold", "5")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the actors
        from agentkit.trainers.cluster import ray_cluster  # sets the variables that Ray reads

        made = Nodes()
        try:
            with ray_cluster.joined_cluster(made.address):
                yield made
        finally:
            made.close()


def configuration(directory: Path, **changes: Any) -> RunConfig:
    """The settings of a small run with ``changes``: a section is merged, anything else replaced."""
    small: dict[str, Any] = {
        "steps": 100_000,
        "cluster": {"address": "auto"},
        "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
        "engine": {"max_context": 256, "max_batch": 8, "threads": 1, "resources": {"CPU": 0.0, "engine": 1.0}},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6, "async_ratio": 1.0},
        "learner": {"lr": 1e-3, "threads": 1, "resources": {"CPU": 0.0, "rank": 1.0}},
        "evaluation": {"episodes": 2},
        "checkpoint": {"every": 3},
    }
    merged = {
        key: {**small.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return RunConfig.model_validate({**small, **merged, "dir": directory})


class Run:
    """A run in progress, and its view."""

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        self.config = config
        self.directory = RunDirectory.resume(config.dir, config) if resume else RunDirectory.create(config)
        self.stopping = asyncio.Event()
        self.finished_steps = 0
        self.messages: list[str] = []
        running = controller.run(config, self.directory, resume=resume, view=self, stop=self.stopping)
        self.task = asyncio.ensure_future(running)

    def start(self, config: RunConfig) -> None: ...

    def stage(self, name: str) -> None: ...

    def stop(self) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.finished_steps += 1

    def message(self, text: str) -> None:
        self.messages.append(text)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.config.dir / "events.jsonl") if event["event"] == kind]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.task.done():
                self.task.result()
            assert not self.task.done(), f"the run ended before {what}"
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s; {self.messages}"
            await asyncio.sleep(0.02)

    async def steps(self, number: int) -> None:
        goal = self.finished_steps + number
        await self.until(lambda: self.finished_steps >= goal, f"{number} more steps")

    async def event(self, kind: str, count: int = 1) -> dict[str, Any]:
        await self.until(lambda: len(self.events(kind)) >= count, f"{kind} number {count}")
        return self.events(kind)[count - 1]

    async def result(self) -> RunResult:
        try:
            return await asyncio.wait_for(self.task, PATIENCE_S)
        finally:
            self.directory.release()


def pids(name: str) -> list[int]:
    """The processes of a role of this process' run, by rank."""
    from agentkit.trainers.cluster.ranks import RemoteRole

    [role] = [made for made in gc.get_objects() if type(made) is RemoteRole and made._name == name and made.alive()]
    return role.pids


def hosts() -> set[int]:
    """The actors on all nodes."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::Host" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


async def test_a_run_survives_the_loss_of_engines_ranks_and_nodes(nodes: Nodes, tmp_path: Path) -> None:
    ranks, engines = nodes.add(rank=1.0), nodes.add(engine=1.0)
    run = Run(configuration(tmp_path / "run", engine={"replicas": 2}, learner={"ranks": 2}))
    times: dict[str, float] = {}

    def recovered(what: str, since: float, event: dict[str, Any]) -> None:
        times[what] = event["time"] - since

    await run.steps(4)

    began = time.time()
    os.kill(pids("engine 1")[0], signal.SIGKILL)
    lost = await run.event("engine_lost")
    assert (lost["engine"], "SIGKILL" in lost["text"] or "unexpectedly" in lost["text"]) == (1, True)
    recovered("engine killed: noticed", began, lost)
    recovered("engine killed: replaced", began, await run.event("engine_joined"))

    await run.steps(1)
    frozen, began = pids("engine 0")[0], time.time()
    os.kill(frozen, signal.SIGSTOP)
    lost = await run.event("engine_lost", 2)
    assert "hangs" in lost["text"]
    recovered("engine frozen: noticed", began, lost)
    recovered("engine frozen: replaced", began, await run.event("engine_joined", 2))
    assert gone(frozen)

    await run.steps(4)
    first, second = pids("learner")
    os.kill(second, signal.SIGSTOP)  # so that the other rank waits in a collective
    await run.until(lambda: "training" in progress.describe(), "the collective")
    await asyncio.sleep(2)
    began = time.time()
    with contextlib.suppress(ProcessLookupError):  # on a slow machine, the run has given the frozen rank up
        os.kill(second, signal.SIGKILL)
    lost = await run.event("learner_lost")
    # On a busy machine, the error of the other rank in the collective may be known first.
    assert "learner rank" in lost["text"]
    recovered("rank killed: noticed", began, lost)
    recovered("rank killed: restored", began, await run.event("learner_restored"))
    assert not runs(first)

    await run.steps(4)
    began = time.time()
    nodes.remove(engines)
    waiting = await run.event("engine_waiting")
    recovered("node of an engine removed: noticed", began, await run.event("engine_lost", 3))
    await run.steps(2)
    assert len(run.events("engine_joined")) == 2, "nothing has room for the engine"
    began = time.time()
    engines = nodes.add(engine=1.0)
    joined = await run.event("engine_joined", 3)
    recovered("node added: replaced", began, joined)
    assert (waiting["engine"], waiting["engines_left"]) == (joined["engine"], 1)

    await run.steps(4)
    began = time.time()
    nodes.remove(ranks)
    recovered("node of a rank removed: noticed", began, await run.event("learner_lost", 2))
    await asyncio.sleep(3)
    assert len(run.events("learner_restored")) == 1, "nothing has room for the rank"
    began = time.time()
    ranks = nodes.add(rank=1.0)
    recovered("node added: restored", began, await run.event("learner_restored", 2))

    await run.steps(4)
    run.stopping.set()
    stopped = await run.result()
    assert (stopped.ending, len(run.events("failed"))) == ("interrupted", 0)
    for restored in run.events("learner_restored"):
        assert restored["step"] % 3 == 0, "the step of a checkpoint"
    assert any("the learner was lost: learner rank" in message for message in run.messages)

    for node in (ranks, engines):
        nodes.remove(node)
    alone = configuration(tmp_path / "run", steps=stopped.steps + 3, engine={"replicas": 1}, learner={"ranks": 1})
    finished = await Run(alone, resume=True).result()
    assert finished.ending == "finished"
    print(audit(alone.dir, alone), *(f"{what}: {seconds:.1f} s" for what, seconds in times.items()), sep="\n")


async def test_a_killed_controller_leaves_nothing_and_resumes_with_other_numbers(nodes: Nodes, tmp_path: Path) -> None:
    engines = nodes.add(engine=1.0)
    config = configuration(tmp_path / "run", engine={"replicas": 2}, cluster={"address": nodes.address})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    before = hosts()
    with (tmp_path / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "agentkit", "run", str(file)]
        driver = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(list((config.dir / "checkpoints").glob("step-*"))) < 2:
            assert driver.poll() is None, (tmp_path / "log.txt").read_text()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        actors = hosts() - before
        assert len(actors) == 3
    finally:
        killed = time.monotonic()
        driver.kill()
        driver.wait()
    for pid in actors:
        assert gone(pid, within=max(0.0, killed + 30 - time.monotonic()))
    print(f"all actors ended {time.monotonic() - killed:.1f} s after their controller")

    nodes.remove(engines)
    ranks = nodes.add(rank=1.0)
    done = int(max((config.dir / "checkpoints").glob("step-*")).name.removeprefix("step-"))
    other = configuration(config.dir, steps=done + 3, learner={"ranks": 2})
    finished = await Run(other, resume=True).result()
    assert finished.ending == "finished"
    print(audit(other.dir, other))
    nodes.remove(ranks)


async def test_restarts_of_the_learner_are_bounded(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is in imitation, which begins again."""
    monkeypatch.setattr(controller, "RESTARTS", 1)
    imitation = {"episodes": 64, "batch_episodes": 2, "epochs": 4}
    run = Run(configuration(tmp_path / "run", imitation=imitation))
    metrics = tmp_path / "run" / "metrics.jsonl"
    await run.until(lambda: len(read_lines(metrics)) > 2, "imitation")
    os.kill(pids("learner")[0], signal.SIGKILL)
    restored = await run.event("learner_restored")
    assert restored["step"] == 0
    await run.steps(1)
    updates = [line["imitation/updates"] for line in read_lines(metrics) if "imitation/updates" in line]
    assert updates == list(range(1, 129)), "the updates of the lost learner are removed"
    os.kill(pids("learner")[0], signal.SIGKILL)
    with pytest.raises(RoleError, match=r"started again 1 times within 600 s and was lost again: learner \(pid"):
        await run.result()
    assert [len(run.events(kind)) for kind in ("learner_lost", "learner_restored", "failed")] == [2, 1, 1]
    assert not hosts()


@pytest.mark.parametrize("disk", ["free", "full"])
async def test_weights_that_exceed_the_object_store_need_the_disk(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    large = quickstart_config()
    large.update({"hidden_size": 768, "intermediate_size": 3072})
    model = Qwen3ForCausalLM(large)
    assert model.num_parameters() * 4 > STORE_BYTES
    model.save_pretrained(tmp_path / "model")
    quickstart_tokenizer().save_pretrained(tmp_path / "model")
    if disk == "full":  # Ray refuses to use it
        monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    small = nodes.add(small_rank=1.0)
    config = configuration(
        tmp_path / "run",
        steps=2,
        model={"path": str(tmp_path / "model")},
        learner={"resources": {"CPU": 0.0, "small_rank": 1.0}},
    )
    run = Run(config)
    try:
        if disk == "full":
            with pytest.raises(LearnerError, match="the object store has no room for the weights of version 0"):
                await run.result()
        else:
            assert (await run.result()).ending == "finished"
            audit(config.dir, config)
    finally:
        nodes.remove(small)


async def test_an_error_of_the_learner_is_no_loss(nodes: Nodes, tmp_path: Path) -> None:
    run = Run(configuration(tmp_path / "run", learner={"attention": "no_such_kernel"}))
    with pytest.raises(LearnerError, match="no_such_kernel"):
        await run.result()
    assert not run.events("learner_lost")
