"""The faults: how each is caused, and how long the disturbed episodes take to continue.

Invariant: the time of a case starts before the fault is caused. A fault is caused between two steps; the next step is
called at once, so that the whole recovery is part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from agentkit.config import EnvConfig
from agentkit.errors import EnvError
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.source import EnvSource
from benchmarks.faults.nemesis import ATTACKS, command
from benchmarks.recovery.episodes import Episode, Recorder, Script, others, recording
from benchmarks.recovery.figures import NO_GOAL, Goal, Row, Sample
from benchmarks.recovery.servers import Server, start_all, stop_all

READY_TIMEOUT = 120.0
"""Seconds until all spares and standbys are ready again."""
SPARE_PAUSE = 5.0
"""Seconds in which an environment with sandboxes of its own refills its spares."""
SLOW_RESET = 3.0
"""Seconds by which a reset is delayed."""
DETECTION = 5.0
"""Most seconds until a fault that shows only as silence is detected."""


@dataclass(frozen=True)
class Case:
    """One fault with one setting of redundancy."""

    fault: str
    redundancy: str
    settings: Mapping[str, Any]
    goal: Goal = NO_GOAL


SPARE = {"spares": 1, "standbys": 0}
STANDBY = {"spares": 1, "standbys": 1}
NEITHER = {"spares": 0, "standbys": 0}
KILLED = [
    Case("container killed", "a spare", SPARE, Goal(answered=1.0)),
    Case("container killed", "a standby", STANDBY, Goal(answered=0.1)),
    Case("container killed", "neither", NEITHER),
]
FROZEN = [
    Case("container paused", "a spare", SPARE, Goal(DETECTION, 1.0)),
    Case("container frozen", "a spare", SPARE, Goal(DETECTION, 1.0)),
    Case("container frozen", "a standby", STANDBY, Goal(DETECTION, 0.1)),
]
SLOW = [
    Case("slow reset", "not hedged", SPARE),
    Case("slow reset", "hedged after 0.5 s", {**SPARE, "hedge": 0.5}, Goal(answered=SLOW_RESET)),
]
LOST: list[tuple[Literal["refused", "silent"], Case]] = [
    ("refused", Case("host refuses connections", "spares", {}, Goal(answered=1.0))),
    ("refused", Case("host refuses connections", "standbys", STANDBY, Goal(answered=1.0))),
    ("silent", Case("host is silent", "spares", {}, Goal(answered=DETECTION))),
    ("silent", Case("host is silent", "standbys", STANDBY, Goal(answered=DETECTION))),
]
"""For ``spares``, there are as many as episodes."""
CASES = [*KILLED, *FROZEN, *SLOW, *(case for _, case in LOST)]
OWN = [
    Case("container killed", "a spare, retry", {}),
    Case("container paused", "a spare, retry", {}, Goal(detected=DETECTION)),
    Case("container frozen", "a spare, retry", {}, Goal(detected=DETECTION)),
]


def new_pool(env: Mapping[str, Any], **settings: Any) -> EnvPool:
    """Return environments as a run with these settings of ``env`` makes them, one in each sandbox."""
    return EnvPool(EnvSource.of(EnvConfig(**{**env, "sandbox_share": 1, **settings})))


async def container_row(
    env: Mapping[str, Any], case: Case, scripts: Sequence[Script], repeats: int, concurrency: int
) -> Row:
    """Disturb one episode after the other, while ``concurrency`` - 1 others are played."""
    samples, voided = [], 0
    pool = await asyncio.to_thread(lambda: new_pool(env, **{"sandbox": "docker", **case.settings}))
    cause = _CAUSES[case.fault]
    try:
        with recording() as recorder:
            async with others(pool, scripts, concurrency - 1) as played:
                for index in range(repeats):
                    episode = Episode(pool, scripts[index % len(scripts)])
                    try:
                        samples.append(await cause(episode, pool, recorder))
                        await episode.finish()
                    except EnvError as error:
                        voided += 1
                        print(f"{env['id']}, {case.fault}: {type(error).__name__}: {error}", flush=True)
                    finally:
                        episode.close()
    finally:
        await pool.close()
    return Row(env["id"], case.fault, case.redundancy, case.goal, tuple(samples), voided + played.voided)


async def _killed(episode: Episode, pool: EnvPool, recorder: Recorder) -> Sample:
    await episode.halfway()
    await _ready(pool, [episode])
    sandbox = episode.sandbox
    process = await _main_process(sandbox)
    begin = time.perf_counter()
    os.kill(process, signal.SIGKILL)  # `docker kill` does this after up to a tenth of a second
    await episode.step()
    return _sample(begin, time.perf_counter(), sandbox, recorder)


async def _stopped(kind: str, episode: Episode, pool: EnvPool, recorder: Recorder) -> Sample:
    await episode.halfway()
    await _ready(pool, [episode])
    sandbox, begin = episode.sandbox, time.perf_counter()
    await command(*ATTACKS[kind], sandbox)
    await episode.step()
    return _sample(begin, time.perf_counter(), sandbox, recorder)


async def _slow(episode: Episode, pool: EnvPool, recorder: Recorder) -> Sample:
    await episode.halfway()
    await _ready(pool, [episode])
    sandbox = episode.sandbox
    agent = psutil.Process(await _main_process(sandbox))
    processes = agent.children(recursive=True)
    _signal(processes, signal.SIGSTOP)
    timer = asyncio.get_running_loop().call_later(SLOW_RESET, _signal, processes, signal.SIGCONT)
    begin = time.perf_counter()
    try:
        await episode.reset()
        found = _sample(begin, time.perf_counter(), sandbox, recorder)
    finally:
        timer.cancel()
        _signal(processes, signal.SIGCONT)
    return found if found.by or episode.sandbox == sandbox else replace(found, by="the second attempt")


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def _main_process(sandbox: str) -> int:
    return int((await command("docker", "inspect", "--format={{.State.Pid}}", sandbox))[1])


_CAUSES: dict[str, Callable[[Episode, EnvPool, Recorder], Awaitable[Sample]]] = {
    "container killed": _killed,
    "container paused": partial(_stopped, "paused"),
    "container frozen": partial(_stopped, "frozen"),
    "slow reset": _slow,
}


async def host_row(
    env: Mapping[str, Any],
    how: Literal["refused", "silent"],
    case: Case,
    scripts: Sequence[Script],
    rounds: int,
    concurrency: int,
    directory: Path,
) -> Row:
    """Play ``concurrency`` episodes on two servers; let one of them fail, and continue all episodes."""
    samples: list[Sample] = []
    voided = 0
    servers = await asyncio.to_thread(start_all, 2, directory)
    try:
        settings = {"spares": concurrency, **case.settings, "servers": tuple(server.url for server in servers)}
        pool = await asyncio.to_thread(lambda: new_pool(env, sandbox="remote", **settings))
        try:
            for index in range(rounds):
                episodes = [Episode(pool, scripts[(index + k) % len(scripts)]) for k in range(concurrency)]
                try:
                    await asyncio.gather(*(episode.halfway() for episode in episodes))
                    await _ready(pool, episodes)
                    found, lost = await _lost(episodes, servers[index % 2], how)
                    samples += found
                    voided += lost
                finally:
                    for episode in episodes:
                        episode.close()
                await asyncio.to_thread(servers[index % 2].bring_back)
        finally:
            await pool.close()
    finally:
        await asyncio.to_thread(stop_all, servers)
    return Row(env["id"], case.fault, case.redundancy, case.goal, tuple(samples), voided)


async def _lost(
    episodes: Sequence[Episode], server: Server, how: Literal["refused", "silent"]
) -> tuple[list[Sample], int]:
    """Let a server fail. Return a sample of each disturbed episode that continues, and the number of the others."""
    disturbed = [(episode, episode.sandbox) for episode in episodes if episode.host == server.host]

    async def step(episode: Episode) -> float:
        await episode.step()
        return time.perf_counter()

    with recording() as recorder:
        begin = time.perf_counter()
        server.fail(how)
        ended = await asyncio.gather(*(step(episode) for episode, _ in disturbed), return_exceptions=True)
        samples, lost = [], 0
        for (episode, sandbox), end in zip(disturbed, ended, strict=True):
            if isinstance(end, float):
                samples.append(_sample(begin, end, sandbox, recorder))
            elif isinstance(end, EnvError):
                lost += 1
                print(f"{episode.seed}: {type(end).__name__}: {end}", flush=True)
            else:
                assert isinstance(end, BaseException)
                raise end
    rest = [episode.finish() for episode in episodes if episode.error is None]
    ended = await asyncio.gather(*rest, return_exceptions=True)
    return samples, lost + sum(isinstance(end, EnvError) for end in ended)


def _sample(begin: float, answered: float, sandbox: str, recorder: Recorder) -> Sample:
    timed = recorder.found.get(sandbox)
    if timed is None:
        return Sample(None, answered - begin)
    return Sample(max(0.0, timed.detected - begin), answered - begin, timed.recovery.by)


async def _ready(pool: EnvPool, episodes: Sequence[Episode]) -> None:
    """Wait until all spares exist, and all standbys of these episodes have caught up."""
    wanted, allocator, end = pool.source.redundancy, pool._shared_allocator(), time.monotonic() + READY_TIMEOUT
    while allocator.spares < wanted.spares or any(one.standbys < wanted.standbys for one in episodes):
        if time.monotonic() > end:
            raise TimeoutError(f"spares and standbys were not ready in {READY_TIMEOUT:g} s")
        await asyncio.sleep(0.05)


async def own_sandbox_row(env: Mapping[str, Any], case: Case, repeats: int) -> Row:
    """Disturb episodes of an environment that makes its sandboxes itself: each starts again from its seed."""
    samples, attempts = [], 0
    attack = ATTACKS[case.fault.split()[-1]]
    pool = EnvPool(EnvSource.of(EnvConfig(**{**env, **case.settings})))
    try:
        for seed in range(repeats):
            handle: Any = pool.acquire()
            await handle.reset(seed)
            await handle.act(["bash ls"])
            await asyncio.sleep(SPARE_PAUSE)
            begin = time.perf_counter()
            code, _ = await command(*attack, handle._env._lease.box.id)
            cause = ""
            while not cause:  # the signal may arrive after a command
                if code or time.perf_counter() - begin > READY_TIMEOUT:
                    raise TimeoutError(f"{' '.join(attack)} had no effect (exit code {code})")
                try:
                    await handle.act(["bash ls"])
                except EnvError as error:
                    cause = type(error).__name__
            detected = time.perf_counter() - begin
            pool.release(handle, failed=True)
            attempts += 1
            handle = pool.acquire(fresh=True)
            await handle.reset(seed)
            samples.append(Sample(detected, time.perf_counter() - begin, f"retry after {cause}"))
            pool.release(handle)
    finally:
        await pool.close()
    return Row(env["id"], case.fault, case.redundancy, case.goal, tuple(samples), attempts)
