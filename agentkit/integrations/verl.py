"""Environments as an agent loop of verl 0.9, which verl's configuration names as ``_target_``.

Invariant: the ids and log-probabilities that verl receives are those of its servers. An episode whose environment
failed is left out; it never becomes a reward.

verl makes one loop per episode. The loops of a process share their environments: one ``Rollouts`` for each definition.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)

from agentkit.errors import ConfigError, EnvError
from agentkit.rollout import Generation, Rollouts, Sampling, TokenSequence, sequences
from agentkit.types import Trajectory

_PAUSE = 1.0
"""Seconds before an answer that a weight update aborted is generated again."""
_OF_VERL = frozenset({"extra_members", "group_size", "seed", "temperature"})
"""Arguments of ``Rollouts`` that would have no effect."""
_loop: ContextVar[AgentkitLoop] = ContextVar("_loop")
"""The loop whose episode is being played."""
_shared: dict[tuple[asyncio.AbstractEventLoop, str], Rollouts] = {}


class AgentkitLoop(AgentLoopBase):
    """Plays the episode of a row of the dataset.

    Args:
        env: a registered name.
        settings: arguments of ``agentkit.Rollouts``: ``max_turns``, ``max_tokens``, ``retries``, ``kwargs``,
            ``sandbox``, … An episode has at most ``max_context`` tokens, ``data.max_response_length`` by default, and
            verl decides how it samples.
        arguments: those of verl.
    """

    def __init__(
        self,
        *,
        env: str,
        settings: Mapping[str, Any] | None = None,
        name: str = "",
        tools: Any = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if useless := _OF_VERL & {*(settings or {})}:
            raise ConfigError(f"settings of {env} has {', '.join(sorted(useless))}: verl decides this; remove it")
        self._env = env
        self._settings: dict[str, Any] = {
            "max_context": self.rollout_config.response_length,
            "max_groups": 256,
            "template_arguments": _plain(self.apply_chat_template_kwargs),
            **_plain(settings or {}),
        }
        self._sampling: dict[str, Any] = {}
        self._session = ""
        self._answers: list[Any] = []
        """Those of the session: an episode that is played again is a new one."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one episode.

        Args:
            sampling_params: how verl samples.
            row: the row of the dataset; ``extra_info`` has the ``seed`` of the task.

        Returns:
            The episode. A list if the history is rendered again for each turn, or if the episode is left out.

        Raises:
            ConfigError: the row has no seed, or the episode does not fit verl's lengths.
            EnvError: the environment failed, and this trainer of verl cannot leave an episode out.
        """
        seed: Any = (row.get("extra_info") or {}).get("seed")
        try:
            valid = int(seed) == float(seed)
        except (TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise ConfigError("a row of the dataset has no seed: add extra_info={'seed': …, 'index': …} to each row")
        several = "session_id" in row  # only the trainer V1 accepts any number of outputs for an episode
        self._sampling, self._session, self._answers = sampling_params, "", []
        token = _loop.set(self)
        try:
            episode = await self._rollouts().episode(int(seed))
        finally:
            _loop.reset(token)
        if episode.outcome == "voided":
            if several:
                return []
            raise EnvError(
                f"{self._env} failed (seed {seed}): {episode.reason}. Only the trainer V1 (trainer.use_v1=true) can "
                "leave an episode out"
            )
        outputs = [self._output(episode, part) for part in sequences(episode)]
        if len(outputs) > 1 and not several:
            raise ConfigError("each turn is a sequence: set history: append, or trainer.use_v1=true")
        return outputs if several else outputs[0]

    def _rollouts(self) -> Rollouts:
        key = asyncio.get_running_loop(), json.dumps([self._env, self._settings], sort_keys=True, default=str)
        if key not in _shared:
            _shared[key] = Rollouts(self._env, self.tokenizer, _generate, **self._settings)
        return _shared[key]

    def _output(self, episode: Trajectory, part: TokenSequence) -> AgentLoopOutput:
        start = int(np.argmax(part.mask))
        limits = self.rollout_config.prompt_length, self.rollout_config.response_length
        if start > limits[0] or len(part.ids) - start > limits[1]:
            raise ConfigError(
                f"an episode of {self._env} (seed {episode.seed}) has a prompt of {start} tokens and a response of "
                f"{len(part.ids) - start}: raise data.max_prompt_length={limits[0]} and "
                f"data.max_response_length={limits[1]}, or reduce max_context"
            )
        first = [answer.extra_fields.get("min_global_steps") for answer in self._answers]
        last = [answer.extra_fields.get("max_global_steps") for answer in self._answers]
        preempted = [answer.num_preempted for answer in self._answers]
        return AgentLoopOutput(
            prompt_ids=part.ids[:start].tolist(),
            response_ids=part.ids[start:].tolist(),
            response_mask=part.mask[start:].astype(int).tolist(),
            response_logprobs=part.logprobs[start:].tolist() if self.rollout_config.calculate_log_probs else None,
            reward_score=episode.reward,
            num_turns=2 * len(episode.turns),
            metrics=AgentLoopMetrics(
                generate_sequences=sum(turn.generate_s for turn in episode.turns),
                tool_calls=sum(turn.env_s for turn in episode.turns),
                num_preempted=-1 if None in preempted else sum(preempted),
            ),
            extra_fields={
                "turn_scores": [turn.reward for turn in episode.turns],
                "tool_rewards": [],
                "reward_extra_info": {"success": float(episode.success)},
                "min_global_steps": None if None in first else min(first),
                "max_global_steps": None if None in last else max(last),
            },
        )


async def _generate(
    prompt_ids: list[int], sampling: Sampling, *, session: str
) -> Generation | tuple[list[int], list[float]]:
    """Ask verl's servers for an answer, in the way the current loop's ``sampling_params`` say."""
    loop = _loop.get()
    limits = {"max_tokens": sampling.max_tokens, "stop_token_ids": list(sampling.stop_ids), "logprobs": True}
    answer = await loop.server_manager.generate(
        request_id=session, prompt_ids=prompt_ids, sampling_params={**loop._sampling, **limits}
    )
    if answer.stop_reason in ("abort", "aborted"):
        await asyncio.sleep(_PAUSE)
        return Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
    if session != loop._session:
        loop._session, loop._answers = session, []
    loop._answers.append(answer)
    return answer.token_ids, answer.log_probs


def _plain(settings: Any) -> dict[str, Any]:
    return OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else dict(settings)
