"""Measure sandboxes side by side with the docker SDK's ``exec_run``, the plain engine and SWE-ReX, on a real engine.

    python -m benchmarks.sandbox            # some minutes; needs root to read the memory of the agents
    python -m benchmarks.sandbox --quick    # the same with few repeats; writes no page

Prints one table, and writes ``benchmarks/results/sandbox.json`` and ``docs/results/sandbox.md``. ``.ci/docker`` makes
the engine and the images. The machine should be idle: most figures are times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from docker import DockerClient

from agentkit.envs.isolation.image import build_env_image
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.backends.docker.backend import DockerBackend
from agentkit.sandboxes.spec import DEFAULT_IMAGE
from benchmarks.sandbox import ours, swe_rex
from benchmarks.sandbox.figures import PAGE, Figure, table

RESULTS = Path("benchmarks/results/sandbox.json")
PAGE_PATH = Path("docs/results/sandbox.md")


async def awaited(client: DockerClient, quick: bool) -> list[Figure]:
    """Return all figures that are measured by coroutines."""
    backend = DockerBackend()
    await backend.start()
    figures: list[Figure] = []

    def add(found: list[Figure]) -> None:
        print(table(found).partition("|---|\n")[2], end="", file=sys.stderr, flush=True)
        figures.extend(found)

    try:
        boxes = [await Sandbox.create(backend=backend) for _ in range(ours.AT_ONCE)]
        try:
            await ours.exec_latency(boxes[0], client, 1)
            add(await ours.exec_latency(boxes[0], client, 2 if quick else 20))
            add(await ours.exec_rate(boxes, client, 0.5 if quick else 5))
            add(ours.agent_memory(boxes, client))
            add(await ours.crash(boxes[:3] if quick else boxes, client))
        finally:
            await asyncio.gather(*(box.close() for box in boxes))
        add(await ours.create(backend, client, 3 if quick else 25))
        add(await ours.acquire(backend, "running", 20 if quick else 200))
        add(await ours.acquire(backend, "paused", 20 if quick else 200))
        add(await ours.recovery(backend, client, 2 if quick else 20))
        add(await ours.density(backend, client, 8 if quick else 150))
    finally:
        await backend.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--swe-rex-venv", type=Path, default=Path("benchmarks/results/swe-rex"))
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    client = DockerClient.from_env(timeout=120, max_pool_size=ours.AT_ONCE)
    begin = os.getloadavg()[0]
    build_env_image()
    rivals = swe_rex.measure(arguments.swe_rex_venv, DEFAULT_IMAGE, 20 if quick else 300)
    figures = asyncio.run(awaited(client, quick))
    figures += ours.sync_latency(50 if quick else 1000)
    figures += ours.env_step(20 if quick else 500)
    figures += ours.orphans(client, 3 if quick else 20)
    figures += rivals
    machine = (
        f"{os.cpu_count()} CPUs with a load of {begin:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end, "
        f"Linux {platform.release()}, Docker {client.version()['Version']}, Python {platform.python_version()}."
    )
    print(f"{machine}\n\n{table(figures)}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(figure), "met": figure.met} for figure in figures]
    RESULTS.write_text(json.dumps({"machine": machine, "quick": quick, "figures": rows}, indent=1) + "\n")
    if not quick:
        PAGE_PATH.write_text(PAGE.format(machine=machine, table=table(figures)))
    missed = [figure.name for figure in figures if figure.met is False]
    print(f"targets missed: {'; '.join(missed) or 'none'}; written to {RESULTS}")


if __name__ == "__main__":
    main()
