"""Checks of an environment: gymnasium's checker, and the further requirements of training.

Invariant: every check uses its own instances, ends within a time limit, and reports every failure as a result with a
reason; ``check`` raises nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from agentkit import registry
from agentkit.envs.base import TextEnv, expert_actions
from agentkit.envs.spaces import Text
from agentkit.envs.sync import SyncTextEnv
from agentkit.text import printable
from agentkit.tool_calls import check_tools

RANDOM_STEPS = 1_000
RANDOM_SHARE = 0.5
"""Fraction of a check's time limit after which the random agent stops, even if it took fewer steps."""
EXPERT_EPISODES = 8
_SHOWN_STEPS = 20
"""Steps shown at the end of a transcript; the middle of a longer one is omitted."""
_SHOWN_TEXT = 1_000
"""Characters of one step that a transcript shows."""
_NASTY = (
    "",
    " ",
    "\n",
    "é√中🙂",
    "\x1b[31mred\x1b[0m",
    "\x00",
    "x" * 10_000,
    "None",
    "1e999",
    "</answer>",
    "__import__('os')",
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: its name, whether it passed, and the reason or a remark."""

    name: str
    passed: bool
    detail: str = ""
    transcript: str = ""
    """The episode in which it failed, up to the failure; empty if no episode was played."""


class Failure(Exception):
    """A failed check: the message is the reason, ``transcript`` the episode."""

    def __init__(self, text: str, transcript: str = "") -> None:
        super().__init__(text)
        self.transcript = transcript


class Transcript:
    """An episode as text, with control characters escaped."""

    def __init__(self, seed: int, observation: str) -> None:
        self.steps = 0
        self._parts = [f"seed {seed}\n{observation}"]

    def add(self, action: str, result: Any) -> None:
        """Append a step; ``result`` may be any object."""
        self.steps += 1
        try:
            observation, reward, terminated, truncated, info = result
            remark = "" if info.get("action_valid", True) else "  (no such action)"
            outcome = f"reward {reward}{', terminated' * bool(terminated)}{', truncated' * bool(truncated)}"
            self._parts.append(f"{self.steps}. {action}{remark}  {outcome}\n{observation}")
        except (TypeError, ValueError, AttributeError):
            self._parts.append(f"{self.steps}. {action}\n{result!r}")

    def __str__(self) -> str:
        shown = self._parts
        if len(shown) > _SHOWN_STEPS + 1:
            left_out = f"… {len(shown) - 1 - _SHOWN_STEPS} steps"
            shown = [shown[0], left_out, *shown[-_SHOWN_STEPS:]]
        return printable("\n".join(part if len(part) <= _SHOWN_TEXT else f"{part[:_SHOWN_TEXT]}…" for part in shown))


@dataclass(frozen=True)
class Subject:
    """The environment to check."""

    id: str
    cls: type[Any]
    kwargs: dict[str, Any]
    timeout: float = 120.0
    """Seconds that one check may take."""

    @property
    def max_steps(self) -> int:
        return self.cls.max_turns_for(**self.kwargs) * self.cls.actions_per_turn

    def make(self) -> TextEnv:
        env = self.cls(**self.kwargs)
        return env if isinstance(env, TextEnv) else SyncTextEnv(env)


def check(id: str, *, timeout: float = 120.0, sandbox: str | None = None, **kwargs: Any) -> list[CheckResult]:
    """Check a registered environment.

    Args:
        id: a registered name.
        timeout: seconds that each check may take.
        sandbox: a back end of sandboxes, in which the environment must play the same episodes; None: not checked.
        kwargs: arguments of the environment.

    Returns:
        One result for each check.
    """
    try:
        spec = registry.entry(id).load()
        arguments = {**spec.kwargs, **kwargs}
        registry.check_arguments(id, spec.entry_point, arguments)
    except registry.RegistryError as problem:
        return [CheckResult("loads", False, str(problem))]
    subject = Subject(id, spec.entry_point, arguments, timeout)  # pyright: ignore[reportArgumentType]
    results = [CheckResult("loads", True, f"{subject.cls.__module__}:{subject.cls.__qualname__}")]
    checks = dict(CHECKS)
    if sandbox is not None:
        checks["in a sandbox"] = lambda subject: _in_sandbox(subject, sandbox)
    return results + [_bounded(name, function, subject, timeout) for name, function in checks.items()]


def _bounded(name: str, function: Callable[[Subject], str], subject: Subject, timeout: float) -> CheckResult:
    """Run one check in a thread, which is abandoned if it does not end."""
    results: list[CheckResult] = []

    def run() -> None:
        try:
            results.append(CheckResult(name, True, function(subject)))
        except Failure as failure:
            results.append(CheckResult(name, False, str(failure), failure.transcript))
        except BaseException as problem:  # the environment may raise anything, SystemExit too
            results.append(CheckResult(name, False, f"{type(problem).__name__}: {problem}"))

    thread = threading.Thread(target=run, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(timeout)
    return results[0] if results else CheckResult(name, False, f"did not end within {timeout:g} s: something hangs")


def _declarations(subject: Subject) -> str:
    cls = subject.cls
    if not isinstance(cls.instructions, str) or not cls.instructions_for(**subject.kwargs).strip():
        raise Failure("`instructions` is empty: the model would not know the rules; set it on the class")
    for name in ("max_turns", "actions_per_turn"):
        value = getattr(cls, name)
        if not isinstance(value, int) or value < 1:
            raise Failure(f"`{name}` is {value!r}; it must be a positive integer, set on the class")
    try:
        tools = check_tools(cls.tools_for(**subject.kwargs))
    except ValueError as problem:
        raise Failure(f"`tools`: {problem}") from None
    if tools and cls.actions_per_turn != 1:
        raise Failure("an environment with `tools` gets one call in each turn; leave `actions_per_turn` at 1")
    if cls.concurrency not in ("inline", "thread", "process"):
        raise Failure(f"`concurrency` is {cls.concurrency!r}; it must be 'inline', 'thread' or 'process'")
    return f"max_turns={cls.max_turns}, actions_per_turn={cls.actions_per_turn}, concurrency={cls.concurrency}"


def _gymnasium(subject: Subject) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = subject.make()
        # Made by gymnasium it has a spec, with which all render modes are tried.
        if not isinstance(env, SyncTextEnv) and ":" not in subject.id:
            env.close()
            env = gymnasium.make(f"agentkit:agentkit/{subject.id}", **subject.kwargs).unwrapped
        try:
            check_env(env)
        except AssertionError as problem:
            raise Failure(str(problem)) from None
        finally:
            env.close()
    notes = {str(entry.message).removeprefix("\x1b[33mWARN: ").removesuffix("\x1b[0m") for entry in caught}
    return "; ".join(sorted(note for note in notes if "spec" not in note))


def _actions(env: TextEnv, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Return an action of a random agent: mostly an existing one, sometimes any text."""
    choice = rng.random()
    known = info.get("admissible_actions") or getattr(env.action_space, "examples", ())
    if known and choice < 0.75:
        return str(known[int(rng.integers(len(known)))])
    if choice < 0.9:
        return str(env.action_space.sample())
    nasty = _NASTY[int(rng.integers(len(_NASTY)))]
    return nasty if nasty in env.action_space else str(env.action_space.sample())


def _examine(env: TextEnv, when: str, result: Any, started: bool) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Check the result of ``reset`` or ``step``; return it in the form of ``step``."""
    if not isinstance(result, tuple) or len(result) != (5 if started else 2):
        raise Failure(f"{when} returned {result!r:.200}, not a tuple of {5 if started else 2}")
    observation, reward, terminated, truncated, info = result if started else (result[0], 0.0, False, False, result[1])
    if observation not in env.observation_space:
        raise Failure(f"{when}: the observation {observation!r:.200} is not in {env.observation_space}")
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        raise Failure(f"{when}: the reward {reward!r} is not a finite number")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool):
            raise Failure(f"{when}: {name} is {value!r}, not a bool")
    for name in ("success", "action_valid"):
        if not isinstance(info.get(name), bool):
            raise Failure(f"{when}: info[{name!r}] is {info.get(name)!r}, not a bool")
    listed = info.get("admissible_actions", [])
    if not isinstance(listed, list) or any(action not in env.action_space for action in listed):
        raise Failure(f"{when}: info['admissible_actions'] is {listed!r:.200}, not a list of actions")
    if info["success"] and not (terminated or truncated):
        raise Failure(f"{when}: info['success'] is true, but the episode continues; a success must end it")
    return observation, float(reward), terminated, truncated, info


def _random_agent(subject: Subject) -> str:
    """Check that a random agent causes no exception and no value of a wrong type."""
    env, rng = subject.make(), np.random.default_rng(0)
    env.action_space.seed(0)
    total = episodes = successes = 0
    done, info = True, {}
    transcript = Transcript(0, "")
    limit = subject.max_steps
    end = time.monotonic() + RANDOM_SHARE * subject.timeout
    for _ in range(RANDOM_STEPS):
        if done or transcript.steps >= limit:
            observation, *_, info = _examine(env, f"reset(seed={episodes})", env.reset(seed=episodes), False)
            transcript = Transcript(episodes, observation)
            episodes += 1
        action = _actions(env, info, rng)
        when = f"seed {episodes - 1}, step {transcript.steps + 1}, action {action!r:.60}"
        try:
            result = env.step(action)
        except Exception as problem:
            said = f"{type(problem).__name__}: {problem}"
            transcript.add(action, said)
            raise Failure(f"{when}: step raised {said}", str(transcript)) from problem
        transcript.add(action, result)
        try:
            _, _, terminated, truncated, info = _examine(env, when, result, True)
        except Failure as failure:
            failure.transcript = str(transcript)
            raise
        done, successes = terminated or truncated, successes + info["success"]
        total += 1
        if time.monotonic() > end:
            break
    env.close()
    return f"{total} steps, {episodes} episodes, {successes} solved"


def fingerprint(cls: type[Any], kwargs: dict[str, Any]) -> str:
    """Return a digest of all actions and results of a seeded random agent in three episodes."""
    digest = hashlib.sha256()
    for seen in _played(Subject("", cls, kwargs).make()):
        digest.update(repr(seen).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _played(env: TextEnv) -> Iterator[tuple[Any, ...]]:
    """Yield what a seeded random agent sees in three episodes; ``info`` is last. Close the environment."""
    for seed in (0, 1, 2):
        env.action_space.seed(seed)
        rng = np.random.default_rng(seed)
        observation, info = env.reset(seed=seed)
        yield seed, observation, []
        for _ in range(30):
            action = _actions(env, info, rng)
            observation, reward, terminated, truncated, info = env.step(action)
            yield action, observation, float(reward), terminated, truncated, sorted(info.items(), key=str)
            if terminated or truncated:
                break
    env.close()


def _determinism(subject: Subject) -> str:
    """Check that the same seed and actions give the same episode in two instances and in another process."""
    if not subject.cls.deterministic:
        return "declared not deterministic: not checked"
    first = fingerprint(subject.cls, subject.kwargs)
    if fingerprint(subject.cls, subject.kwargs) != first:
        raise Failure("two instances differ under the same seeds and actions; draw from self.np_random alone")
    address = f"{subject.cls.__module__}:{subject.cls.__qualname__}"
    try:
        arguments = json.dumps([address, subject.kwargs])
    except TypeError:
        return "arguments cannot be sent to another process: checked in this one only"
    if subject.cls.__module__ == "__main__" or "<locals>" in address:
        return "the class cannot be imported by name: checked in this process only"
    script = (
        "import sys, json; from agentkit import registry; from agentkit.envs.check import fingerprint; "
        "address, kwargs = json.loads(sys.argv[1]); "
        "print(fingerprint(registry.Entry('x-v0', registry.EnvSpec(address), 'explicit').load().entry_point, kwargs))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    other = subprocess.run(
        [sys.executable, "-c", script, arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=90,
        check=False,
    )
    if other.returncode != 0:
        raise Failure(f"in another process it fails: {other.stderr.strip()[-300:]}")
    if other.stdout.split()[-1] != first:
        raise Failure("another process gives other episodes: something depends on hash(), on the order of a set, …")
    return "in two instances and in another process"


def _in_sandbox(subject: Subject, sandbox: str) -> str:
    """Check that a sandboxed instance plays the same episodes; values in ``info`` may arrive as texts."""
    made = registry.make(subject.id, sandbox=sandbox, **subject.kwargs)
    env = made if isinstance(made, TextEnv) else SyncTextEnv(made)
    try:
        there = [seen[:-1] for seen in _played(env)]
    finally:
        env.close()
    if not subject.cls.deterministic:
        return f"on {sandbox}; declared not deterministic: episodes not compared"
    here = [seen[:-1] for seen in _played(subject.make())]
    if there != here:
        differing = next((pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]), (here[-1], there[-1]))
        raise Failure(f"its episodes differ: here {differing[0]!r:.200}, in the sandbox {differing[1]!r:.200}")
    return f"the same episodes on {sandbox}"


def _global_randomness(subject: Subject) -> str:
    """Check that global random generators are neither used nor seeded."""

    def states() -> tuple[object, object]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        return random.getstate(), (kind, np.asarray(keys).tobytes(), rest)

    saved = random.getstate(), np.random.get_state()
    try:
        # Unusual seeds: an environment that always seeds the global generators with the same value would otherwise
        # leave them unchanged.
        random.seed("agentkit")
        np.random.seed(271_828)
        before = states()
        fingerprint(subject.cls, subject.kwargs)
        after = states()
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
    for name, old, new in zip(("random", "numpy.random"), before, after, strict=True):
        if old != new:
            raise Failure(f"the global generator of `{name}` was used; draw from self.np_random instead")
    return ""


def _expert(subject: Subject) -> str:
    """Check that the expert solves the task: always or, if chance decides, more often than a random agent."""
    if not subject.cls.has_expert():
        return "no expert: no imitation learning and no upper bound"
    played = [_play(subject, seed, expert=True) for seed in range(EXPERT_EPISODES)]
    failed = [episode for episode in played if not episode.success]
    if not failed:
        return f"solved {EXPERT_EPISODES} of {EXPERT_EPISODES} episodes"
    transcript = str(failed[0].transcript)
    share = 1 - len(failed) / EXPERT_EPISODES
    if not any(episode.chance for episode in played):
        seeds = [episode.seed for episode in failed]
        raise Failure(f"the expert does not solve seeds {seeds} within {subject.max_steps} steps", transcript)
    baseline = sum(_play(subject, seed, expert=False).success for seed in range(EXPERT_EPISODES)) / EXPERT_EPISODES
    if baseline >= share:
        raise Failure(f"the expert solves {share:.0%} of the episodes, no more than a random agent", transcript)
    return f"solved {share:.0%}; a random agent {baseline:.0%} (steps depend on chance)"


@dataclass(frozen=True)
class _Episode:
    seed: int
    success: bool
    """At the end of the episode."""
    chance: bool
    """Whether steps drew random numbers."""
    transcript: Transcript


def _play(subject: Subject, seed: int, *, expert: bool) -> _Episode:
    """Play one episode; the expert plans again only when its plan ends, as in imitation learning."""
    env, rng = subject.make(), np.random.default_rng(seed)
    try:
        observation, info = env.reset(seed=seed)
        transcript = Transcript(seed, observation)
        state = str(env.np_random.bit_generator.state)
        plan = expert_actions(env) if expert else None
        while transcript.steps < subject.max_steps:
            action = next(plan, None) if plan is not None else _actions(env, info, rng)
            if action is None:
                break
            result = env.step(action)
            transcript.add(action, result)
            _, _, terminated, truncated, info = result
            if terminated or truncated:
                break
        chance = str(env.np_random.bit_generator.state) != state
        return _Episode(seed, bool(info["success"]), chance, transcript)
    finally:
        env.close()


def _close(subject: Subject) -> str:
    for reset in (False, True):
        env = subject.make()
        if reset:
            env.reset(seed=0)
        env.close()
        if isinstance(env, SyncTextEnv):
            env = SyncTextEnv(env.env)  # a wrapper closes its environment once only
        env.close()
    return ""


def _any_text(subject: Subject) -> str:
    """Check that both spaces accept any Unicode text."""
    env = subject.make()
    for name, space in (("observation_space", env.observation_space), ("action_space", env.action_space)):
        if not isinstance(space, Text):
            raise Failure(f"{name} is {space}; use agentkit.Text, which takes any Unicode")
    env.close()
    return ""


CHECKS: dict[str, Callable[[Subject], str]] = {
    "declares what it needs": _declarations,
    "spaces take any text": _any_text,
    "passes gymnasium's checker": _gymnasium,
    "survives a random agent": _random_agent,
    "same seed, same episode": _determinism,
    "leaves global generators alone": _global_randomness,
    "expert solves it": _expert,
    "close can be called twice": _close,
}
"""The checks by name; each returns a remark or raises ``Failure``."""
