"""Checks of what the trainer expects of advantage estimators and policy losses, built in or not.

Invariant: a check compares the part with itself (on changed inputs, split, repeated, in another process), so it needs
no knowledge of the formula. The samples are the same in every call.
"""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from agentkit.config import AlgorithmConfig
from agentkit.errors import AgentkitError
from agentkit.plugins import ADVANTAGE
from agentkit.trainers.algorithms.advantages import Estimate, estimate
from agentkit.trainers.algorithms.plugin import COLUMNS
from agentkit.trainers.algorithms.signal import carries_signal
from agentkit.trainers.batch import Batch, flatten
from agentkit.types import FloatArray, Group, Trajectory, Turn

GARBAGE = (np.nan, np.inf, -1e30)
"""What masked positions are filled with."""
_PROCESS_S = 120.0
"""Seconds for another process to compute the samples."""


_ROUNDING = 1e-5


class Broken(Exception):
    """A rule is broken; the message says how."""


class Result(NamedTuple):
    """Result of one check."""

    rule: str
    problem: str
    """How the rule is broken; empty if it is kept."""


def run_checks(checks: Sequence[tuple[str, Callable[[], None]]]) -> Iterator[Result]:
    """Run checks one after the other; an exception of the part breaks the rule that is being checked."""
    for rule, check in checks:
        try:
            check()
        except (Broken, AgentkitError) as error:
            yield Result(rule, str(error))
        except Exception as error:
            yield Result(rule, f"{type(error).__name__}: {error}")
        else:
            yield Result(rule, "")


def check_advantage(config: AlgorithmConfig) -> Iterator[Result]:
    """Check ``config.advantage``.

    Raises:
        RegistryError, ConfigError: it does not load, or its options are wrong.
    """
    traits = ADVANTAGE.traits(config.advantage)
    # With a critic's values if it needs one, otherwise without, as in a run.
    critics = [1 + seed % 2 if traits.needs_critic else 0 for seed in range(8)]

    def of(one: Sample) -> Estimate:
        return estimate(one.batch, one.values, config)

    def each(check: Callable[..., None], *further: object) -> Callable[[], None]:
        def check_all() -> None:
            for one in samples(critics):  # new ones, because the part may change them
                check(of, one, *further)

        return check_all

    return run_checks(
        [
            ("shapes, types and finite numbers", each(_well_formed)),
            ("masked positions have no effect", each(_same_when_masked)),
            ("the same input gives the same result", each(_repeatable)),
            ("inputs are not changed", each(_unchanged)),
            ("all ranks compute the same", lambda: _same_elsewhere(config, critics)),
            ("the order of groups has no effect", each(_order_has_no_effect)),
            ("rewards of any scale give finite numbers", each(_scales)),
            ("a group without signal has advantages of 0", each(_silent, config)),
        ]
    )


@dataclass(frozen=True)
class Sample:
    """One global batch with the values of some critics."""

    groups: list[Group]
    batch: Batch
    values: FloatArray
    """``[M, N]``."""


Estimator = Callable[[Sample], Estimate]


def samples(critics: Sequence[int]) -> Iterator[Sample]:
    """Yield one sample for each number of critics."""
    return (sample(seed, count) for seed, count in enumerate(critics))


def sample(seed: int, critics: int) -> Sample:
    """Return groups of 1 to 4 episodes of 1 to 4 turns: some truncated, some with equal returns, rewards with ties,
    some with a context for each turn.

    Seed 0 has equal rewards everywhere, seed 1 a single episode with a single action token.
    """
    rng = np.random.default_rng(seed)

    def turn(reward: float, most: int = 5) -> Turn:
        action = rng.integers(0, 50, rng.integers(1, most)).astype(np.int32)
        prompt = rng.integers(0, 50, rng.integers(1, most)).astype(np.int32)
        logprobs = -rng.random(len(action)).astype(np.float32)
        state = f"state {rng.integers(3)}"
        return Turn(prompt, action, logprobs, ((0, len(action)),), reward=reward, observation=state, actions=("go",))

    def episode(group: int, member: int) -> Trajectory:
        rewards = [1.0] if seed == 0 else rng.choice([-0.1, 0.0, 0.5, 1.0], rng.integers(1, 5)).tolist()
        made = Trajectory(group, member, "sample", 0, 0, [turn(reward) for reward in rewards])
        made.rerendered = member % 2 == 1
        if rng.random() < 0.5:
            made.outcome, made.final_ids = "truncated", rng.integers(0, 50, 3).astype(np.int32)
        return made

    groups = [Group(g, 0, 0, [episode(g, m) for m in range(rng.integers(1, 5))]) for g in range(rng.integers(2, 5))]
    if seed == 1:
        groups = [Group(0, 0, 0, [Trajectory(0, 0, "sample", 0, 0, [turn(0.5, most=2)])])]
    batch = flatten(groups)
    return Sample(groups, batch, rng.normal(size=(critics, batch.num_tokens)).astype(np.float32))


def _well_formed(of: Estimator, one: Sample) -> None:
    for name, column in zip(COLUMNS, of(one), strict=True):
        if column.shape != (one.batch.num_tokens,) or column.dtype != np.float32:
            shape = f"[{one.batch.num_tokens}] of float32"
            raise Broken(f"{name}: {list(column.shape)} of {column.dtype} instead of {shape}")
        if wrong := np.count_nonzero(~np.isfinite(column)):
            raise Broken(f"{name}: {wrong} of {column.size} numbers are NaN or infinite")
        if column[~one.batch.mask].any():
            raise Broken(f"{name}: not 0 at masked positions")


def _repeatable(of: Estimator, one: Sample) -> None:
    _equal(of(one), of(one), before="in a second call, ")


def _equal(expected: Estimate, actual: Estimate, tolerance: float = 0.0, before: str = "") -> None:
    for name, one, other in zip(COLUMNS, expected, actual, strict=True):
        # Relative to the largest number, because sums cancel.
        bound = tolerance * (1 + np.abs(one).max(initial=0))
        if not np.array_equal(one, other) and not np.all(np.abs(one - other) <= bound):
            raise Broken(f"{before}{name} differ by up to {np.abs(one - other).max():.3g}")


def _same_when_masked(of: Estimator, one: Sample) -> None:
    batch, clean = one.batch, of(one)
    used = np.zeros(batch.num_tokens, bool)
    used[np.flatnonzero(batch.mask) - 1] = True  # the states in which an action token was chosen
    used[batch.cu_seqlens[1:][batch.bootstraps] - 1] = True  # the states after final_ids
    for garbage in GARBAGE:
        dirty = replace(
            batch,
            rewards=np.where(batch.mask, batch.rewards, garbage).astype(np.float32),
            logprobs=np.where(batch.mask, batch.logprobs, garbage).astype(np.float32),
            tokens=np.where(batch.mask, batch.tokens, 49).astype(np.int32),
        )
        values = np.where(used, one.values, garbage).astype(np.float32)
        _equal(clean, of(replace(one, batch=dirty, values=values)), before=f"with {garbage:g} at masked positions, ")


def _unchanged(of: Estimator, one: Sample) -> None:
    given = copy.deepcopy(one)
    of(given)
    for part in fields(Batch):
        if not np.array_equal(getattr(given.batch, part.name), getattr(one.batch, part.name)):
            raise Broken(f"it changes batch.{part.name}; copy it first")
    if not np.array_equal(given.values, one.values):
        raise Broken("it changes values; copy them first")


def _order_has_no_effect(of: Estimator, one: Sample) -> None:
    batch, backwards = one.batch, flatten(one.groups[::-1])
    starts = dict(zip(zip(batch.group_ids, batch.members, strict=True), batch.cu_seqlens, strict=False))
    moved = zip(backwards.group_ids, backwards.members, backwards.lengths, strict=True)
    origin = np.concatenate([starts[group, member] + np.arange(length) for group, member, length in moved])
    there = of(replace(one, batch=backwards, values=one.values[:, origin]))
    back = Estimate(*(column[np.argsort(origin)] for column in there))
    _equal(of(one), back, tolerance=1e-4, before="with the groups in another order, ")


def _scales(of: Estimator, one: Sample) -> None:
    for scale in (0.0, 1e-6, 1e6):
        rewards = (one.batch.rewards * scale).astype(np.float32)
        scaled = replace(one, batch=replace(one.batch, rewards=rewards), values=(one.values * scale).astype(np.float32))
        try:
            _well_formed(of, scaled)
        except (Broken, AgentkitError) as error:
            raise Broken(f"with rewards times {scale:g}: {error}") from None


def _silent(of: Estimator, one: Sample, config: AlgorithmConfig) -> None:
    for group in one.groups:
        batch = flatten([group])
        alone = Sample([group], batch, np.zeros((len(one.values), batch.num_tokens), np.float32))
        largest = float(np.abs(of(alone).advantages).max())
        if largest > _ROUNDING and not carries_signal(group.members, config):
            raise Broken(
                f"an advantage is {largest:.3g}, so dynamic sampling would drop a group that teaches something: do not "
                "declare group_baseline"
            )


def _same_elsewhere(config: AlgorithmConfig, critics: Sequence[int]) -> None:
    """Compare with another process, whose hashes, random numbers and addresses differ."""
    given = json.dumps([sys.path, config.model_dump(), critics])
    code = (
        "import json, sys\n"
        "sys.path[:], settings, critics = json.load(sys.stdin)\n"
        "from agentkit.config import AlgorithmConfig\n"
        "from agentkit.trainers.algorithms.contract import digests\n"
        "print('\\n' + json.dumps(digests(AlgorithmConfig(**settings), critics)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=_PROCESS_S, check=False
    )
    if done.returncode != 0:
        raise Broken(f"another process cannot compute it: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    if json.loads(done.stdout.strip().splitlines()[-1]) != digests(config, critics):
        raise Broken("another process computes other numbers: do not use hash(), id(), time or global random numbers")


def digests(config: AlgorithmConfig, critics: Sequence[int]) -> list[str]:
    """Return a hash of the result for each sample."""
    results = (estimate(one.batch, one.values, config) for one in samples(critics))
    return [hashlib.sha256(b"".join(column.tobytes() for column in result)).hexdigest() for result in results]
