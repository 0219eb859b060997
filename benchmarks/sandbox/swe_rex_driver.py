"""What SWE-ReX takes, as JSON; run by the Python of an environment that has it.

    python swe_rex_driver.py IMAGE PACKAGES LAUNCHER CALLS

Its own Docker deployment starts the container and its own client asks the server in there. Nothing is installed in the
image: ``PACKAGES`` (site-packages with swe-rex) and ``LAUNCHER`` (found there as ``swerex-remote``) are mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable
from typing import Any

from swerex.deployment.docker import DockerDeployment  # pyright: ignore[reportMissingImports]
from swerex.runtime.abstract import (  # pyright: ignore[reportMissingImports]
    BashAction,
    Command,
    CreateBashSessionRequest,
)


async def timed(work: Awaitable[Any]) -> float:
    begin = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begin)


async def measure(image: str, packages: str, launcher: str, calls: int) -> dict[str, Any]:
    mounts = ["-v", f"{packages}:/opt/swe-rex:ro", "-v", f"{launcher}:/usr/local/bin/swerex-remote:ro"]
    environment = ["-e", "PYTHONPATH=/opt/swe-rex", "-e", "HOME=/tmp"]
    deployment = DockerDeployment(image=image, pull="never", docker_args=[*mounts, *environment])
    start = await timed(deployment.start())
    try:
        runtime = deployment.runtime
        runtime._config.timeout = 60.0  # of a request; it waits with a far shorter one for the server to come up

        def true() -> Awaitable[Any]:
            return runtime.execute(Command(command=["true"], timeout=60))

        for _ in range(5):
            await true()
        execute = [await timed(true()) for _ in range(calls)]
        line = iter(range(2 * calls))

        async def caller() -> None:
            for _ in line:
                await true()

        at_once = await timed(asyncio.gather(*(caller() for _ in range(16))))
        await runtime.create_session(CreateBashSessionRequest())
        session = [await timed(runtime.run_in_session(BashAction(command="true"))) for _ in range(max(5, calls // 10))]
    finally:
        await deployment.stop()
    return {"start": start, "execute": execute, "per_s": 2e3 * calls / at_once, "session": session}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # it prints, too
        found = asyncio.run(measure(*sys.argv[1:4], int(sys.argv[4])))
    print(json.dumps(found))
