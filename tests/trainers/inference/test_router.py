"""Every request to the router gets one answer, of one version, also when engines are lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import EngineError, RoleError, WeightsUnavailable
from agentkit.sandboxes.testing.virtual_time import run
from agentkit.trainers.inference.base import EngineStats, Generation, InferenceEngine, PauseMode, Sampling
from agentkit.trainers.inference.replicas import PLACE_S, Replicas
from agentkit.trainers.inference.router import Replica, Router
from agentkit.trainers.weights.base import Weights, WeightsInPlace


def expected(prompt: Sequence[int], seed: int, version: int) -> list[int]:
    """The tokens that every engine answers: a pure function of prompt, seed and version."""
    return np.random.default_rng([seed, version, *prompt]).integers(0, 1000, 1 + seed % 5).tolist()


class NoMemory(EngineError):
    pass


class Engine:
    """A scripted engine: one token a second for all its requests; it can die, freeze and refuse weights."""

    def __init__(self) -> None:
        self.version = 0
        self.paused: PauseMode | None = None
        self.dead: Exception | None = None
        self.frozen = False
        self.refuse: Exception | None = None
        self.wrong = 0
        self.corrupt = False
        self.asleep = False
        self.running: set[asyncio.Event] = set()
        self.sessions: list[str] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.tokens = 0
        self.closed = False
        self.changed = asyncio.Event()

    def change(self, **state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()

    async def _answering(self) -> None:
        while self.frozen and not self.closed:
            await self.changed.wait()
        if self.closed:
            raise EngineError("the engine is closed", fatal=True)
        if self.dead is not None:
            raise self.dead

    async def start(self) -> None:
        await self._answering()

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        await self._answering()
        assert sampling.seed is not None
        prompt = np.asarray(prompt_ids).tolist()
        if len(prompt) > 100:
            raise EngineError("the prompt is too long")
        self.sessions.append(session)
        self.prompts.append(prompt)
        abort = asyncio.Event()
        self.running.add(abort)
        ids: list[int] = []
        versions: list[tuple[int, int]] = []
        try:
            while True:
                await asyncio.sleep(1)
                await self._answering()
                while self.paused and not abort.is_set():
                    await self.changed.wait()
                    await self._answering()
                if abort.is_set():
                    return Generation(np.array(ids, np.int32), np.zeros(len(ids), np.float32), tuple(versions), "abort")
                tokens = expected(prompt, sampling.seed, self.version)
                if len(ids) >= len(tokens):
                    break
                ids.append(tokens[len(ids)])
                self.tokens += 1
                if versions and versions[-1][0] == self.version:
                    versions[-1] = (self.version, versions[-1][1] + 1)
                else:
                    versions.append((self.version, 1))
        finally:
            self.running.discard(abort)
        return Generation(np.array(ids, np.int32), np.zeros(len(ids), np.float32), tuple(versions), "stop")

    async def abort(self, session: str) -> None:
        await self._answering()
        self.aborted.append(session)

    async def pause(self, mode: PauseMode) -> None:
        await self._answering()
        await asyncio.sleep(0.1)
        await self._answering()
        if mode == "abort":
            for abort in self.running:
                abort.set()
        self.change(paused=mode)

    async def resume(self) -> None:
        await self._answering()
        self.change(paused=None)

    async def update_weights(self, weights: Weights) -> int:
        await self._answering()
        assert self.paused
        await asyncio.sleep(0.5)
        await self._answering()
        if self.refuse is not None:
            raise self.refuse
        self.version = weights.version + self.wrong
        self.asleep = False
        return self.version

    async def sleep(self) -> None:
        await self._answering()
        assert self.paused
        self.asleep = True

    async def checksum(self) -> str:
        await self._answering()
        return f"{self.version}{' corrupt' * self.corrupt}"

    async def stats(self) -> EngineStats:
        await self._answering()
        return EngineStats(self.tokens, 0, 0, float(self.tokens), len(self.running), 0, request_s=float(self.tokens))

    async def close(self) -> None:
        self.change(closed=True)


async def router_of(number: int, **options: Any) -> tuple[Router, list[Engine]]:
    router = Router(number, **options)
    engines = [Engine() for _ in range(number)]
    for index, engine in enumerate(engines):
        await router.join(Replica(index, engine))
    return router, engines


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function in virtual time."""

    def of_arguments(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    of_arguments.__name__ = test.__name__
    return of_arguments


async def ask(router: InferenceEngine, session: str, seed: int, prompt: Sequence[int] = (1, 2, 3)) -> Generation:
    return await router.generate(prompt, Sampling(16, seed=seed), session=session)


async def change_weights(router: InferenceEngine, version: int, mode: PauseMode = "abort") -> None:
    await router.pause(mode)
    assert await router.update_weights(WeightsInPlace(version)) == version
    await router.resume()


def check(got: Generation, seed: int, prompt: Sequence[int] = (1, 2, 3)) -> None:
    assert got.finish_reason == "stop"
    ids: list[int] = []
    for version, count in got.versions:
        ids += expected(prompt, seed, version)[len(ids) : len(ids) + count]
    assert got.ids.tolist() == ids
    assert len(ids) == 1 + seed % 5


@virtual
async def test_turns_of_a_session_go_to_one_engine() -> None:
    router, engines = await router_of(3)
    for turn in range(4):
        await asyncio.gather(*(ask(router, f"s{k}", turn, [k] * (turn + 1)) for k in range(30)))
    homes = [set(engine.sessions) for engine in engines]
    assert sum(map(len, homes)) == 30, "a session moved"
    assert [len(home) for home in homes] == [10, 10, 10]


@virtual
async def test_a_group_shares_its_engine_and_groups_spread() -> None:
    router, engines = await router_of(2)
    await asyncio.gather(*(ask(router, f"{group}.{k}", k, [group] * 50) for group in range(6) for k in range(8)))
    groups = [{session.split(".")[0] for session in engine.sessions} for engine in engines]
    assert groups[0].isdisjoint(groups[1])
    assert [len(group) for group in groups] == [3, 3]


@virtual
async def test_a_crowded_home_is_left() -> None:
    router, engines = await router_of(2, slack=40)
    await ask(router, "moves", 1)
    crowd = [asyncio.ensure_future(ask(router, f"crowd-{k}", 4)) for k in range(6)]  # one prompt, so one home at first
    await asyncio.sleep(0)
    home = next(engine for engine in engines if "moves" in engine.sessions)
    promised = [replica.promised for replica in router.live]
    assert max(promised) - min(promised) <= 40 + 19
    assert home.sessions.count("moves") == 1
    await asyncio.gather(*crowd)
    assert [replica.promised for replica in router.live] == [0, 0]


@virtual
async def test_a_lost_engine_costs_no_request() -> None:
    for error in (RoleError("killed"), EngineError("dead", fatal=True)):
        router, engines = await router_of(3)
        asks = [asyncio.ensure_future(ask(router, f"s{k}", k, [k])) for k in range(40)]
        await asyncio.sleep(1.5)
        engines[1].change(dead=error)
        for k, got in enumerate(await asyncio.gather(*asks)):
            check(got, k, [k])
        assert [replica.index for replica in router.live] == [0, 2]
        assert [replica.promised for replica in router.live] == [0, 0]


@virtual
async def test_an_error_of_a_request_is_the_callers() -> None:
    router, _ = await router_of(2)
    with pytest.raises(EngineError, match="too long"):
        await ask(router, "s", 1, [1] * 101)
    assert len(router.live) == 2
    check(await ask(router, "s", 1), 1)


@virtual
async def test_requests_wait_for_an_engine_and_end_with_an_abort() -> None:
    router, engines = await router_of(1)
    router.expel(router.live[0], EngineError("dead", fatal=True))
    held = asyncio.ensure_future(ask(router, "s", 3))
    dropped = asyncio.ensure_future(ask(router, "dropped", 3))
    await asyncio.sleep(1)
    assert (await router.stats()).waiting == 2
    await router.abort("dropped")
    assert (await dropped).finish_reason == "abort"
    assert not held.done()
    await router.join(Replica(0, engines[0]))
    check(await held, 3)


@virtual
async def test_cancelled_calls_leave_nothing_behind() -> None:
    router, engines = await router_of(2)
    calls = [asyncio.ensure_future(ask(router, f"s{k}", 4)) for k in range(8)]
    await asyncio.sleep(1.5)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0)
    assert [replica.promised for replica in router.live] == [0, 0]
    assert not any(engine.running for engine in engines)
    for k in range(8):
        await router.abort(f"s{k}")
    assert [replica.sessions for replica in router.live] == [0, 0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count the cancellations of a task")
@virtual
async def test_the_loss_of_an_engine_and_cancellations_are_told_apart() -> None:
    for caller_first in (False, True):
        router, engines = await router_of(2)
        call = asyncio.ensure_future(ask(router, "s", 4))
        await asyncio.sleep(1.5)
        home = next(replica for replica in router.live if replica.requests)
        if caller_first:
            call.cancel()
        router.expel(home, RoleError("killed"))
        if not caller_first:
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not any(engine.running for engine in engines)
        assert [replica.promised for replica in router.live] == [0]
    router, engines = await router_of(2)

    async def cancelled(*args: Any, **kwargs: Any) -> Generation:
        raise asyncio.CancelledError

    for engine in engines[:1]:
        engine.generate = cancelled  # type: ignore[method-assign]
    check(await ask(router, "s", 4), 4)
    assert [replica.index for replica in router.live] == [1]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@virtual
async def test_nothing_passes_a_closed_router() -> None:
    router, engines = await router_of(2)
    running = [asyncio.ensure_future(ask(router, f"s{k}", 4, [k])) for k in range(4)]
    await asyncio.sleep(1.5)
    await router.pause("abort")
    assert [got.finish_reason for got in await asyncio.gather(*running)] == ["abort"] * 4
    held = asyncio.ensure_future(ask(router, "s0", 4))
    await asyncio.sleep(5)
    assert not any(engine.running for engine in engines)
    assert await router.update_weights(WeightsInPlace(7)) == 7
    assert not held.done()
    await router.resume()
    got = await held
    check(got, 4)
    assert got.versions == ((7, 5),)
    with pytest.raises(EngineError, match="pause"):
        await router.update_weights(WeightsInPlace(8))


@virtual
async def test_an_engine_with_other_weights_is_expelled() -> None:
    for fault in ({"refuse": EngineError("no memory")}, {"wrong": 1}, {"dead": RoleError("killed")}):
        router, engines = await router_of(3)
        asks = [asyncio.ensure_future(ask(router, f"s{k}", 4, [k])) for k in range(9)]
        await asyncio.sleep(1.5)
        engines[2].change(**fault)
        await change_weights(router, 1, "keep")
        assert [replica.index for replica in router.live] == [0, 1]
        for k, got in enumerate(await asyncio.gather(*asks)):
            check(got, 4, [k])
            assert got.versions[-1][0] == 1


@virtual
async def test_engines_whose_weights_differ_from_most_are_expelled() -> None:
    router, engines = await router_of(3, verify=True)
    engines[1].change(corrupt=True)
    await change_weights(router, 1)
    assert [replica.index for replica in router.live] == [0, 2]
    late = Engine()
    late.change(corrupt=True)
    with pytest.raises(EngineError, match="other weights"):
        await router.join(Replica(1, late))
    await router.join(Replica(1, Engine()))
    for engine in engines:
        engine.change(corrupt=engine is engines[0])
    await change_weights(router, 2)
    assert [replica.index for replica in router.live] == [1, 2]
    engines[2].change(corrupt=True)
    await change_weights(router, 3)  # one against one: neither is known to be right
    assert not router.live


@virtual
async def test_all_engines_sleep_until_an_update() -> None:
    router, engines = await router_of(2)
    await router.pause("abort")
    await router.sleep()
    assert all(engine.asleep for engine in engines)
    await change_weights(router, 1)
    assert not any(engine.asleep for engine in engines)


@dataclass(frozen=True)
class Sent(WeightsInPlace):
    """Weights that arrive while the learner sends them to as many engines as update."""

    sent: ClassVar[bool] = True
    engines: int = 0

    def for_engines(self, number: int) -> Weights:
        return dataclasses.replace(self, engines=number)


@virtual
async def test_the_learner_sends_to_the_engines_that_update() -> None:
    sends: list[tuple[int, int]] = []

    async def send(weights: Sent) -> int:
        sends.append((weights.version, weights.engines))
        await asyncio.sleep(0.5)
        return weights.engines

    router, engines = await router_of(2, send=send)
    await router.pause("abort")
    await router.update_weights(Sent(1))
    await router.resume()
    engines[0].change(dead=RoleError("killed"))
    await router.pause("abort")
    await router.update_weights(Sent(2))
    await router.resume()
    await router.join(Replica(0, Engine()))
    assert sends == [(1, 2), (2, 1), (2, 1)]
    assert [replica.version for replica in router.live] == [2, 2]


@virtual
async def test_a_learner_that_is_lost_while_it_sends_is_the_error() -> None:
    async def send(weights: Sent) -> int:
        raise RoleError("the learner died")

    router, engines = await router_of(2, send=send)
    await router.pause("abort")
    engines[1].change(frozen=True)
    with pytest.raises(RoleError, match="the learner died"):
        await router.update_weights(Sent(1))


@virtual
async def test_a_replacement_waits_as_long_as_the_learner_trains() -> None:
    fleet = Fleet()
    async with fleet.replicas(1) as router:
        await change_weights(router, 1)
        fleet.made[0].change(dead=RoleError("killed"))
        while len(fleet.made) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fleet.made[1].refuse = WeightsUnavailable("the learner trains")
        await asyncio.sleep(300)
        fleet.made[1].refuse = None
        await change_weights(router, 2)
        await asyncio.sleep(10)
        assert fleet.kinds() == ["engine_lost", "engine_joined"]
        assert [replica.version for replica in router.live] == [2]


@virtual
async def test_weights_that_all_refuse_change_nothing() -> None:
    router, engines = await router_of(2)
    for engine in engines:
        engine.refuse = EngineError("a tensor is missing")
    await router.pause("abort")
    with pytest.raises(EngineError, match="missing"):
        await router.update_weights(WeightsInPlace(1))
    await router.resume()
    assert len(router.live) == 2
    assert (await ask(router, "s", 1)).versions == ((0, 2),)


@virtual
async def test_an_engine_joins_with_the_served_version_even_during_an_update() -> None:
    for delay in np.arange(0, 1.5, 0.05):
        router, _ = await router_of(1)
        await change_weights(router, 1)
        late, change = Engine(), asyncio.ensure_future(change_weights(router, 2))
        # A second engine at index 0 stands for the next one of a lost index.
        router.expel(router.live[0], EngineError("dead", fatal=True))
        await asyncio.sleep(float(delay))
        await router.join(Replica(0, late))
        await change
        got = await ask(router, "s", 2)
        assert got.versions == ((2, 3),)
        assert late.version == router.live[0].version == 2


@virtual
async def test_counters_never_go_back() -> None:
    router, engines = await router_of(2)
    seen = 0
    for k in range(6):
        await asyncio.gather(*(ask(router, f"{k}.{j}", 4, [j]) for j in range(6)))
        stats = await router.stats()
        if k == 3:
            engines[0].change(dead=RoleError("killed"))
            stats = await router.stats()
        assert stats.generated_tokens >= seen
        assert stats.generated_tokens == sum(engine.generated_tokens for engine in stats.engines)
        assert stats.busy_s == sum(engine.busy_s for engine in stats.engines) / 2
        assert stats.request_s == stats.generated_tokens
        seen = stats.generated_tokens
    stats = await router.stats()
    assert [engine.restarts for engine in stats.engines] == [1, 0]
    assert seen == 6 * 6 * 5


@virtual
async def test_deterministic_homes_ignore_the_load() -> None:
    sessions = [f"{k}" for k in range(40)]
    placements = []
    for order in (sessions, sessions[::-1]):
        router, engines = await router_of(3, deterministic=True)
        await asyncio.gather(*(ask(router, session, 1) for session in order))
        placements.append([set(engine.sessions) for engine in engines])
    assert placements[0] == placements[1]
    assert all(placements[0])
    await router.abort(next(iter(placements[1][2])))
    assert [len(engine.aborted) for engine in engines] == [0, 0, 1]


@virtual
async def test_deterministic_requests_are_not_computed_elsewhere() -> None:
    router, engines = await router_of(2, deterministic=True)
    asks = [asyncio.ensure_future(ask(router, f"{k}", 4)) for k in range(10)]
    await asyncio.sleep(1.5)
    engines[0].change(dead=RoleError("killed"))
    assert all(isinstance(got, RoleError) for got in await asyncio.gather(*asks, return_exceptions=True))
    with pytest.raises(RoleError):
        await ask(router, "later", 1)


class Fleet:
    """Makes the engines of ``Replicas`` and keeps them, with the events."""

    def __init__(self, kind: type[Engine] = Engine, *, fail_from: int = 10**9) -> None:
        self.kind = kind
        self.made: list[Engine] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.fail_from = fail_from

    async def make(self, index: int) -> Engine:
        if len(self.made) >= self.fail_from:
            raise RoleError("no machine is free")
        self.made.append(self.kind())
        return self.made[-1]

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def replicas(self, size: int, **options: Any) -> Replicas:
        return Replicas(self.make, size, on_event=self.event, **options)


@virtual
async def test_a_lost_engine_is_replaced_with_the_served_version() -> None:
    fleet = Fleet()
    async with fleet.replicas(2) as router:
        await change_weights(router, 3)
        fleet.made[0].change(dead=RoleError("killed"))
        await asyncio.sleep(30)  # no request: the heartbeat finds it
        assert fleet.made[0].closed
        assert [engine.version for engine in fleet.made[1:]] == [3, 3]
        assert fleet.kinds() == ["engine_lost", "engine_joined"]
        assert fleet.events[0][1]["text"] == "killed"
        assert 0 < fleet.events[1][1]["seconds"] < 10
        assert {replica.index for replica in router.live} == {0, 1}
    assert all(engine.closed for engine in fleet.made)


@virtual
async def test_a_replacement_waits_for_weights_that_are_gone() -> None:
    """Between the publication of a version and the update to it, the weights of the served one cannot be loaded."""
    fleet = Fleet()
    async with fleet.replicas(1) as router:
        await change_weights(router, 1)
        fleet.made[0].change(dead=RoleError("killed"))
        answer = asyncio.ensure_future(ask(router, "s", 4))
        while len(fleet.made) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fleet.made[1].refuse = EngineError("the weights of version 1 are gone")
        await asyncio.sleep(10)
        assert not answer.done()
        fleet.made[1].refuse = None
        await change_weights(router, 2)
        assert (await answer).versions == ((2, 5),)
    assert len(fleet.made) == 2


@virtual
async def test_a_frozen_engine_is_replaced() -> None:
    fleet = Fleet()
    async with fleet.replicas(2, heartbeat_s=1, silence_s=5) as router:
        asks = [asyncio.ensure_future(ask(router, f"s{k}", k, [k])) for k in range(20)]
        await asyncio.sleep(1.5)
        fleet.made[1].change(frozen=True)
        for k, got in enumerate(await asyncio.wait_for(asyncio.gather(*asks), 20)):
            check(got, k, [k])
        assert "hangs" in fleet.events[0][1]["text"]


@virtual
async def test_an_engine_that_hangs_is_killed_and_one_that_fails_is_closed() -> None:
    killed: list[Engine] = []

    class Killable(Engine):
        async def kill(self) -> None:
            killed.append(self)
            self.change(closed=True)

    fleet = Fleet(Killable)
    async with fleet.replicas(2) as router:
        fleet.made[0].change(dead=EngineError("its core ended", fatal=True))
        fleet.made[1].change(frozen=True)
        await asyncio.sleep(20)
        assert killed == [fleet.made[1]]
        assert all(engine.closed for engine in fleet.made[:2])
        assert len(router.live) == 2


@virtual
async def test_an_engine_without_a_place_waits_for_one() -> None:
    """Meanwhile the others serve; the wait is no attempt to start it."""
    fleet, lost = Fleet(), set[int]()

    async def has_place(index: int) -> bool:
        return index not in lost

    async with fleet.replicas(2, has_place=has_place) as router:
        for _ in range(3):
            lost.add(1)
            fleet.made[-1].change(dead=RoleError("killed"))
            await asyncio.sleep(500)
            check(await ask(router, "s", 4), 4)
            assert [replica.index for replica in router.live] == [0]
            lost.clear()
            await asyncio.sleep(30)
            assert [replica.index for replica in router.live] == [0, 1]
    assert fleet.kinds() == ["engine_lost", "engine_waiting", "engine_joined"] * 3
    assert fleet.events[1][1]["engines_left"] == 1


@virtual
async def test_too_few_engines_with_a_place_end_the_run() -> None:
    fleet = Fleet()

    async def has_place(index: int) -> bool:
        return index not in lost

    lost: set[int] = set()
    async with fleet.replicas(2, minimum=2, has_place=has_place) as router:
        lost.add(0)
        fleet.made[0].change(dead=RoleError("its node is gone"))
        await asyncio.sleep(PLACE_S / 2)
        check(await ask(router, "s", 4), 4)
        await asyncio.sleep(PLACE_S)
        with pytest.raises(EngineError, match=r"1 of 2 engines are left.*No node had room.*its node is gone"):
            await ask(router, "after", 1)


@virtual
async def test_an_engine_that_freezes_in_an_update_does_not_stop_it() -> None:
    fleet = Fleet()
    async with fleet.replicas(2, heartbeat_s=1, silence_s=5) as router:
        await router.pause("abort")
        fleet.made[0].change(frozen=True)
        assert await asyncio.wait_for(router.update_weights(WeightsInPlace(1)), 20) == 1
        await router.resume()
        await asyncio.sleep(10)
        assert [replica.version for replica in router.live] == [1, 1]


async def keep_asking(router: InferenceEngine, session: str) -> None:
    while True:
        await ask(router, session, 4)


@virtual
async def test_too_few_engines_end_the_run_with_the_cause() -> None:
    for size, minimum, lost in ((1, 1, 1), (3, 2, 2)):
        fleet = Fleet(fail_from=size)
        async with fleet.replicas(size, minimum=minimum) as router:
            for engine in fleet.made[: lost - 1]:
                engine.change(dead=RoleError("killed"))
            await asyncio.sleep(60)
            check(await ask(router, "before", 1), 1)
            fleet.made[lost - 1].change(dead=RoleError("killed"))
            results = await asyncio.gather(*(keep_asking(router, f"s{k}") for k in range(9)), return_exceptions=True)
            assert all(isinstance(result, EngineError) for result in results)
            with pytest.raises(EngineError, match=f"min_replicas={minimum}.*no machine is free"):
                await ask(router, "after", 1)
        assert fleet.kinds().count("engine_abandoned") == lost


@virtual
async def test_restarts_are_bounded() -> None:
    fleet = Fleet()

    async with fleet.replicas(1) as router:
        answer = asyncio.ensure_future(ask(router, "s", 4))
        while not answer.done():  # every engine dies under it
            await asyncio.sleep(1.5)
            fleet.made[-1].change(dead=RoleError("killed"))
        with pytest.raises(EngineError, match="3 times"):
            await answer
    assert len(fleet.made) == 4
    assert all(engine.closed for engine in fleet.made)


@virtual
async def test_an_engine_that_does_not_start_at_first_is_an_error() -> None:
    fleet = Fleet(fail_from=1)
    with pytest.raises(RoleError, match="no machine"):
        async with fleet.replicas(2):
            pass
    assert all(engine.closed for engine in fleet.made)


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4), in_flight=st.sampled_from(["abort", "keep"]))
@settings(max_examples=30, deadline=None)
def test_any_schedule_of_faults_keeps_every_request_and_mixes_no_versions(
    seed: int, size: int, in_flight: PauseMode
) -> None:
    run(_schedule(random.Random(seed), size, in_flight))


async def _schedule(rng: random.Random, size: int, in_flight: PauseMode) -> None:
    """Sessions, updates and faults at random times; each turn is right, and of a version that was served meanwhile."""
    fleet, version, ended = Fleet(), 0, False

    async def session(router: InferenceEngine, number: int) -> None:
        history = [number]
        for turn in range(rng.randint(1, 6)):
            turn_seed = rng.randrange(1000)
            await asyncio.sleep(rng.uniform(0, 4))
            began = version
            while True:
                got = await ask(router, f"s{number}", turn_seed, history)
                if got.finish_reason != "abort":
                    break
            check(got, turn_seed, history)
            versions = [served for served, _ in got.versions]
            assert versions == sorted(set(versions))
            assert began <= versions[0]
            assert versions[-1] <= version + 1, "a version that is not served yet"
            if in_flight == "abort":
                assert len(versions) == 1
            history += [*got.ids.tolist()[:10], turn]
        await router.abort(f"s{number}")

    async def faults() -> None:
        while not ended:
            await asyncio.sleep(rng.uniform(20, 60))
            engine = rng.choice(fleet.made)
            fault = rng.choice(["dead", "frozen", "wrong", "refuse"])
            value = {"dead": RoleError("killed"), "frozen": True, "wrong": 1, "refuse": NoMemory()}
            if fault in ("dead", "frozen") or len(fleet.made) > 1:
                engine.change(**{fault: value[fault]})
            await asyncio.sleep(30)
            engine.change(refuse=None, wrong=0)

    async def updates(router: InferenceEngine) -> None:
        nonlocal version
        while not ended:
            await asyncio.sleep(rng.uniform(1, 8))
            await router.pause(in_flight)
            with contextlib.suppress(NoMemory):  # all refuse: nothing changes
                version = await router.update_weights(WeightsInPlace(version + 1))
            await router.resume()

    async with fleet.replicas(size, heartbeat_s=1, silence_s=3, restarts=1000) as router:
        others = [asyncio.ensure_future(work) for work in (faults(), updates(router))]
        before = EngineStats(0, 0, 0, 0.0, 0, 0)
        sessions = asyncio.gather(*(session(router, number) for number in range(20)))
        while not sessions.done():
            await asyncio.wait((sessions, *others), timeout=5, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                assert not other.done() or other.result() is None
            stats = await router.stats()
            assert stats.generated_tokens >= before.generated_tokens
            before = stats
        await sessions
        ended = True
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert all(replica.promised == replica.sessions == 0 for replica in router.live)
    assert all(engine.closed for engine in fleet.made)
    assert not any(engine.running for engine in fleet.made)
