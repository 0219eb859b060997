"""Measure environments in this process, in worker processes and in Docker, side by side with other implementations.

    python -m benchmarks.environments            # 1,000 episodes per row; needs root to read containers' memory
    python -m benchmarks.environments --quick    # a few episodes per row; writes no page
    python -m benchmarks.environments --only Sokoban-v0 AlfWorld-v0    # no page either

Prints one table, and writes ``benchmarks/results/environments.json``, ``docs/results/environments.md`` and a summary in
``docs/environments/index.md``. A separate process measures each row. The machine should be idle: most figures are
times.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import platform
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentkit import registry
from agentkit.envs.base import AsyncTextEnv
from agentkit.envs.isolation.image import build_env_image
from agentkit.errors import AgentkitError
from benchmarks.environments.page import PAGE, figures, summary, table

RESULTS, PAGE_PATH = Path("benchmarks/results/environments.json"), Path("docs/results/environments.md")
OVERVIEW_PATH = Path("docs/environments/index.md")
MARK = "<!-- written by: benchmarks.environments -->"
"""What follows it, up to the next empty line, is replaced by the summary."""
SOKOBAN = Path("benchmarks/results/gym-sokoban")
IMAGE = "agentkit/env:benchmark"
"""The ordinary image, and what AlfWorld and Math need beyond it; a tag of its own leaves the ordinary one alone."""
DOCKER = {"sandbox_spec": {"image": IMAGE}}
PLACES = [
    ("in-process", None, {}),
    ("in-process vector", "async", {}),
    ("process", "process", {}),
    ("Docker", "docker", DOCKER),
]
"""Where, the mode of ``make_vec`` (None for ``make``), arguments."""
OWN_SANDBOXES = {
    "CodeContest-v0": [
        ("in-process, programs local", "async", {"backend": "local"}),
        ("process, programs local", "process", {"backend": "local"}),
        ("in-process, programs in Docker", "async", {}),
    ],
    "SWEBench-v0": [("in-process, shells in Docker", "async", {}), ("process, shells in Docker", "process", {})],
}
"""What holds hidden tests stays outside, and puts into sandboxes what is tested."""
RIVALS = {
    "FrozenLake-v1": [("gymnasium", "Lake", {"text": False}), ("gymnasium, as text", "Lake", {"text": True})],
    "Sokoban-v0": [("gym-sokoban", "Sokoban", {})],
    "AlfWorld-v0": [("TextWorld", "TextWorld", {})],
}
IDS = ["FrozenLake-v1", "Sokoban-v0", "Countdown-v0", "WebShop-v0", "AlfWorld-v0", "Math-v0", *OWN_SANDBOXES]


async def experts(id: str, tasks: int) -> tuple[list[Any], list[Any]]:
    """Return scripts of the expert's episodes, for agentkit and, on the same games, for TextWorld."""

    async def wait(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    local: dict[str, Any] = {"backend": "local"} if id == "CodeContest-v0" else {}
    env = registry.make(id, **local)
    ours, theirs = [], []
    try:
        for seed in range(min(tasks, 3) if id == "SWEBench-v0" else tasks):
            await wait(env.reset(seed=seed))
            plan = list(env.expert())[: env.max_turns * env.actions_per_turn]
            if id == "Math-v0":  # an answer that only those who compute find equal
                plan = [action.replace("\\boxed{", "\\boxed{x = ") for action in plan]
            ours.append((seed, plan))
            theirs.append((str(env.game.path), plan) if id == "AlfWorld-v0" else (seed, random.choices(range(4), k=20)))
    finally:
        await wait(env.close())
    return ours, theirs


def gym_sokoban() -> str:
    """Return a Python that has gym-sokoban. Raises ``CalledProcessError`` if it cannot be installed."""
    python, ready = str(SOKOBAN.absolute() / "bin" / "python"), SOKOBAN / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(SOKOBAN)], check=True, timeout=300)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "gym-sokoban==0.0.6"]
        subprocess.run(install, check=True, timeout=600)
        ready.touch()
    return python


def measured(python: str, order: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one row, or the error."""
    command = [python, "-W", "ignore", "-m", "benchmarks.environments.measure"]
    patience = 4 * order["seconds"] + 300
    try:
        said = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {patience:g} s"}
    if said.returncode:
        return {"error": (said.stderr.strip().splitlines() or ["it died"])[-1]}
    return figures(json.loads(said.stdout), order["instances"])


def rows(id: str, order: dict[str, Any], docker: str | None) -> list[dict[str, Any]]:
    """Measure all rows of one environment; ``docker`` is the reason why Docker is not available, or None."""
    try:
        ours, theirs = asyncio.run(experts(id, min(order["episodes"], 100)))
    except AgentkitError as error:
        return [{"id": id, "where": "", "error": str(error)}]
    if id == "SWEBench-v0":
        order = {**order, "instances": min(order["instances"], 2)}
    found = []
    for where, rival, arguments in RIVALS.get(id, []):
        row = {"id": id, "where": where}
        try:
            python = gym_sokoban() if rival == "Sokoban" else sys.executable
            ordered = {**order, "scripts": theirs, "players": {"kind": rival, **arguments}}
            found.append({**row, **measured(python, ordered)})
        except subprocess.SubprocessError as error:
            found.append({**row, "error": f"cannot be installed: {error}"})
    for where, mode, kwargs in OWN_SANDBOXES.get(id, PLACES):
        row = {"id": id, "where": where}
        if mode is None and issubclass(registry.env_class(id), AsyncTextEnv):
            continue  # coroutines need an event loop, which the vector provides
        if docker is not None and "Docker" in where:
            found.append({**row, "error": docker})
            continue
        vector = {"kind": "Vector", "id": id, "mode": mode, "kwargs": kwargs}
        ordered = {**order, "scripts": ours, "players": vector if mode else {"kind": "Made", "id": id}}
        found.append({**row, **measured(sys.executable, ordered)})
    return found


def no_docker() -> str | None:
    """Build the image. Return None, or the reason why Docker is not available."""
    packages = {"alfworld": "alfworld", "math-verify": "math_verify", "psutil": "psutil"}
    try:
        build_env_image(packages=[p for p, module in packages.items() if find_spec(module)], tag=IMAGE)
    except AgentkitError as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments", description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000, help="episodes per row")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of each half of a row")
    parser.add_argument("--instances", type=int, default=8, help="instances that play at the same time")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=IDS, default=IDS, metavar="ENV")
    arguments = parser.parse_args()
    order = {"episodes": arguments.episodes, "seconds": arguments.seconds, "instances": arguments.instances}
    if arguments.quick:
        order = {"episodes": 6, "seconds": 5.0, "instances": 2}
    begin, docker, found = os.getloadavg()[0], no_docker(), []
    for id in arguments.only:
        found += (added := rows(id, order, docker))
        print(table(added), file=sys.stderr, flush=True)
    machine = (
        f"{os.cpu_count()} CPUs with a load of {begin:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{machine}\n\n{table(found)}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, **order, "rows": found}, indent=1) + "\n")
    if not arguments.quick and arguments.only == IDS:
        PAGE_PATH.write_text(PAGE.format(machine=machine, table=table(found), **order))
        before, mark, rest = OVERVIEW_PATH.read_text().partition(MARK)
        OVERVIEW_PATH.write_text("\n".join([before + mark, summary(found), "", rest.partition("\n\n")[2]]))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
