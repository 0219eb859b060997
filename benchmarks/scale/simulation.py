"""Simulate many episodes in supervised sandboxes on many hosts that fail at random, in virtual time.

The pool, the scheduler, the supervisor, the client of the servers and the servers themselves are the real ones; only
the network (``cluster``) and the engines (``agentkit.sandboxes.testing``) are not. The simulation fails if

- an episode is lost, or ends with another result than without faults;
- a sandbox is left on a host at the end;
- a host ever has more sandboxes than its limit;
- the loads of hosts that have been usable for a while differ by more than ``BALANCE``;
- callers are not served in order of arrival.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from agentkit.errors import EngineUnavailable, SandboxLost
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.pool.slots import Slot
from agentkit.sandboxes.pool.waiters import WaitQueue
from agentkit.sandboxes.recovery.supervisor import SupervisedSandbox, Supervisor
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import loop_time
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.types import ExecResult
from benchmarks.scale.cluster import DISCONNECTED, Cluster, SimulatedHost

BALANCE = 0.35
"""Largest difference between the load of a host and the mean, as a share of the limit of a host."""
SETTLED = 15.0
"""Seconds after a change of its state from which the load of a host is compared."""
HOST_FAULTS = ("crash", "silent crash", "silent", "drain", "restart", "pressure")
ATTEMPTS = 20
"""Attempts of one action; each ends with the loss of a sandbox."""


@dataclass(frozen=True)
class Scenario:
    """Size and faults of a simulation. Times are in virtual seconds."""

    hosts: int = 5
    sandboxes: int = 200
    """Number of episodes at a time, and of sandboxes without spares."""
    spares: int = 10
    standbys: int = 0
    seconds: float = 120.0
    """Time until which episodes begin."""
    actions: int = 10
    """Actions of an episode."""
    think: float = 4.0
    """Mean time between two actions."""
    host_faults: float = 0.1
    """Host failures per second, in the whole cluster."""
    sandbox_faults: float = 1.0
    """Sandbox failures per second, in the whole cluster."""
    ping_interval: float = 2.0

    @property
    def limit(self) -> int:
        """Largest number of sandboxes of a host: half of the hosts can hold all."""
        return 2 * self.total // self.hosts + 1

    @property
    def total(self) -> int:
        return self.sandboxes * (1 + self.standbys) + self.spares


@dataclass
class Report:
    """What happened."""

    episodes: int = 0
    recoveries: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    in_use: int = 0
    """The most sandboxes in use at once."""
    most: int = 0
    """The most sandboxes at once."""
    imbalance: float = 0.0
    """Largest difference between the load of a host and the mean, as a share of the limit of a host."""
    slowest: float = 0.0
    """Longest time of one action with its recoveries, in virtual seconds."""
    virtual: float = 0.0
    seconds: float = 0.0
    """Processor time of the simulation."""


class _CheckedQueue(WaitQueue):
    def serve(self, slot: Slot) -> None:
        assert self._waiters[0][0] == min(ticket for ticket, _ in self._waiters), "a caller was served out of order"
        super().serve(slot)


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, seed: int, show: Callable[[str], object]) -> None:
        self.scenario, self.seed, self._show = scenario, seed, show
        self.rng = random.Random(seed)
        self.report = Report()
        self.cluster = Cluster(scenario.hosts, scenario.limit, seed)
        self._in_use = 0

    async def run(self) -> Report:
        """Run it to its end. Raises ``AssertionError`` if an invariant is violated."""
        scenario, report = self.scenario, self.report
        began = time.process_time()
        await self.cluster.start()
        backend = self.cluster.backend()
        await backend.start()
        pool = SandboxPool(
            SandboxSpec(ttl=None),
            backend,
            min_idle=scenario.spares,
            max_size=scenario.total,
            acquire_timeout=1200.0,
            health=HealthPolicy(ping_interval=scenario.ping_interval),
            seed=self.seed,
        )
        async with pool:
            if scenario.sandboxes <= 1000:  # the check visits all callers
                pool.scheduler.waiters = _CheckedQueue()
            supervisor = Supervisor(pool, recovery="replay", replicas=scenario.standbys, max_recoveries=ATTEMPTS)
            users = [asyncio.ensure_future(self._use(supervisor, number)) for number in range(scenario.sandboxes)]
            disturbing = [
                asyncio.ensure_future(work) for work in (self._fail_hosts(), self._fail_boxes(), self._watch())
            ]
            try:
                await asyncio.gather(*users, *disturbing)
            finally:
                for task in [*users, *disturbing]:
                    task.cancel()
                await asyncio.wait([*users, *disturbing])
        await backend.close()
        await asyncio.sleep(2 * DISCONNECTED)
        for host in self.cluster.hosts:
            assert not host.engine.boxes, f"{len(host.engine.boxes)} sandboxes are left on {host.name}"
        await self.cluster.stop()
        for host in self.cluster.hosts:
            assert host.most <= host.limit, f"{host.name} had {host.most} sandboxes, its limit is {host.limit}"
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left[:3]}"
        report.virtual, report.seconds = loop_time(), time.process_time() - began
        return report

    # Episodes.

    async def _use(self, supervisor: Supervisor, number: int) -> None:
        rng = random.Random(f"{self.seed}-{number}")
        await asyncio.sleep(rng.uniform(0, 5))
        while loop_time() < self.scenario.seconds:
            lines = [str(rng.randrange(10**6)) for _ in range(self.scenario.actions)]
            async with supervisor.run() as box:
                self._in_use += 1
                self.report.in_use = max(self.report.in_use, self._in_use)
                for line in lines:
                    await self._act(box, f"append log {line}")
                    await asyncio.sleep(rng.expovariate(1 / self.scenario.think))
                result = await self._act(box, "cat log")
                self._in_use -= 1
            assert result.stdout.split() == lines, f"episode of user {number}: {result.stdout!r} instead of {lines}"
            self.report.recoveries += box.recoveries
            self.report.episodes += 1

    async def _act(self, box: SupervisedSandbox, command: str) -> ExecResult:
        """Run a command; run it again after a loss, since a recovered sandbox is without its effects."""
        began = loop_time()
        for _ in range(ATTEMPTS):
            try:
                result = await box.exec(command, timeout=60)
            except (SandboxLost, EngineUnavailable):
                if box.failure is not None:
                    raise
                await asyncio.sleep(0.1)  # a host that does not answer counts as lost only after a while
                continue
            assert result.ok, result
            self.report.slowest = max(self.report.slowest, loop_time() - began)
            return result
        raise AssertionError(f"{command} was lost {ATTEMPTS} times")

    # Faults.

    async def _fail_hosts(self) -> None:
        """Fail hosts at random; at most a third at a time, and all are well again at the end.

        Each kind of failure occurs once before any occurs again.
        """
        tasks: set[asyncio.Task[None]] = set()
        kinds: list[str] = []
        while loop_time() < self.scenario.seconds:
            await asyncio.sleep(self.rng.expovariate(self.scenario.host_faults))
            well = [host for host in self.cluster.hosts if host.usable]
            if len(well) > 2 * self.scenario.hosts / 3:
                kinds = kinds or self.rng.sample(HOST_FAULTS, len(HOST_FAULTS))
                kind = kinds.pop()
                self.report.faults[f"host: {kind}"] += 1
                tasks.add(asyncio.ensure_future(self._fail_host(self.rng.choice(well), kind)))
        await asyncio.gather(*tasks)

    async def _fail_host(self, host: SimulatedHost, kind: str) -> None:
        seconds = self.rng.choice([1.0, 5.0, 30.0]) * self.rng.uniform(0.5, 2)
        if kind in ("crash", "silent crash"):
            host.crash(silent=kind == "silent crash")
            await asyncio.sleep(seconds)
            await host.start()
        elif kind == "silent":
            host.cut_off(True)
            await asyncio.sleep(seconds)
            host.cut_off(False)
        elif kind == "drain":
            host.drain(True)
            await asyncio.sleep(seconds)
            host.drain(False)
        elif kind == "restart":
            await host.stop()
            await asyncio.sleep(seconds)
            await host.start()
        else:
            host.press(0.95)
            await asyncio.sleep(seconds)
            host.press(0.1)

    async def _fail_boxes(self) -> None:
        while loop_time() < self.scenario.seconds:
            await asyncio.sleep(self.rng.expovariate(self.scenario.sandbox_faults))
            host = self.rng.choice(self.cluster.hosts)
            alive = [id for id, box in host.engine.boxes.items() if box.exit_code is None]
            if alive:
                kind = self.rng.choice(["die", "oom", "freeze", "mute", "cut"])
                self.report.faults[f"sandbox: {kind}"] += 1
                getattr(host.engine, kind)(self.rng.choice(alive))

    # Balance.

    async def _watch(self) -> None:
        while loop_time() < self.scenario.seconds:
            await asyncio.sleep(5.0)
            used = {host: len(host.engine.boxes) for host in self.cluster.hosts}
            self.report.most = max(self.report.most, sum(used.values()))
            self._show(f"{loop_time():.0f} s: {self._in_use} in use, {self.report}")
            settled = [number for host, number in used.items() if host.usable and loop_time() - host.since > SETTLED]
            if settled:
                mean = sum(settled) / len(settled)
                difference = max(abs(number - mean) for number in settled) / self.scenario.limit
                self.report.imbalance = max(self.report.imbalance, difference)
                assert difference <= BALANCE, f"at {loop_time():.0f} s the hosts have {sorted(settled)} sandboxes"


def simulate(scenario: Scenario, seed: int, show: Callable[[str], object] = lambda state: None) -> Report:
    """Run a scenario; an error names the seed. ``show`` gets the state every five virtual seconds."""
    try:
        return virtual_time.run(_run(scenario, seed, show), limit=100_000)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


async def _run(scenario: Scenario, seed: int, show: Callable[[str], object]) -> Report:
    return await Simulation(scenario, seed, show).run()
