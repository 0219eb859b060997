"""Training steps of agentkit, measured in this process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import agentkit
from benchmarks.peers.games import SlowLine
from benchmarks.peers.settings import ASYNC, BETAS, LEARNING_RATE, THREADS, Setting, Step


def config(setting: Setting, arm: str, models: Path, directory: str, steps: int) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "dir": f"{directory}/run",
        "steps": steps,
        "model": {"path": str(models / setting.model), "device": "cpu", "dtype": "float32"},
        "env": {"id": setting.env, "max_turns": setting.turns, **setting.env_settings},
        "engine": {"max_batch": setting.episodes, "max_context": setting.context, "threads": THREADS},
        "rollout": {
            "groups": setting.groups,
            "group_size": setting.group_size,
            "async_ratio": float(arm == ASYNC),
            "max_tokens": setting.max_tokens,
        },
        "learner": {"lr": LEARNING_RATE, "betas": BETAS, "max_tokens": 2**16, "threads": THREADS},
        "checkpoint": {"every": 0},
        "evaluation": {"episodes": 1},
    }


def measure(setting: Setting, arm: str, models: Path, steps: int) -> list[Step]:
    """Train for ``steps`` steps from the setting's model; return all but the first one."""
    if setting.env == "SlowLine-v0":
        agentkit.register("SlowLine-v0", SlowLine)
    taken: list[Step] = []
    tokens = episodes = 0
    cpu = time.process_time()

    def count(episode: Any) -> None:
        nonlocal tokens, episodes
        if episode.outcome != "voided":
            tokens += sum(len(turn.action_ids) for turn in episode.turns)
            episodes += 1

    def end(step: int, metrics: Any) -> None:
        nonlocal tokens, episodes, cpu
        now, seconds = time.process_time(), metrics["time/step"]
        counted = Step(
            seconds=seconds,
            cpu=now - cpu,
            generation=metrics["engine/busy_share"] * seconds,
            training=metrics["time/train"],
            waiting=metrics["time/wait"],
            update=metrics["time/publish"],
            tokens=tokens,
            episodes=episodes,
        )
        taken.append(counted)
        cpu, tokens, episodes = now, 0, 0

    with tempfile.TemporaryDirectory() as directory:
        agentkit.train(config(setting, arm, models, directory, steps), on_step=end, on_episode=count)
    return taken[1:]
