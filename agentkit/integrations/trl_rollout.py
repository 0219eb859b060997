"""TRL's ``rollout_func``: episodes of ``agentkit.Rollouts``, generated with the trainer's model.

Episodes are played in the background loop, all of a batch at once. The trainer's thread computes their answers, in
batches of what waits, so that sandboxes are watched meanwhile.

Invariant: TRL gets one row for each prompt, in order. The row of a voided episode has the reward None and no token that
is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentkit.errors import ConfigError
from agentkit.portal import portal
from agentkit.rollout import Generate, Rollouts, Sampling, sequences
from agentkit.types import Trajectory

_OWN = ("group_size", "extra_members", "history", "window")
"""Arguments of ``Rollouts`` that TRL determines: it forms the groups, and trains on one sequence per episode."""
_QUIET = 0.01
"""Seconds without another request after which those that wait are computed."""


class RolloutFunc:
    """The argument ``rollout_func`` of TRL's ``GRPOTrainer``.

    The prompts of the data set are seeds, as text. Pass ``episode_reward`` as a reward function.

    Example:
        >>> trainer = GRPOTrainer(
        ...     model, processing_class=tokenizer, reward_funcs=episode_reward,
        ...     train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(1000)]}),
        ...     rollout_func=RolloutFunc("FrozenLake-v1", tokenizer, max_tokens=16, max_turns=10),
        ... )

    Args:
        env: a registered name.
        tokenizer: that of the trainer, with a chat template that leaves earlier turns alone.
        generate: see ``agentkit.Rollouts``; None generates with the trainer's model. Another one has to use the
            trainer's current weights.
        max_groups: episodes that are played at a time.
        settings: other arguments of ``agentkit.Rollouts``, except ``group_size``, ``extra_members``, ``history`` and
            ``window``.

    Raises:
        ConfigError, MissingExtra, RegistryError, RendererError, SandboxError, EnvError: as ``agentkit.Rollouts``.
    """

    def __init__(
        self, env: str, tokenizer: Any, *, generate: Generate | None = None, max_groups: int = 64, **settings: Any
    ) -> None:
        for name in _OWN:
            if name in settings:
                raise ConfigError(f"RolloutFunc takes no argument {name!r}: TRL determines it; leave it out")
        self._requests = _Requests()
        self._own = generate is None
        self._temperature = settings.get("temperature", 1.0)
        self._end = [tokenizer.eos_token_id]
        # The processes of a trainer share groups, whose episodes must differ.
        settings["seed"] = settings.get("seed", 0) + 1_000_003 * int(os.environ.get("RANK", 0))
        self._rollouts = Rollouts(
            env, tokenizer, generate or self._requests.generate, max_groups=max_groups, history="append", **settings
        )
        self._portal = portal()
        self._portal.opened(self._rollouts)
        weakref.finalize(self, _dispose, self._portal, self._rollouts).atexit = False

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play one episode for each prompt.

        Args:
            prompts: seeds, each as often as TRL wants episodes of it.
            trainer: a ``GRPOTrainer``.

        Returns:
            ``prompt_ids`` (up to the first answer), ``completion_ids``, ``logprobs`` and ``env_mask`` (1 for the
            tokens of the policy) for each episode, and for reward functions ``episode_reward`` (None if the episode is
            voided), ``episode_success`` and ``episode_turns``.

        Raises:
            ConfigError: a prompt is no seed, or the trainer's settings do not fit.
            EngineError, EnvFailureBudgetExceeded: as ``Rollouts.episode``.
        """
        seeds = [_seed(prompt) for prompt in prompts]
        self._check(trainer)
        self._rollouts.version = trainer.state.global_step
        playing = self._portal.start(self._rollouts.batch(seeds))
        self._requests.serve(playing, lambda requests: _answer(requests, trainer))
        rows = [_row(group.members[0], self._end) for group in playing.result()]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def close(self) -> None:
        """Close all environments. Otherwise this happens when this is collected, or the interpreter exits."""
        self._portal.run(self._rollouts.close())
        self._portal.closed(self._rollouts)

    def _check(self, trainer: Any) -> None:
        if trainer.args.temperature != self._temperature:
            raise ConfigError(
                f"the temperature of GRPOConfig is {trainer.args.temperature}, that of RolloutFunc is "
                f"{self._temperature}: make them equal"
            )
        if self._own and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ConfigError(
                "RolloutFunc generates with the trainer's model, which FSDP and DeepSpeed may share among processes "
                "that do not generate equally often: train without them, or pass a coroutine `generate`"
            )
        if self._own and trainer.use_vllm:
            raise ConfigError(
                "RolloutFunc generates with the trainer's model: set use_vllm=False, or pass a coroutine `generate` "
                "that asks the server to which TRL sends the weights"
            )


def episode_reward(
    *, episode_reward: Sequence[float | None], episode_success: Sequence[bool | None], **columns: Any
) -> list[float | None]:
    """Return the rewards of the episodes, None for voided ones; log the shares of solved and of voided ones."""
    counted = [success for success in episode_success if success is not None]
    if log := columns.get("log_metric"):
        log("episodes/voided", 1.0 - len(counted) / len(episode_success))
        if counted:
            log("episodes/success", sum(counted) / len(counted))
    return list(episode_reward)


@dataclass(eq=False, slots=True)
class _Request:
    prompt_ids: list[int]
    sampling: Sampling
    answer: Future[tuple[list[int], list[float]]] = field(default_factory=Future)


class _Requests:
    """Requests of episodes, on their way from the background loop to the trainer's thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, session: str
    ) -> tuple[list[int], list[float]]:
        request = _Request(prompt_ids, sampling)
        self._queue.put(request)
        return await asyncio.wrap_future(request.answer)

    def serve(self, playing: Future[Any], answer: Callable[[list[_Request]], None]) -> None:
        """Pass what waits to ``answer``, until ``playing`` is done; cancel it if ``answer`` raises."""
        playing.add_done_callback(lambda _: self._queue.put(None))
        try:
            while requests := self._next():
                answer(requests)
        except BaseException:
            playing.cancel()
            while self._next():
                pass
            raise

    def _next(self) -> list[_Request]:
        """Wait for requests, and return those of one batch; none at the end."""
        requests: list[_Request] = []
        with contextlib.suppress(queue.Empty):
            while (request := self._queue.get(timeout=_QUIET if requests else None)) is not None:
                if request.answer.set_running_or_notify_cancel():
                    requests.append(request)
            if requests:
                self._queue.put(None)  # the end, for the next call
        return requests


def _answer(requests: list[_Request], trainer: Any) -> None:
    """Compute the answers; an error is that of ``generate``."""
    try:
        sampling = max((request.sampling for request in requests), key=lambda sampling: sampling.max_tokens)
        answers = _generate([request.prompt_ids for request in requests], sampling, trainer)
        for request, (ids, logprobs) in zip(requests, answers, strict=True):
            most = request.sampling.max_tokens
            request.answer.set_result((ids[:most], logprobs[:most]))
    except Exception as error:
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(error)


def _generate(prompts: list[list[int]], sampling: Sampling, trainer: Any) -> list[tuple[list[int], list[float]]]:
    """Return ids and log-probabilities of a continuation of each prompt, sampled with the trainer's model.

    Log-probabilities are those at the temperature, before ``top_k``, ``top_p`` and ``min_p`` of the trainer.
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList
    from trl.models.utils import unwrap_model_for_generation

    class Recorder(LogitsProcessor):
        """Keeps the log-probabilities of sampled tokens, which are known at the next step, not those of all tokens."""

        def __init__(self) -> None:
            self.chosen: list[Any] = []
            self.last: Any = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.add(input_ids)
            scores = scores.float() / sampling.temperature
            self.last = scores.log_softmax(-1)
            return scores

        def add(self, ids: Any) -> None:
            if self.last is not None:
                self.chosen.append(self.last.gather(1, ids[:, -1:]))

    args, device, pad = trainer.args, trainer.accelerator.device, sampling.stop_ids[0]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = copy.deepcopy(trainer.generation_config)
    config.update(max_new_tokens=sampling.max_tokens, eos_token_id=list(sampling.stop_ids), temperature=1.0)
    recorder = Recorder()
    # This also turns off gradient checkpointing, with which there is no cache, and `generate` gives wrong answers.
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=args.ds3_gather_for_generation,
        # transformers 4 prefers settings of the model to those that equal its defaults, such as the temperature 1.
        generation_kwargs={**trainer.generation_kwargs, "temperature": 1.0, "eos_token_id": list(sampling.stop_ids)},
        gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
    )
    with unwrapped as model, torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
        )
    recorder.add(out)
    answers = out[:, width:].tolist()
    logprobs = torch.cat(recorder.chosen, 1).tolist()
    lengths = [next((k + 1 for k, id in enumerate(row) if id in sampling.stop_ids), len(row)) for row in answers]
    return [(answers[k][:length], logprobs[k][:length]) for k, length in enumerate(lengths)]


def _row(episode: Trajectory, end: list[int]) -> dict[str, Any]:
    """Return an episode as TRL's trainer takes it. ``end``: ids in place of the tokens of a voided episode."""
    turns = len(episode.turns)
    if episode.outcome == "voided":
        row = {"prompt_ids": end, "completion_ids": end, "logprobs": [0.0], "env_mask": [0]}
        return {**row, "episode_reward": None, "episode_success": None, "episode_turns": turns}
    (tokens,) = sequences(episode)
    start = len(episode.turns[0].prompt_ids)
    return {
        "prompt_ids": tokens.ids[:start].tolist(),
        "completion_ids": tokens.ids[start:].tolist(),
        "logprobs": tokens.logprobs[start:].tolist(),
        "env_mask": tokens.mask[start:].astype(int).tolist(),
        "episode_reward": episode.reward,
        "episode_success": episode.success,
        "episode_turns": turns,
    }


def _seed(prompt: Any) -> int:
    try:
        seed = int(prompt)
    except (TypeError, ValueError):
        seed = -1
    if seed < 0:
        raise ConfigError(
            f"the prompt {str(prompt)!r:.200} is no seed: the data set of RolloutFunc has the column 'prompt' with "
            "seeds as text, such as '17'"
        )
    return seed


def _dispose(owner: Any, rollouts: Rollouts) -> None:
    """Close rollouts whose owner was collected, without waiting: this may run in any thread."""
    owner.closed(rollouts)
    owner.start(rollouts.close())
