"""A second call starts only after a rare delay and within the budget; the slower result is always discarded."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from agentkit.errors import ConfigError, EngineUnavailable
from agentkit.sandboxes.recovery.hedge import Hedge, first_healthy
from agentkit.sandboxes.testing import virtual_time


class Maker:
    """Creates numbered results that must be discarded, each after its duration."""

    def __init__(self, durations: Callable[[int], float], fails: Callable[[int], bool] = lambda n: False) -> None:
        self.durations, self.fails = durations, fails
        self.started = 0
        self.alive: set[int] = set()

    async def make(self) -> int:
        number = self.started
        self.started += 1
        await asyncio.sleep(self.durations(number))
        if self.fails(number):
            raise EngineUnavailable(f"no {number}")
        self.alive.add(number)
        return number

    async def discard(self, number: int) -> None:
        await asyncio.sleep(0.1)
        self.alive.remove(number)


def test_slow_call_is_hedged_and_discarded():
    async def scenario() -> None:
        maker = Maker(lambda number: 30.0 if number == 40 else 0.2)
        hedge, kept = Hedge(), []
        loop = asyncio.get_running_loop()
        for _ in range(60):
            start = loop.time()
            kept.append(await hedge.run("create", maker.make, discard=maker.discard))
            assert loop.time() - start < 1.0
        await hedge.close()
        assert maker.alive == set(kept)
        assert 40 not in kept
        assert (hedge.counts.hedged, hedge.counts.won) == (1, 1)

    virtual_time.run(scenario())


def test_result_of_a_call_that_ignores_cancellation_is_discarded():
    """Neither call can be cancelled: both succeed, and one result is discarded."""

    async def scenario() -> None:
        maker = Maker(lambda number: 3.0 if number == 0 else 2.0)
        hedge = Hedge(after=0.5, budget=1.0)

        async def stubborn() -> int:
            task = asyncio.ensure_future(maker.make())
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(task)
            return task.result()

        kept = await hedge.run("create", stubborn, discard=maker.discard)
        assert kept == 1
        await hedge.close()
        assert maker.alive == {1}

    virtual_time.run(scenario())


@pytest.mark.parametrize("wrong", [{"after": "p42"}, {"after": -1.0}, {"budget": 0.0}, {"budget": 1.5}])
def test_wrong_settings_are_errors(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Hedge(**wrong)


def test_commands_cannot_be_hedged():
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="cannot be hedged"):
            await Hedge().run("exec", Maker(lambda _: 0).make)  # pyright: ignore[reportArgumentType]

    virtual_time.run(scenario())


def test_error_only_if_all_calls_fail():
    async def scenario() -> None:
        hedge = Hedge(after=0.5, budget=1.0)
        maker = Maker(lambda number: 1.0, fails=lambda number: number % 2 == 0)
        assert await hedge.run("create", maker.make, discard=maker.discard) == 1
        maker.fails = lambda number: True
        with pytest.raises(EngineUnavailable, match="no 2"):
            await hedge.run("create", maker.make, discard=maker.discard)
        quick = Maker(lambda number: 0.1, fails=lambda number: True)
        with pytest.raises(EngineUnavailable):
            await hedge.run("create", quick.make)
        assert quick.started == 1  # failures are not hedged

    virtual_time.run(scenario())


@pytest.mark.parametrize("first_seed", range(0, 1000, 250))
def test_cancellation_leaves_nothing_and_keeps_the_budget(first_seed):
    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        maker = Maker(lambda _: rng.choice([0.1, 0.2, 0.2, 0.3, 5.0]), fails=lambda _: rng.random() < 0.1)
        hedge, kept = Hedge("p90"), set()

        async def caller() -> None:
            await asyncio.sleep(rng.random() * 10)
            with contextlib.suppress(EngineUnavailable):
                kept.add(await hedge.run("create", maker.make, discard=maker.discard))

        callers = [asyncio.ensure_future(caller()) for _ in range(40)]
        for one in rng.sample(callers, 10):
            asyncio.get_running_loop().call_later(rng.random() * 12, one.cancel)
        await asyncio.gather(*callers, return_exceptions=True)
        await hedge.close()
        assert maker.alive == kept, f"seed {seed}"
        assert hedge.counts.hedged <= 0.05 * hedge.counts.calls, f"seed {seed}"
        assert maker.started == hedge.counts.calls + hedge.counts.hedged, f"seed {seed}"

    for seed in range(first_seed, first_seed + 250):
        virtual_time.run(scenario(seed))


def test_first_healthy_replica_answers():
    async def scenario() -> None:
        cancelled = []

        async def answer(after: float, value: str | None) -> str:
            try:
                await asyncio.sleep(after)
            except asyncio.CancelledError:
                cancelled.append(value)
                raise
            if value is None:
                raise EngineUnavailable("dead")
            return value

        calls = [lambda: answer(0.1, None), lambda: answer(2.0, "slow"), lambda: answer(0.5, "healthy")]
        assert await first_healthy(calls) == "healthy"
        assert cancelled == ["slow"]
        with pytest.raises(EngineUnavailable):
            await first_healthy([lambda: answer(0.1, None)] * 2)

    virtual_time.run(scenario())
