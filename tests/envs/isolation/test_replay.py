"""A replayed episode continues in a fresh environment exactly as before, or it fails."""

import random

import pytest

from agentkit.envs.isolation.replay import SupervisedEnv
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout, UnexplainedCrash
from agentkit.sandboxes.testing import virtual_time


class Walk:
    """Adds each given number and a random one; raises the error of a number in ``failures``, once for each entry."""

    host = "here"
    sandbox_id = failure = ""

    def __init__(self, failures, drift=0.0):
        self.failures, self.drift = failures, drift
        self.releases = 0

    def on_failure(self, callback):
        pass

    def release(self, *, discard=False):
        self.releases += 1

    async def reset(self, seed):
        self.rng, self.total = random.Random(seed), self.drift
        return self.total

    async def add(self, number):
        if self.failures and self.failures[0][0] == number:
            raise self.failures.pop(0)[1]
        self.total += number + self.rng.random()
        return self.total


class SupervisedWalk(SupervisedEnv[Walk]):
    def __init__(self, failures=(), drifts=()):
        super().__init__(replays=True)
        self.left, self.drifts = list(failures), iter([0.0, *drifts])
        self.made = []

    async def acquire(self, apart):
        self.made.append(Walk(self.left, next(self.drifts, 0.0)))
        return self.made[-1], "new"


async def _walk(numbers, failures=(), drifts=()):
    env = SupervisedWalk(failures, drifts)
    try:
        await env.begin()
        seen = [await env.act("reset", lambda env: env.reset(3))]
        for number in numbers:
            seen.append(await env.act("step", lambda env, number=number: env.add(number)))
        return seen, env.recoveries
    finally:
        await env.stop()
        assert all(one.releases >= 1 for one in env.made)


def walk(numbers, failures=(), drifts=()):
    return virtual_time.run(_walk(numbers, failures, drifts))


DIED = EnvCrashed("died")


@pytest.mark.parametrize("error", [DIED, EnvTimeout("slow")])
def test_replayed_episode_is_the_same_episode(error):
    undisturbed, none = walk(range(8))
    disturbed, twice = walk(range(8), failures=[(2, error), (7, error)])
    assert disturbed == undisturbed
    assert none == 0
    assert twice == 2


def test_failure_during_the_replay_leads_to_another_replay():
    undisturbed, _ = walk(range(8))
    disturbed, recoveries = walk(range(8), failures=[(5, DIED), (2, DIED), (4, DIED)])
    assert disturbed == undisturbed
    assert recoveries == 1


def test_call_during_which_the_environment_fails_twice_is_not_made_again():
    with pytest.raises(EnvCrashed, match="died"):
        walk(range(8), failures=[(4, DIED), (4, DIED)])


def test_diverging_replay_is_an_error():
    with pytest.raises(EnvCrashed, match="differs at call 0"):
        walk(range(8), failures=[(4, DIED)], drifts=[1e-12])


@pytest.mark.parametrize("error", [EnvContractError("lies"), UnexplainedCrash("after code of the policy")])
def test_only_crashes_and_timeouts_are_replayed(error):
    with pytest.raises(type(error), match=str(error)):
        walk(range(8), failures=[(4, error)])


def test_the_limit_of_recoveries_holds():
    with pytest.raises(EnvCrashed, match="died"):
        walk(range(8), failures=[(5, DIED), *[(2, DIED)] * 9])
