"""Kill ``agentkit run`` at random moments and resume it until it finishes: nothing is lost, repeated or left behind.

The records prove it: each group ends once, the cursor of tasks has no gap, each step has its batch. The strongest case
is the deterministic one: with and without kills, the weights and the episodes are equal bit for bit. The moments change
daily (``seeds``); ``--all-seeds`` kills more often.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import runs
from requiring import require
from run_audit import audit, read_lines

from agentkit.config import RunConfig
from agentkit.config_io import load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
AGENTKIT = Path(sys.executable).with_name("agentkit")

CONFIG = """
env:
  id: {env}
  max_turns: 3
steps: {steps}
engine: {{max_batch: 16, max_context: 512, threads: 1}}
rollout: {{groups: 2, group_size: 2, max_tokens: 6, retries: 1, max_failure_share: 1.0}}
learner: {{threads: 1, lr: 1.0e-3}}
evaluation: {{episodes: 2}}
checkpoint: {{every: {every}}}
"""

RESTLESS = """
import os, random
from agentkit.envs.frozen_lake import FrozenLake

class RestlessLake(FrozenLake):
    \"\"\"Fails now and then, and not from its seed: no two attempts are alike.\"\"\"

    concurrency = "inline"
    chance = random.Random(os.urandom(8))

    def step(self, action):
        if self.chance.random() < 0.04:
            raise RuntimeError("the ice broke")
        return super().step(action)

class RestlessProcessLake(RestlessLake):
    concurrency = "process"
"""


class Case:
    """A run before it starts: its configuration, and separate folders."""

    def __init__(self, home: Path, env: str, steps: int, every: int, *overrides: str) -> None:
        self.home, self.run = home, home / "run"
        self.temporary = home / "tmp"
        self.temporary.mkdir(parents=True)
        self.file = home / "config.yaml"
        self.file.write_text(CONFIG.format(env=env, steps=steps, every=every))
        self.overrides = [f"dir={json.dumps(str(self.run))}", *overrides]
        self.mark = f"{os.getpid()}-{home}"
        site = home / "site"
        (site / "restless-1.0.dist-info").mkdir(parents=True)
        (site / "restless-1.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: restless\nVersion: 1.0\n"
        )
        names = "".join(f"{name}-v0 = restless:{name}\n" for name in ("RestlessLake", "RestlessProcessLake"))
        (site / "restless-1.0.dist-info" / "entry_points.txt").write_text(f"[agentkit.envs]\n{names}")
        (site / "restless.py").write_text(textwrap.dedent(RESTLESS))
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(home / "torch"),
            "OMP_NUM_THREADS": "1",
            "TEST_MARK": self.mark,
        }

    def command(self) -> list[str]:
        """Return the arguments that start the run, or resume it from its last checkpoint."""
        if list((self.run / "checkpoints").glob("step-*")):
            return ["run", "--resume", str(self.run)]
        shutil.rmtree(self.run, ignore_errors=True)
        return ["run", str(self.file), *self.overrides]

    def config(self) -> RunConfig:
        return load_config(str(self.file), self.overrides)

    def log(self) -> str:
        path = self.home / "log.txt"
        return path.read_text()[-6000:] if path.exists() else ""

    def survivors(self) -> list[psutil.Process]:
        """Return the processes that sessions of this run have started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


class Moment:
    """The moment of a kill: some steps into a session, at an event in the run directory, or after some time."""

    def __init__(self, run: Path, chance: random.Random) -> None:
        self.run = run
        self.steps = chance.choice([0, 0, 1, 3])
        self.what, self.seen = chance.choice(
            [
                ("at random", lambda: False),
                ("a checkpoint has begun", lambda: self.any("checkpoints/partial-*")),
                ("the learner has saved", lambda: self.any("checkpoints/partial-*/model/config.json")),
                ("a checkpoint is complete but for its name", lambda: self.any("checkpoints/partial-*/state.json")),
                ("a checkpoint has its name", lambda: self.checkpoints() != self.names),
                ("weights are being written", lambda: len(list((run / "weights").glob("*"))) > 1),
                ("metrics have grown", lambda: self.size("metrics.jsonl") > self.lines),
                ("records are being rolled back", lambda: self.size("events.jsonl") > self.events + 100),
            ]
        )
        self.delay = chance.choice([0.0, 0.002, 0.02])
        self.patience = chance.uniform(0.05, 1.5)
        self.events, self.goal = self.size("events.jsonl"), self.last_step() + self.steps
        self.started = False
        self.armed: float | None = None

    @property
    def name(self) -> str:
        return f"{self.what}, {self.steps} step(s) on"

    def last_step(self) -> int:
        """Return the step of the last complete line of the metrics."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.run.glob("checkpoints/step-*")}

    def any(self, pattern: str) -> bool:
        return next(self.run.glob(pattern), None) is not None

    def size(self, name: str) -> int:
        path = self.run / name
        return path.stat().st_size if path.exists() else 0

    def has_come(self) -> bool:
        if self.armed is None:
            self.started = self.started or self.size("events.jsonl") > self.events
            if self.started and self.last_step() >= self.goal:
                self.armed = time.monotonic()
                self.names, self.lines = self.checkpoints(), self.size("metrics.jsonl")
            return False
        if self.seen() or time.monotonic() - self.armed > self.patience:
            time.sleep(self.delay)
            return True
        return False


def strike(pid: int, moment: Moment, number: int, victim: Callable[[int], int] = lambda pid: pid) -> bool:
    """Wait for the moment and send the signal to the ``victim`` of ``pid``; return False if ``pid`` ended first."""
    deadline = time.monotonic() + 400
    while runs(pid):
        assert time.monotonic() < deadline, "the session did not reach the moment"
        if moment.has_come():
            if not runs(pid):
                break
            os.kill(victim(pid), number)
            return True
        time.sleep(0.0005)
    return False


def wait_until_alone(case: Case, allowed: int | None = None) -> None:
    deadline = time.monotonic() + 30
    while left := [process for process in case.survivors() if process.pid != allowed]:
        assert time.monotonic() < deadline, f"these outlived the run: {[process.cmdline() for process in left]}"
        time.sleep(0.02)


class Zygote:
    """A process that starts sessions by forking, which saves the imports."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run_zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=case.environment,
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def session(self, command: list[str], kill: Callable[[int], Any] = lambda pid: None) -> int:
        """Run one session until it ends or ``kill`` ends it; return the exit code."""
        assert self.process.stdin is not None
        print(json.dumps([command, str(self.case.home / "log.txt")]), file=self.process.stdin, flush=True)
        kill(int(self.answer()))
        code = int(self.answer())
        wait_until_alone(self.case, self.process.pid)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Callable[[Case], Zygote]]:
    made: list[Zygote] = []

    def make(case: Case) -> Zygote:
        made.append(Zygote(case))
        return made[-1]

    yield make
    for zygote in made:
        zygote.close()


def kill_and_resume(zygote: Zygote, kills: int, seed: int) -> list[str]:
    """Kill ``kills`` sessions, then let one finish; return a line for each kill."""
    case, chance = zygote.case, random.Random(seed)
    story = []
    for _ in range(kills):
        command = case.command()
        moment = Moment(case.run, chance)
        number = chance.choice([signal.SIGKILL] * 4 + [signal.SIGINT])
        struck = []
        code = zygote.session(command, lambda pid: struck.append(strike(pid, moment, number)))  # noqa: B023
        story.append(f"{signal.Signals(number).name} when {moment.name}, in step {moment.last_step() + 1}: exit {code}")
        assert code in (0, -number), f"{story}\n{case.log()}"
        if not struck[0]:
            break
    print("\n".join(["", *story]))
    assert zygote.session(case.command()) == 0, case.log()
    return story


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Steps of a run, and the number of its kills."""
    return (40, 12) if request.config.option.all_seeds else (16, 5)


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (1, ["rollout.async_ratio=1", "rollout.extra_groups=1", "rollout.extra_members=1", "checkpoint.every=2"]),
        (
            2,
            [
                "rollout.async_ratio=1.5",
                "rollout.in_flight=continue",
                "gate.policy=drop",
                "rollout.dynamic_sampling=true",
            ],
        ),
    ],
)
def test_every_group_ends_once_if_the_run_is_killed_repeatedly(
    tmp_path: Path,
    zygote: Callable[[Case], Zygote],
    extent: tuple[int, int],
    seeds_start: int,
    seed: int,
    overrides: list[str],
) -> None:
    steps, kills = extent
    case = Case(tmp_path / "case", "RestlessLake-v0", steps, 1, *overrides)
    story = kill_and_resume(zygote(case), kills, seeds_start + seed)
    print(audit(case.run, case.config()))
    events = read_lines(case.run / "events.jsonl")
    resumed = [event for event in events if event["event"] == "start" and event["resume"]]
    assert len(resumed) <= len([event for event in events if event["event"] == "rollback"]) + len(story)
    assert events[-1]["event"] == "end"
    assert events[-1]["finished"]
    assert not list(case.temporary.iterdir())


def test_a_deterministic_run_is_the_same_bit_for_bit_if_it_is_killed_repeatedly(
    tmp_path: Path, zygote: Callable[[Case], Zygote], extent: tuple[int, int], seeds_start: int
) -> None:
    steps, most = extent
    outcomes = []
    for name, kills in (("calm", 0), ("killed", most)):
        case = Case(tmp_path / name, "FrozenLake-v1", steps, 1, "deterministic=true", "rollout.temperature=1.0")
        kill_and_resume(zygote(case), kills, seeds_start + 3)
        audit(case.run, case.config())
        with sqlite3.connect(case.run / "episodes.sqlite") as database:
            columns = "step, ending, group_id, member, seed, reward, tokens"
            query = f"select {columns} from episodes where step <= {steps} order by 1, 2, 3, 4"
            episodes = database.execute(query).fetchall()
        database.close()
        losses = [line.get("policy/grad_norm") for line in read_lines(case.run / "metrics.jsonl")]
        outcomes.append((episodes, losses, (case.run / "model" / "model.safetensors").read_bytes()))
    calm, killed = outcomes
    assert killed[0] == calm[0]
    assert killed[1] == calm[1]
    assert killed[2] == calm[2]


def test_a_run_in_a_cluster_leaves_nothing_behind_if_a_process_dies(tmp_path: Path) -> None:
    """Use the console command, with learner, engine and environments in separate processes. The learner is restored."""
    require("ray", "pip install 'agentkit-rl[ray]'")
    overrides = ("rollout.async_ratio=1", "cluster={}", "learner.ranks=2")
    case = Case(tmp_path / "case", "RestlessProcessLake-v0", 8, 1, *overrides)
    chance = random.Random(4)
    codes = {"controller": -signal.SIGKILL, "learner rank 1": 0, None: 0}
    for victim, expected in codes.items():
        command = case.command()
        moment = Moment(case.run, chance)
        if victim != "controller":
            moment.goal = moment.last_step() + 1  # all roles have started
        with (case.home / "log.txt").open("ab") as log:
            session = subprocess.Popen([AGENTKIT, *command], stdout=log, stderr=log, env=case.environment)
        try:
            struck = victim is not None and strike(session.pid, moment, signal.SIGKILL, partial(find, case, victim))
            code = session.wait(600)
        finally:
            session.kill()
            session.wait()
        assert code == (expected if struck else 0), case.log()
        if struck and victim != "controller":
            assert re.search(rf"{victim} \(pid \d+ on [\d.]+\) has ended", case.log())
        wait_until_alone(case)
        assert not list(case.temporary.iterdir()), "temporary files outlived the run"
    print(audit(case.run, case.config()))


def find(case: Case, name: str, controller: int) -> int:
    """Return the process id of a role. Rank 0 listens at the port where ranks meet; rank 1 is connected to it."""
    from agentkit.trainers.cluster.host import PORTS

    if name == "controller":
        return controller
    found = {}
    for process in case.survivors():
        with contextlib.suppress(psutil.Error):
            if "ray::Host" not in " ".join(process.cmdline()[:1]):
                continue
            connections = process.net_connections("tcp")
            listens = any(c.status == psutil.CONN_LISTEN and c.laddr.port in PORTS for c in connections)
            meets = any(c.raddr and c.raddr.port in PORTS for c in connections)
            found["learner rank 0" if listens else "learner rank 1" if meets else "engine"] = process.pid
    assert len(found) == 3, found
    return found[name]
