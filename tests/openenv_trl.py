"""Train a tiny model with TRL on an OpenEnv server, through OpenEnv's own client: SCRIPT SITE_PACKAGES URL DIRECTORY.

Runs with the interpreter that has OpenEnv; torch, transformers and TRL come from ``SITE_PACKAGES``. The model first
learns by heart to call the tool, because a fresh one would never act. Prints JSON: the log of the training, and the
number of actions.
"""

from __future__ import annotations

import json
import os
import site
import sys
from pathlib import Path
from typing import Any

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

site.addsitedir(sys.argv[1])
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import torch
import trl
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer

ACTIONS = ("Left", "Down", "Right", "Up")
PROMPT = [{"role": "user", "content": "Play."}]
STEPS, TASKS = 140, 2
taken: list[str] = []


class Lake:
    """An episode on the server: TRL offers ``act`` to the model, and calls the rest."""

    def __init__(self) -> None:
        self._client = GenericEnvClient(base_url=sys.argv[2]).sync()
        self._return: float | None = None
        self._moves, self._done = 0, False

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin an episode."""
        self._return, self._moves, self._done = 0.0, 0, False
        shown = self._client.reset(seed=seed).observation
        return f"{shown['instructions']}\n{shown['text']}"

    def act(self, action: str) -> str:
        """Move.

        Args:
            action: Left, Down, Right or Up.

        Returns:
            The lake after the move.
        """
        if self._done or self._return is None:
            return "The episode is over."
        try:
            result = self._client.step({"text": action})
        except (RuntimeError, ConnectionError, TimeoutError):
            self._return = None  # the environment failed: TRL leaves this episode out
            return "The environment failed."
        taken.append(action)
        self._moves += 1
        self._return += result.reward
        self._done = result.done
        return result.observation["text"]

    def get_reward(self) -> float | None:
        """Return the reward of the episode, with a share for each move; None if the environment failed."""
        return None if self._return is None else self._return + 0.1 * self._moves


def learn_to_call(model: Any, tokenizer: Any) -> None:
    """Teach the model to answer each task with one call."""
    lake = Lake()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        asked = [{"role": "user", "content": PROMPT[0]["content"] + lake.reset(seed=step % TASKS)}]
        call = {"type": "function", "function": {"name": "act", "arguments": {"action": ACTIONS[step % 5 % 4]}}}
        answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        texts = [
            tokenizer.apply_chat_template(asked, tools=[lake.act], add_generation_prompt=True, tokenize=False),
            tokenizer.apply_chat_template(answered, tools=[lake.act], tokenize=False),
        ]
        prompt, ids = (tokenizer(text, return_tensors="pt").input_ids for text in texts)
        labels = ids.clone()
        labels[:, : prompt.shape[1]] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lake._client.close()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = quickstart_model(0).train(), quickstart_tokenizer()
    tokenizer.padding_side = "left"
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    learn_to_call(model, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=sys.argv[3],
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=256,
            max_tool_calling_iterations=2,
            learning_rate=1e-4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "seed": seed} for seed in range(TASKS)]),
        processing_class=tokenizer,
        environment_factory=Lake,
    )
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    print(json.dumps({"log": trainer.state.log_history, "actions": taken, "changed": changed}))


if __name__ == "__main__":
    main()
