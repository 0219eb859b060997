"""Play episodes with verifiers' own code: SCRIPT DIRECTORY.

Runs with the interpreter that has verifiers. The server and its client (over ZMQ), the chat loop, its endpoint and the
traces are verifiers'. The model is a server that answers at random. Prints JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chat_stub
import fragile_lake
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

assert fragile_lake  # registers environments
EXAMPLES = Path(__file__).parents[1] / "examples" / "verifiers"


def read(episode: Any) -> dict[str, Any]:
    """Return what the trainer receives of an episode."""
    (trace,) = episode.traces
    return {
        "ok": episode.ok,
        "key": trace.task.key,
        "seed": trace.task.data.model_extra["seed"],
        "messages": [[node.message.role, node.message.content] for node in trace.nodes],
        "sampled": [node.sampled for node in trace.nodes],
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "episode_errors": [f"{error.type}: {error.message}" for error in episode.errors],
    }


async def play(taskset: dict[str, Any], seeds: list[int], url: str, model: str = "m", **env: Any) -> dict[str, Any]:
    """Play the tasks of these seeds, all at once; return the episodes, and the environments held after them."""
    config = resolve_env_config({"taskset": {"id": "agentkit_envs", **taskset}, **env})
    server = EnvServer(config, "tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup()
        tasks = load_taskset(config.taskset).include(idx=seeds)
        endpoint = EvalClientConfig(base_url=url, api_key_var="NONE")
        runs = [client.run(endpoint, model, SamplingConfig(), task.data.model_dump(mode="json")) for task in tasks]
        episodes = [read(episode) for episode in await asyncio.gather(*runs)]
        assert server.env._episodes is not None
        return {"episodes": episodes, "held": len(server.env._episodes._environments._held)}
    finally:
        await client.close()
        serving.cancel()
        await serving
        assert server.env._episodes is None


def documented(url: str, folder: Path) -> list[dict[str, Any]]:
    """Run the documented command and file; return the episodes that it writes."""
    command = ["vf-eval", "@", EXAMPLES / "eval.toml", "--no-rich", "--client.base-url", url, "--output-dir", folder]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (file,) = folder.rglob("traces.jsonl")
    return [read(WireEpisode.model_validate_json(line)) for line in file.read_text().splitlines()]


async def main(folder: Path, url: str) -> dict[str, Any]:
    lake = {"env": "FrozenLake-v1", "settings": {"max_turns": 4, "kwargs": {"split": "train"}}}
    kwargs = {"failed": str(folder), "always": 5, "size": 2}
    fragile = {"env": "FragileLake-v0", "settings": {"max_turns": 4, "max_failure_share": 0.9, "kwargs": kwargs}}
    retried = {**fragile, "settings": {**fragile["settings"], "recovery": "retry"}}
    sandboxed = {"env": "FrozenLake-v1", "settings": {**lake["settings"], "sandbox": "local"}}
    return {
        "lake": await play(lake, [0, 3, 8], url),
        "replayed": await play(fragile, [0, 7], url),
        "failed": await play(retried, [2, 5], url),
        "retried": await play(retried, [9], url, retries={"max_retries": 1}),
        "sandboxed": await play(sandboxed, [0], url),
        "limited": await play(fragile, [2], url, player={"max_turns": 1}),
        "broken": await play(lake, [0], url, model="broken"),
        "command": documented(url, folder / "outputs"),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    os.environ["PYTHONPATH"] = f"{EXAMPLES}:{os.environ['PYTHONPATH']}"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # vf-eval
    with chat_stub.served() as address:
        print(json.dumps(asyncio.run(main(Path(sys.argv[1]), address))))
