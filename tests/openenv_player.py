"""Play an OpenEnv server with OpenEnv's own client; runs with the interpreter that has it: SCRIPT URL PLANS.

``PLANS`` is JSON: actions by seed. Prints JSON: by seed, the texts, rewards and the last metadata of an episode.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]


def play(url: str, plans: dict[str, list[str]]) -> dict[str, Any]:
    """Play all episodes at the same time, with the synchronous client: one action of each in turn."""
    clients = {seed: GenericEnvClient(base_url=url).sync() for seed in plans}
    played: dict[str, Any] = {}
    try:
        for seed, client in clients.items():
            result = client.reset(seed=int(seed), episode_id=seed)
            played[seed] = {"texts": [result.observation["text"]], "rewards": []}
        for turn in range(max(map(len, plans.values()))):
            for seed, plan in plans.items():
                if turn < len(plan):
                    result = clients[seed].step({"text": plan[turn]})
                    _add(played[seed], result)
                    played[seed]["state"] = clients[seed].state()
    finally:
        for client in clients.values():
            client.close()
    return played


async def play_async(url: str, plans: dict[str, list[str]]) -> dict[str, Any]:
    """Play all episodes concurrently with the asynchronous client."""

    async def episode(seed: str) -> Any:
        async with GenericEnvClient(base_url=url) as client:
            result = await client.reset(seed=int(seed), episode_id=seed)
            played = {"texts": [result.observation["text"]], "rewards": []}
            for action in plans[seed]:
                _add(played, await client.step({"text": action}))
                played["state"] = await client.state()
            return played

    return dict(zip(plans, await asyncio.gather(*map(episode, plans)), strict=True))


async def errors(url: str) -> list[str]:
    """Return the messages that the client raises for a wrong action and for a step without an episode."""
    said = []
    async with GenericEnvClient(base_url=url) as client:
        for action in ({"text": "Up"}, {"words": "Up"}):
            try:
                await client.step(action)
            except RuntimeError as error:
                said.append(str(error))
    return said


def _add(played: dict[str, Any], result: Any) -> None:
    played["texts"].append(result.observation["text"])
    played["rewards"].append(result.reward)
    played["done"], played["metadata"] = result.done, result.metadata


if __name__ == "__main__":
    address, tasks = sys.argv[1], json.loads(sys.argv[2])
    results = {
        "sync": play(address, tasks),
        "async": asyncio.run(play_async(address, tasks)),
        "errors": asyncio.run(errors(address)),
    }
    print(json.dumps(results))
