"""Training steps of TRL's GRPOTrainer, as its users write it or with agentkit's episodes, measured in this process."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import agentkit
from agentkit.envs.countdown import Countdown
from agentkit.trainers.rollout.episode import system_message
from agentkit.trainers.rollout.parser import ActionParser
from benchmarks.peers.games import SlowLine, TRLLine
from benchmarks.peers.models import answer_tokens, opening
from benchmarks.peers.settings import BETAS, LEARNING_RATE, ROLLOUT, SINGLE, Setting, Step

_TASKS = 1000


def countdown_prompt(seed: int) -> list[dict[str, str]]:
    """Return the messages of a task of Countdown, those of agentkit."""
    env = Countdown()
    text, _ = env.reset(seed=seed)
    system = system_message(env.instructions, ActionParser("tagged"))
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def countdown_reward(completions: list[Any], seed: list[int], **columns: Any) -> list[float]:
    """Return the rewards of answers to tasks of Countdown."""
    rewards = []
    for completion, task in zip(completions, seed, strict=True):
        env = Countdown()
        env.reset(seed=task)
        actions = ActionParser("tagged").parse(completion[0]["content"]).actions
        rewards.append(env.step(actions[0])[1] if actions else 0.0)
    return rewards


def completion_tokens(setting: Setting) -> int:
    """Return the tokens of a whole episode after its prompt: the results of all calls but the last one fit."""
    if setting is SINGLE:
        return setting.max_tokens
    _, answer, result = answer_tokens()
    return setting.turns * answer + (setting.turns - 1) * result


class _Clock:
    """Seconds in some functions since the last ``take``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self(part):
                return function(*arguments, **named)

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


def measure(setting: Setting, arm: str, models: Path, steps: int) -> list[Step]:
    """Train for ``steps`` steps from the setting's model; return all but the first one."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from agentkit.integrations.trl import RolloutFunc, episode_reward

    if setting.env == "SlowLine-v0":
        agentkit.register("SlowLine-v0", SlowLine)
    model = AutoModelForCausalLM.from_pretrained(models / setting.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models / setting.model, padding_side="left")
    rollout = None
    if arm == ROLLOUT:
        settings = {"max_turns": setting.turns, "max_context": setting.context, **setting.env_settings}
        rollout = RolloutFunc(
            setting.env, tokenizer, max_tokens=setting.max_tokens, max_groups=setting.episodes, **settings
        )
        data: dict[str, list[Any]] = {"prompt": [str(seed) for seed in range(_TASKS)]}
        given: dict[str, Any] = {"rollout_func": rollout, "reward_funcs": episode_reward}
    elif setting is SINGLE:
        data = {"prompt": [countdown_prompt(seed) for seed in range(_TASKS)], "seed": list(range(_TASKS))}
        given = {"reward_funcs": countdown_reward}
    else:
        messages = [{"role": "system", "content": opening()}, {"role": "user", "content": ""}]
        data = {"prompt": [messages] * _TASKS, "seed": list(range(_TASKS))}
        given = {"environment_factory": TRLLine}

    clock, taken = _Clock(), []

    class Watch(TrainerCallback):
        """Records each step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.cpu = time.perf_counter(), time.process_time()
            clock.take()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now, cpu, parts = time.perf_counter(), time.process_time(), clock.take()
            waiting = parts["_generate_and_score_completions"]
            length = trainer._metrics["train"]["completions/mean_length"][-1]
            step = Step(
                seconds=now - self.began,
                cpu=cpu - self.cpu,
                generation=parts["generate"],
                training=parts["training_step"] - waiting,
                waiting=waiting,
                update=0.0,
                tokens=round(length * setting.episodes),
                episodes=setting.episodes,
            )
            taken.append(step)
            self.began, self.cpu = now, cpu

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict(data),
            callbacks=[Watch()],
            args=GRPOConfig(
                output_dir=directory,
                max_steps=steps,
                per_device_train_batch_size=setting.episodes,
                num_generations=setting.group_size,
                max_completion_length=completion_tokens(setting),
                max_tool_calling_iterations=setting.turns,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                beta=0.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1000,
                disable_tqdm=True,
                report_to=[],
                save_strategy="no",
            ),
            **given,
        )
        for name in ("training_step", "_generate_and_score_completions"):
            setattr(trainer, name, clock.timed(name, getattr(trainer, name)))
        model: Any = trainer.model
        model.generate = clock.timed("generate", model.generate)
        trainer.train()
        if rollout is not None:
            rollout.close()
    return taken[1:]
