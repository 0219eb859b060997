"""What sandboxes cost, beside the docker SDK's ``exec_run``, the bare engine and SWE-ReX, in one run on a real engine.

    python -m benchmarks.sandbox            # some ten minutes; root, for it looks at the memory of the agents
    python -m benchmarks.sandbox --quick    # the same with few repeats, in less than a minute; writes no page

Prints one table, and writes ``benchmarks/results/sandbox.json`` and ``docs/results/sandbox.md``. The engine and the
images are what ``.ci/docker`` and ``agentkit sandbox build`` make. The machine should be quiet: most figures are times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.backends.docker import DockerBackend
from agentkit.sandboxes.images import build_environments
from benchmarks.sandbox import hot, life, swe_rex
from benchmarks.sandbox.figures import Figure, page, table
from docker import DockerClient


async def warm(client: DockerClient, quick: bool) -> list[Figure]:
    """Everything that is asked of sandboxes by coroutines."""
    backend = DockerBackend()
    await backend.start()
    figures: list[Figure] = []
    try:
        boxes = [await Sandbox.create(backend=backend) for _ in range(hot.AT_ONCE)]
        try:
            for _ in range(20):
                await boxes[0].exec(hot.TRUE)
            figures += await hot.exec_latency(boxes[0], client, 2 if quick else 20)
            figures += await hot.exec_rate(boxes, client, 320 if quick else 8000)
            figures += hot.agent_memory(boxes, client)
        finally:
            await asyncio.gather(*(box.close() for box in boxes))
        figures += await life.create(backend, client, 3 if quick else 25)
        for kind in ("running", "paused"):
            figures += await life.acquire(backend, kind, 20 if quick else 200)
        figures += await life.crash(backend, client, 3 if quick else 20)
        figures += await life.recovery(backend, client, 2 if quick else 20)
        figures += await life.density(backend, 8 if quick else 150)
    finally:
        await backend.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sandbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--swe-rex-venv", type=Path, default=Path("benchmarks/results/swe-rex"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/sandbox.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/sandbox.md"))
    arguments = parser.parse_args()
    quick = arguments.quick
    client = DockerClient.from_env(timeout=120, max_pool_size=hot.AT_ONCE)
    load, version = os.getloadavg()[0], client.version()
    machine = (
        f"{os.cpu_count()} CPUs with a load of {load:.1f} at the start, Linux {platform.release()}, "
        f"Docker {version['Version']}, Python {platform.python_version()}."
    )
    print(machine, flush=True)
    build_environments()
    figures = asyncio.run(warm(client, quick))
    figures += hot.sync_latency(50 if quick else 1000)
    figures += hot.env_step(200 if quick else 5000)
    figures += life.orphans(client, 3 if quick else 20)
    figures += swe_rex.measure(arguments.swe_rex_venv, 20 if quick else 300)
    print(f"\n{table(figures)}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(figure), "met": figure.met} for figure in figures]
    arguments.json.write_text(json.dumps({"machine": machine, "quick": quick, "figures": rows}, indent=1) + "\n")
    if not quick:
        arguments.page.write_text(page(figures, machine))
    missed = [figure.name for figure in figures if figure.met is False]
    print(f"{len(missed)} targets missed{': ' if missed else ''}{'; '.join(missed)}\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
