"""Environments as an agent executor of OpenRLHF 0.11, which calls it in the actors of its vLLM engines.

Invariant: the ids and log-probabilities that OpenRLHF receives are those of its engine. No token of an episode whose
environment failed is trained on, and its reward moves no baseline: it is the mean of its group.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from openrlhf.utils.agent import AgentExecutorBase

from agentkit.errors import ConfigError, EnvError
from agentkit.rollout import Rollouts, Sampling, sequences
from agentkit.types import Trajectory

_OF_OPENRLHF = frozenset({"extra_members", "group_size", "history", "max_context", "seed", "temperature", "window"})
"""Arguments of ``Rollouts`` that follow from OpenRLHF's. It trains on one sequence per episode."""


class _Engine(NamedTuple):
    engine: Any
    sampling_params: Any


_engine: ContextVar[_Engine] = ContextVar("_engine")
"""What generates the answers of the episode that is being played."""


class RolloutExecutor(AgentExecutorBase):
    """Plays an episode for each sample; the label of a prompt is the seed of its task.

    The file that ``--train.agent_func_path`` names defines the subclass ``AgentExecutor``:

    >>> class AgentExecutor(RolloutExecutor):
    ...     def __init__(self):
    ...         super().__init__("FrozenLake-v1", max_turns=10, max_tokens=64)

    Args:
        env: a registered name.
        settings: arguments of ``agentkit.Rollouts``. An episode has at most ``--data.max_len`` tokens, and OpenRLHF
            decides how its engines sample.

    Raises:
        ConfigError: a setting is wrong or unknown, or OpenRLHF decides it.
    """

    def __init__(self, env: str, **settings: Any) -> None:
        if useless := _OF_OPENRLHF & {*settings}:
            raise ConfigError(f"{', '.join(sorted(useless))}: OpenRLHF decides this; remove it")
        self._env, self._settings = env, {"history": "append", "max_groups": 256, **settings}
        self._rollouts: Rollouts | None = None
        self._groups: dict[int, list[asyncio.Task[Trajectory]]] = {}
        self._latest: deque[tuple[float, float]] = deque(maxlen=100)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Play one episode. ``prompt`` is not shown: the environment has its own.

        Raises:
            ConfigError: the label is no seed.
            EnvError: environments fail, and no episode has ended yet.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        try:
            seed = int(label)
            if isinstance(label, float) and seed != label:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"the label {label!r:.200} is no seed: name the column with the seeds in --data.label_key"
            ) from None
        if self._rollouts is None:
            self._rollouts = Rollouts(self._env, hf_tokenizer, _generate, max_context=max_length, **self._settings)
        token = _engine.set(_Engine(llm_engine, sampling_params))
        group = self._groups.setdefault(seed, [])
        playing = asyncio.ensure_future(self._rollouts.episode(seed))
        _engine.reset(token)
        group.append(playing)
        try:
            episode = await playing
            voided = episode.outcome == "voided"
            reward, success = await self._mean(group, episode) if voided else _result(episode)
        finally:
            if all(member.done() for member in group) and self._groups.get(seed) is group:
                del self._groups[seed]
        if voided:  # two tokens, of which the policy chose none
            ids, mask, logprobs = [hf_tokenizer.eos_token_id] * 2, np.zeros(2, bool), [0.0] * 2
        else:
            self._latest.append((reward, success))
            (part,) = sequences(episode)
            ids, mask, logprobs = part.ids.tolist(), part.mask, part.logprobs.tolist()
        cut = episode.reason == "context" or (episode.turns and episode.turns[-1].finish_reason == "length")
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "reward": reward,
            "scores": success,
            "observation_tokens": ids,
            "action_ranges": list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)),
            "rollout_log_probs": None if sampling_params.logprobs is None else logprobs,
            "truncated": bool(cut) and not voided,
            "extra_logs": {"success": success, "turns": float(len(episode.turns)), "voided": float(voided)},
        }

    async def _mean(self, group: list[asyncio.Task[Trajectory]], episode: Trajectory) -> tuple[float, float]:
        """Return the mean reward and success of the other members, or of the latest episodes if all failed."""
        await asyncio.wait(group)
        ended = [task.result() for task in group if not task.cancelled() and task.exception() is None]
        results = [_result(member) for member in ended if member.outcome != "voided"] or list(self._latest)
        if not results:
            raise EnvError(f"{self._env} failed (seed {episode.seed}), and no episode has ended yet: {episode.reason}")
        rewards, successes = zip(*results, strict=True)
        return fmean(rewards), fmean(successes)


def _result(episode: Trajectory) -> tuple[float, float]:
    return episode.reward, float(episode.success)


async def _generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> tuple[list[int], list[float]]:
    """Ask OpenRLHF's engine for an answer, in the way its ``sampling_params`` say."""
    from msgspec.structs import replace

    engine, params = _engine.get()
    params = replace(params, max_tokens=sampling.max_tokens, stop_token_ids=list(sampling.stop_ids), logprobs=0)
    answer = (await engine.generate(prompt_ids, params)).outputs[0]
    ids = list(answer.token_ids)
    return ids, [found[token].logprob for token, found in zip(ids, answer.logprobs, strict=True)]
