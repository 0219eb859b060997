"""A replayed episode continues in a fresh environment exactly as before, or it fails."""

import random

import pytest

from agentkit.envs.isolation.replay import Replay
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout


class Walk:
    """Adds each given number and a random one; raises ``EnvCrashed`` at the numbers in ``failures``."""

    def __init__(self, failures, drift=0.0):
        self.failures, self.drift = failures, drift

    async def reset(self, seed):
        self.rng, self.total = random.Random(seed), self.drift
        return self.total

    async def add(self, number):
        if self.failures and self.failures[0] == number:
            self.failures.pop(0)
            raise EnvCrashed("died")
        self.total += number + self.rng.random()
        return self.total


async def walk(numbers, failures=(), drifts=()):
    left, drift = list(failures), iter(drifts)

    async def renew(old):
        return Walk(left, next(drift, 0.0))

    replay = Replay(Walk(left), renew)
    replay.begin()
    seen = [await replay.do(lambda env: env.reset(3))]
    for number in numbers:
        seen.append(await replay.do(lambda env, number=number: env.add(number)))
    return seen, replay.replays


async def test_replayed_episode_is_the_same_episode():
    undisturbed, none = await walk(range(8))
    disturbed, twice = await walk(range(8), failures=[2, 7])
    assert disturbed == undisturbed
    assert none == 0
    assert twice == 2


async def test_call_that_fails_after_a_replay_is_not_retried():
    with pytest.raises(EnvCrashed, match="died"):
        await walk(range(8), failures=[4, 4])


async def test_diverging_replay_is_an_error():
    with pytest.raises(EnvCrashed, match="differs at call 0"):
        await walk(range(8), failures=[4], drifts=[1e-12])


@pytest.mark.parametrize(("error", "replayed"), [(EnvTimeout("slow"), 1), (EnvContractError("lies"), 0)])
async def test_only_crashes_and_timeouts_are_replayed(error, replayed):
    raised = []

    async def renew(env):
        return env

    async def call(env):
        if not raised:
            raised.append(error)
            raise error
        return "ok"

    replay = Replay(None, renew)
    if replayed:
        assert await replay.do(call) == "ok"
    else:
        with pytest.raises(EnvContractError):
            await replay.do(call)
    assert replay.replays == replayed
