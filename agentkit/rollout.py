"""Episodes for any trainer: an environment, a tokenizer and a coroutine that generates tokens in, token records out.

Invariant: episodes are played, repeated, voided and cancelled by the code that plays those of ``agentkit run``. What
``generate`` returns is checked before it is recorded, and its errors are never those of the environment. This module
imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import itertools
import operator
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from agentkit.config import EnvConfig
from agentkit.config_io import load_config
from agentkit.errors import ConfigError, EngineError, EnvError
from agentkit.extras import require_tokenizers
from agentkit.trainers.batch import flatten
from agentkit.trainers.inference.base import Generation, Sampling
from agentkit.trainers.rollout.counters import RolloutCounters
from agentkit.trainers.rollout.episode import EpisodeRules, Player
from agentkit.trainers.rollout.groups import Ending, GroupPlayer, GroupRun
from agentkit.trainers.rollout.plugin import make_parser
from agentkit.trainers.rollout.renderer import make_renderer
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import FinishReason, FloatArray, Group, IntArray, Trajectory, VersionRuns

__all__ = ["Generate", "Generation", "Rollouts", "Sampling", "TokenSequence", "sequences"]

_GIVEN = frozenset({"id", "first_seed", "num_tasks"})
"""Settings of the section ``env`` that other arguments replace."""
_CANCEL_TIMEOUT = 30.0
_ROUNDING = 1e-4
"""Log-probabilities may exceed 0 by this much."""


class Generate(Protocol):
    """The coroutine function that generates answers."""

    def __call__(
        self, prompt_ids: list[int], sampling: Sampling, *, session: str
    ) -> Awaitable[Generation | tuple[Any, Any] | tuple[Any, Any, int]]:
        """Sample a continuation of the whole ``prompt_ids``, earlier turns included.

        Args:
            prompt_ids: ids of the prompt.
            sampling: generate at most ``max_tokens`` ids at ``temperature``, and end after one of ``stop_ids``, which
                is part of the answer. ``seed`` differs for each turn and repeats if the rollouts are repeated.
            session: unique name of the episode, the same for all of its turns; it can choose a server with a prefix
                cache.

        Returns:
            ``(ids, logprobs)`` or ``(ids, logprobs, version)``: the ids of the answer, their log-probabilities under
            the policy that sampled them (over the full vocabulary, at this temperature), and the policy's version.
            Or a ``Generation``, for an answer of several versions, or one that was aborted (``finish_reason="abort"``)
            and is generated again.
        """
        ...


class TokenSequence(NamedTuple):
    """One training sequence of ``n`` tokens, which ends with the policy's last token."""

    ids: IntArray
    """int32 ``[n]``."""
    mask: NDArray[np.bool_]
    """bool ``[n]``: True where the policy chose the token."""
    logprobs: FloatArray
    """float32 ``[n]``: as ``generate`` returned them; 0 where ``mask`` is False."""
    rewards: FloatArray
    """float32 ``[n]``: the reward of a turn is at its last token."""


def sequences(episode: Trajectory) -> list[TokenSequence]:
    """Return the training sequences of an episode: one, or one per turn if the history was rendered again.

    Raises:
        LearnerError: the episode is voided.
    """
    batch = flatten([Group(episode.group_id, episode.seed, episode.version_started, [episode])])
    found = []
    for start, end in itertools.pairwise(batch.cu_contexts):
        chosen = np.flatnonzero(batch.mask[start:end])
        if len(chosen):  # the last observation of a truncated episode has no answer
            part = slice(start, start + chosen[-1] + 1)
            found.append(TokenSequence(batch.tokens[part], batch.mask[part], batch.logprobs[part], batch.rewards[part]))
    return found


class Rollouts:
    """Plays episodes of one environment with a policy that you run.

    Environments are made on demand, kept for later episodes, and closed on exit. An episode whose environment fails is
    played again, with a fresh environment and the same seed. If no retries are left, its ``outcome`` is ``"voided"``:
    it says nothing about the policy.

    Example:
        >>> async with Rollouts("FrozenLake-v1", tokenizer, generate, group_size=4, max_turns=10) as rollouts:
        ...     episode = await rollouts.episode(seed=7)
        ...     groups = await rollouts.batch(range(16))

    Args:
        env: a registered name.
        tokenizer: a fast tokenizer with a chat template, such as ``AutoTokenizer.from_pretrained(…)``, or any object
            with its ``backend_tokenizer``, ``chat_template``, ``eos_token_id`` and ``apply_chat_template``.
        generate: a coroutine function that generates answers; see ``Generate``.
        group_size: episodes of a group; all have the same seed.
        extra_members: redundant episodes of a group: the first ``group_size`` to finish are returned, the others are
            cancelled.
        max_groups: groups (and single episodes) that are played at a time; further ones wait.
        max_tokens: maximum number of tokens of an answer.
        max_context: maximum number of tokens of a sequence; a longer episode is truncated.
        temperature: sampling temperature.
        retries: further attempts of an episode whose environment fails.
        max_failure_share: share of failing environments, among the latest episodes, that raises an error.
        history: how earlier turns are shown, as ``model.history`` of a run.
        window: number of earlier turns that are shown, with ``history="window"``.
        template_arguments: further variables of the chat template.
        seed: the sampling seeds follow from it.
        on_episode: called with each episode that is returned, and with each voided attempt.
        env_settings: other settings of the section ``env`` of a run: ``kwargs``, ``max_turns``, ``parser``,
            ``step_timeout``, ``sandbox``, ``standbys``, …

    Raises:
        ConfigError: an argument is wrong or unknown.
        MissingExtra: the package ``tokenizers`` is not installed.
        RegistryError: the environment is unknown.
        RendererError: the tokenizer is not a fast one, or its chat template cannot be used.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    def __init__(
        self,
        env: str,
        tokenizer: Any,
        generate: Generate,
        *,
        group_size: int = 1,
        extra_members: int = 0,
        max_groups: int = 16,
        max_tokens: int = 32,
        max_context: int = 1024,
        temperature: float = 1.0,
        retries: int = 2,
        max_failure_share: float = 0.5,
        history: Literal["auto", "append", "rerender", "window"] = "auto",
        window: int = 4,
        template_arguments: Mapping[str, Any] | None = None,
        seed: int = 0,
        on_episode: Callable[[Trajectory], object] = lambda episode: None,
        **env_settings: Any,
    ) -> None:
        if not callable(generate):
            raise ConfigError(f"generate={generate!r:.200} must be a coroutine function")
        if not isinstance(max_groups, int) or max_groups < 1:
            raise ConfigError(f"max_groups={max_groups!r:.200} must be an integer of at least 1")
        require_tokenizers()
        _check_names(env_settings)
        config = load_config(
            {
                "env": {"id": env, **env_settings},
                "seed": seed,
                "engine": {"max_context": max_context},
                "model": {"history": history, "window": window, "template_arguments": dict(template_arguments or {})},
                "rollout": {
                    "group_size": group_size,
                    "extra_members": extra_members,
                    "max_tokens": max_tokens,
                    "temperature": temperature,
                    "retries": retries,
                    "max_failure_share": max_failure_share,
                },
                "algorithm": {"advantage": "reinforce"},  # allows groups of one; no advantage is estimated here
            }
        )
        self.version = 0
        """Version of the policy, for answers that come without one and for ``version_started``. Set it when the
        weights behind ``generate`` change."""
        source = EnvSource.of(config.env)
        renderer = make_renderer(config.model, tokenizer, source.max_turns, source.tools)
        parser = make_parser(config, source.actions_per_turn, renderer.tools)
        self._size, self._extra = group_size, extra_members
        self._max_groups = max_groups
        self._on_episode = on_episode
        self._player = GroupPlayer(
            config,
            Player(_Engine(generate, self), renderer, parser, EpisodeRules.of(config, source)),
            window=max(100, 4 * max_groups * (group_size + extra_members)),
            counters=RolloutCounters(config.algorithm),
            on_episode=self._report,
            on_complete=self._settle,
            on_lost=self._lose,
            on_error=self._fail,
        )
        self._slots = asyncio.Semaphore(max_groups)
        self._ids = itertools.count()
        self._playing: dict[int, asyncio.Future[Group]] = {}
        self._closed = False

    async def __aenter__(self) -> Rollouts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def episode(self, seed: int) -> Trajectory:
        """Play one episode.

        Args:
            seed: the task. Another call with the same seed plays the same task with other random numbers.

        Raises:
            EngineError: ``generate`` returned something wrong; an error that it raises is raised here unchanged.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
            ConfigError: the first prompt does not fit into ``max_context``.
        """
        return (await self._play(seed, 1, 0)).members[0]

    async def group(self, seed: int) -> Group:
        """Play one group: episodes with the same first observation. Raises as ``episode``.

        Returns:
            The group with ``group_size`` members. If more members than ``extra_members`` have no retries left, the
            others are cancelled, and the group is ``voided``: it holds the members that have finished, and those.
        """
        return await self._play(seed, self._size, self._extra)

    async def groups(self, seeds: Iterable[int]) -> AsyncGenerator[Group, None]:
        """Play a group for each seed, ``max_groups`` at a time, and yield each when it is complete or voided.

        ``seeds`` may be endless. Groups go on while the caller is waiting for something else, so they may have begun
        before a change of the weights (``version_started``); ``batch`` avoids that. Raises as ``episode``.
        """
        left, playing = iter(seeds), []
        try:
            while True:
                for seed in itertools.islice(left, self._max_groups - len(playing)):
                    playing.append(asyncio.ensure_future(self.group(seed)))
                if not playing:
                    return
                await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                first = next(task for task in playing if task.done())
                playing.remove(first)
                yield first.result()
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def batch(self, seeds: Iterable[int]) -> list[Group]:
        """Play a group for each seed, and return all of them in the order of ``seeds``. Raises as ``episode``."""
        return sorted([group async for group in self.groups(seeds)], key=lambda group: group.group_id)

    async def close(self) -> None:
        """Cancel what is being played (its callers get a ``RuntimeError``) and close all environments. Idempotent."""
        self._closed = True
        for playing in self._playing.values():
            if not playing.done():
                playing.set_exception(_closed())
        await asyncio.sleep(0)  # lets the callers end their groups
        await self._player.close()

    async def _play(self, seed: int, size: int, extra: int) -> Group:
        run = GroupRun(next(self._ids), _checked_seed(seed), 0, size, extra)
        async with self._slots:
            if self._closed:
                raise _closed()
            run.version = self.version
            playing = self._playing[run.id] = asyncio.get_running_loop().create_future()
            self._player.play(run)
            tasks = list(run.tasks)
            try:
                group = await playing
            except BaseException:
                self._player.end(run, "cancelled", "caller")
                await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT)
                raise
            finally:
                del self._playing[run.id]
        for member in group.members:
            if member.outcome != "voided":  # those were reported when they ended
                self._on_episode(member)
        return group

    def _report(self, trajectory: Trajectory, ending: Ending, reason: str) -> None:
        if trajectory.outcome == "voided":
            self._on_episode(trajectory)

    def _lose(self, run: GroupRun) -> None:
        self._player.end(run, "voided", "group")
        self._settle(run)

    def _settle(self, run: GroupRun) -> None:
        playing = self._playing.get(run.id)
        if playing is not None and not playing.done():
            playing.set_result(run.result())

    def _fail(self, run: GroupRun, error: BaseException) -> None:
        playing = self._playing.get(run.id)
        if playing is not None and not playing.done():
            playing.set_exception(error)


class _Engine:
    """``generate`` as the engine of a player."""

    def __init__(self, generate: Generate, rollouts: Rollouts) -> None:
        self._generate, self._rollouts = generate, rollouts
        self._name = uuid.uuid4().hex[:8]
        """Distinguishes sessions of several rollouts that share a server."""

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, session: str) -> Generation:
        version = self._rollouts.version
        try:
            result = self._generate(np.asarray(prompt_ids).tolist(), sampling, session=f"{self._name}.{session}")
            if not inspect.isawaitable(result):
                raise EngineError(f"generate returned {_short(result)} without await: define it with `async def`")
            return checked_generation(await result, sampling, version)
        except EnvError as error:  # would void the episode
            raise EngineError(f"generate raised {type(error).__name__}: {error}") from error

    async def abort(self, session: str) -> None: ...


def checked_generation(result: Any, sampling: Sampling, version: int) -> Generation:
    """Return what ``generate`` returned as a valid ``Generation``.

    Args:
        result: what it returned.
        sampling: what was asked for.
        version: of the policy, if ``result`` has none.

    Raises:
        EngineError: names what is wrong with it.
    """
    if isinstance(result, Generation):
        if result.finish_reason == "abort":
            return Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
        ids = _checked_ids(result.ids, sampling)
        return Generation(
            ids,
            _checked_logprobs(result.logprobs, len(ids)),
            _checked_versions(result.versions, len(ids)),
            _checked_finish(result.finish_reason),
        )
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise EngineError(
            f"generate returned {_short(result)}, not (ids, logprobs), (ids, logprobs, version) or a Generation"
        )
    ids = _checked_ids(result[0], sampling)
    logprobs = _checked_logprobs(result[1], len(ids))
    versions = _checked_versions([(result[2] if len(result) == 3 else version, len(ids))], len(ids))
    cut = len(ids) == sampling.max_tokens and int(ids[-1]) not in sampling.stop_ids
    return Generation(ids, logprobs, versions, "length" if cut else "stop")


def _checked_ids(value: Any, sampling: Sampling) -> IntArray:
    ids = _vector(value, "ids", "iu", "integers")
    if not 1 <= len(ids) <= sampling.max_tokens:
        raise EngineError(f"generate returned {len(ids)} ids, not 1 to sampling.max_tokens={sampling.max_tokens}")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise EngineError(
            f"generate returned ids from {ids.min()} to {ids.max()}: ids are not negative and fit 32 bits"
        )
    early = np.isin(ids[:-1], sampling.stop_ids)
    if early.any():
        raise EngineError(
            f"generate returned the stop id {ids[:-1][early][0]} before the end of an answer: stop after any of "
            f"sampling.stop_ids={sampling.stop_ids}"
        )
    return ids.astype(np.int32)


def _checked_logprobs(value: Any, count: int) -> FloatArray:
    logprobs = _vector(value, "log-probabilities", "fiu", "numbers").astype(np.float32)
    if len(logprobs) != count:
        raise EngineError(
            f"generate returned {count} ids and {len(logprobs)} log-probabilities: return one for each id"
        )
    wrong = logprobs[~(np.isfinite(logprobs) & (logprobs <= _ROUNDING))]
    if len(wrong):
        raise EngineError(f"generate returned the log-probability {wrong[0]}, which is not a finite number up to 0")
    return logprobs


def _checked_versions(value: Any, count: int) -> VersionRuns:
    try:
        runs = tuple((operator.index(version), operator.index(tokens)) for version, tokens in value)
    except (TypeError, ValueError):
        runs = ((-1, -1),)
    if any(version < 0 or tokens < 1 for version, tokens in runs) or sum(tokens for _, tokens in runs) != count:
        raise EngineError(
            f"generate returned the versions {_short(value)}, not (version, tokens) for {count} tokens in all; a "
            "version is an integer of at least 0"
        )
    return runs


def _checked_finish(value: Any) -> FinishReason:
    if value not in ("stop", "length"):
        raise EngineError(f"generate returned finish_reason={_short(value)}, not stop, length or abort")
    return value


def _vector(value: Any, name: str, kinds: str, wanted: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:  # a tensor on a GPU, for example
        raise EngineError(f"generate returned {name} that are no list of {wanted} ({error}): use .tolist()") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise EngineError(f"generate returned {name} {_short(value)}, not a list of {wanted}")
    return array


def _checked_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"seed={_short(seed)} must be an integer of at least 0")
    return number


def _check_names(env_settings: Mapping[str, Any]) -> None:
    own = [name for name in inspect.signature(Rollouts).parameters if name != "env_settings"]
    known = [*own, *(name for name in EnvConfig.model_fields if name not in _GIVEN)]
    for name in env_settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"Rollouts takes no argument {name!r}; {hint}")


def _closed() -> RuntimeError:
    return RuntimeError("these rollouts are closed: make new ones")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
