"""Play episodes with SkyRL's own code: SCRIPT DIRECTORY.

Runs with the interpreter that has SkyRL. The dataset, the generator with its agent loop and its threads, the metrics
and the advantages are SkyRL's. Only the inference engine is not: it chooses answers at random, and scores them with a
real model. Prints JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fragile_lake
import numpy as np
import pandas as pd
import skyrl_gym
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import prepare_generator_input

from agentkit.integrations import skyrl_gym as adapter
from agentkit.portal import portal
from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer

assert fragile_lake  # registers environments
EXAMPLES = Path(__file__).parents[1] / "examples" / "skyrl"
ACTIONS = ("Down", "Right", "Down", "Right", "Left", "Up")


class Engine:
    """Stands for SkyRL's client of its inference servers: the same methods, the same results."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer, self._model = quickstart_tokenizer(), quickstart_model(0)
        self._random = random.Random(0)
        self.finished: list[str] = []
        self.fails_after: int | None = None

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise ConnectionError("the server is gone")
        (prompt_ids,) = batch["prompt_token_ids"]
        valid = self.tokenizer.decode(prompt_ids).count("<answer>") < 3 or self._random.random() < 0.7
        answer = f"<answer>{self._random.choice(ACTIONS)}</answer>" if valid else "I do not know."
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        return {
            "responses": self.tokenizer.batch_decode([ids]),  # with special tokens, as SkyRL's client does
            "response_ids": [ids],
            "stop_reasons": ["stop"],
            "response_logprobs": [logprobs.tolist()],
        }

    async def finish_session(self, session: str) -> None:
        self.finished.append(session)


def load(name: str) -> Any:
    """Import a documented script."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(tokenizer: Any, config: Any, folder: Path, rows: list[tuple[int, str]]) -> Any:
    """Return the input of the generator for rows of SkyRL's dataset, as its trainer makes it."""
    row = load("tasks").row
    pd.DataFrame([row(*task) for task in rows]).to_parquet(folder / "tasks.parquet")
    dataset = PromptDataset(str(folder / "tasks.parquet"), tokenizer, 512, num_workers=1)
    items = dataset.collate_fn([dataset[k] for k in range(len(dataset))])
    sampling = asdict(config.generator.sampling_params)
    return prepare_generator_input(items, config.generator.n_samples_per_prompt, sampling, "frozen_lake", "train", 1)


def held() -> int:
    """Return the number of environments that episodes hold."""
    return sum(len(episodes._environments._held) for episodes in adapter._shared.values())


def failure(generator: Any, given: Any) -> dict[str, Any]:
    """Return the error of a generator, and the environments that are held after it."""

    async def play() -> str:
        try:
            await generator.generate(given, disable_tqdm=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:  # the other episodes of the batch go on
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
        return ""

    said = asyncio.run(play())
    deadline = time.monotonic() + 20
    while held() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return {"error": said, "held": held()}


def main() -> None:
    folder = Path(sys.argv[1])
    example = load("main")
    example.register()
    fragile = {"failed": str(folder), "always": 5, "size": 2}
    for name, settings in (("lake", {"recovery": "retry"}), ("replayed", {"kwargs": {**fragile, "always": 6}})):
        skyrl_gym.register(
            id=name,
            entry_point="agentkit.integrations.skyrl_gym:AgentkitEnv",
            kwargs={"env": "FragileLake-v0", "max_failure_share": 0.9, "kwargs": fragile, **settings},
        )
    config = SkyRLTrainConfig.from_cli_overrides(
        ["generator.max_turns=4", "generator.n_samples_per_prompt=2", "generator.max_input_length=2048"]
    )
    config.generator.chat_template_kwargs = {}
    engine, tokenizer = Engine(), quickstart_tokenizer()
    generator = example.Experiment.get_generator(None, config, tokenizer, engine)
    rows = [(0, "frozen_lake"), (0, "lake"), (3, "lake"), (7, "replayed")]
    given, uids = batch(tokenizer, config, folder, rows)
    out = asyncio.run(generator.generate(given, disable_tqdm=True))
    found = []
    for k in range(len(uids)):
        one = {name: out[name][k] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")}
        one |= {"logprobs": out["rollout_logprobs"][k], "metrics": out["env_metrics"][k]}
        found.append({**one, "seed": rows[k // 2][0], "env": rows[k // 2][1]})
    longest = max(len(row["rewards"]) for row in found)
    rewards = torch.tensor([[*row["rewards"], *[0.0] * (longest - len(row["rewards"]))] for row in found])
    mask = torch.tensor([[*row["loss_masks"], *[0] * (longest - len(row["loss_masks"]))] for row in found])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(uids), grpo_norm_by_std=False)
    for row, advantage in zip(found, advantages, strict=True):
        row["advantages"] = advantage[: len(row["rewards"])].tolist()
    result = {"rows": found, "metrics": out["rollout_metrics"], "held": held(), "finished": engine.finished}
    plain = SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, engine, tokenizer)
    for name, player, task in (("always", generator, (5, "lake")), ("plain", plain, (9, "lake"))):
        result[name] = failure(player, batch(tokenizer, config, folder, [task, (0, "lake")])[0])
    engine.fails_after = 3
    result["engine"] = failure(generator, batch(tokenizer, config, folder, [(0, "lake"), (2, "lake")])[0])
    for name, row in (("no_seed", {}), ("bad_seed", {"extra_info": {"seed": "x"}})):
        try:
            env = skyrl_gym.make("frozen_lake", extras={**row, "max_turns": 4})
            env.init([])
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    env = skyrl_gym.make("frozen_lake", extras={"extra_info": {"seed": 1}, "max_turns": 4})
    env.init([])
    result["playing"] = held()
    env.close()
    env.close()
    result["closed"] = held()
    skyrl_gym.register(
        "plain", "agentkit.integrations.skyrl_gym:AgentkitEnv", {"env": "FrozenLake-v1", "parser": "plain"}
    )
    env = skyrl_gym.make("plain", extras={"extra_info": {"seed": 1}, "max_turns": 4})
    env.init([])
    result["plain_answers"] = [env.step(text)["metadata"] for text in ("Up<|im_end|>", "Up", "<|im_end|>")]
    env.close()
    for episodes in adapter._shared.values():
        portal().run(episodes.close())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
