"""Play episodes with NeMo Gym's own code: SCRIPT DIRECTORY.

Runs with the interpreter that has nemo-gym. The servers of environment, agent and model are processes, as NeMo Gym
starts them; its collection of rollouts asks them. The model behind its model server answers at random. Prints JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chat_stub
import requests
from nemo_gym import global_config, rollout_collection
from omegaconf import DictConfig, OmegaConf

EXAMPLE = Path(__file__).parents[1] / "examples" / "nemo_gym"
INSTALLED = Path(global_config.__file__).parents[1]
SERVER = Path(__file__).with_name("nemo_gym_server.py")


def configure(folder: Path, url: str) -> Any:
    """Return NeMo Gym's configuration: the documented file with FragileLake, and NeMo Gym's own agent beside ours."""
    config = OmegaConf.load(EXAMPLE / "frozen_lake.yaml")
    server = config.frozen_lake.resources_servers.agentkit
    server.env = "FragileLake-v0"
    kwargs = {"failed": str(folder), "always": 5, "size": 2}
    server.settings = {"max_turns": 4, "max_failure_share": 0.9, "recovery": "retry", "kwargs": kwargs}
    agent = config.frozen_lake_agent.responses_api_agents.agentkit_agent
    relay = config.frozen_lake_environment_server.environment_servers.legacy_agent.copy()
    relay.agent_server.name = "plain_agent"
    config.plain_agent = {"responses_api_agents": {"gymnasium_agent": {**agent, "max_steps": 1}}}
    config.plain_environment_server = {"environment_servers": {"legacy_agent": relay}}
    model = OmegaConf.load(INSTALLED / "responses_api_models" / "vllm_model" / "configs" / "vllm_model.yaml")
    policy = {"policy_base_url": url, "policy_api_key": "none", "policy_model_name": "m"}
    merged = OmegaConf.merge(model, config, policy)
    assert isinstance(merged, DictConfig)
    global_config.set_global_config_dict(
        global_config.GlobalConfigDictParserConfig(
            initial_global_config_dict=merged, skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )
    return global_config.get_global_config_dict()


def start(config: Any, folder: Path) -> list[subprocess.Popen]:
    """Start a process for each server, as `gym env start` does."""
    processes = []
    for name, block in config.items():
        if not isinstance(block, DictConfig):
            continue
        kind, inner = next(iter(block.items()))
        if kind not in ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"):
            continue
        server, settings = next(iter(inner.items()))
        place = next(root / kind / server for root in (EXAMPLE, INSTALLED) if (root / kind / server).exists())
        environment = {
            **os.environ,
            "NEMO_GYM_CONFIG_PATH": name,
            "NEMO_GYM_CONFIG_DICT": OmegaConf.to_yaml(config),
        }
        with (folder / f"{name}.log").open("w") as log:
            command = [sys.executable, SERVER]
            processes.append(subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log))
        config[name][kind][server].started = f"http://{settings.host}:{settings.port}/health"
    return processes


def wait(config: Any, processes: list[subprocess.Popen]) -> None:
    """Wait until all servers answer."""
    addresses = [
        server.started
        for block in config.values()
        if isinstance(block, DictConfig)
        for inner in block.values()
        if isinstance(inner, DictConfig)
        for server in inner.values()
        if isinstance(server, DictConfig) and "started" in server
    ]
    assert len(addresses) == len(processes)
    deadline = time.monotonic() + 300
    for address in addresses:
        while True:
            assert all(process.poll() is None for process in processes), "a server has ended"
            assert time.monotonic() < deadline, f"{address} does not answer"
            try:
                if requests.get(address, timeout=5).ok:
                    break
            except requests.RequestException:
                time.sleep(0.2)


async def collect(agent: str, seeds: list[int | None]) -> list[dict[str, Any]]:
    """Collect the rollouts of rows as the documented one, with these seeds; return their results."""
    row = json.loads((EXAMPLE / "tasks.jsonl").read_text().splitlines()[0])
    rows = [{**row, "seed": seed, "agent_ref": {**row["agent_ref"], "name": agent}} for seed in seeds]
    helper = rollout_collection.RolloutCollectionHelper()
    examples = helper.preprocess_examples(rows)
    found = [await one for one in helper.run_examples(examples, route_failures_to_sidecar=True)]
    return [{"agent": agent, "seed": row["seed"], **result} for row, result in found]


async def main() -> list[dict[str, Any]]:
    return [*await collect("frozen_lake_agent", [0, 2, 5, None]), *await collect("plain_agent", [0, 4, 5])]


if __name__ == "__main__":
    with chat_stub.served() as url:
        target = Path(sys.argv[1])
        settings = configure(target, url)
        os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(settings)
        servers = start(settings, target)
        try:
            wait(settings, servers)
            rollouts = asyncio.run(main())
        finally:
            for process in servers:
                process.terminate()
            for process in servers:
                process.wait(30)
        (held,) = re.findall(r"held at the end: (\d+)", (target / "frozen_lake.log").read_text())
        print(json.dumps({"rollouts": rollouts, "held": int(held)}, default=str))
