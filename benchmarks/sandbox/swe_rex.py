"""Measure SWE-ReX with its own Docker deployment and client, in a separate virtual environment.

``measure`` installs SWE-ReX from the package index and runs this module there, which prints the times as JSON. Nothing
is installed in the image: the environment's packages and a launcher are mounted into the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from benchmarks.sandbox.figures import Figure, p, timed

PACKAGES = ("swe-rex==1.4.0", "aiohttp")  # it imports the second without asking for it


def measure(venv: Path, image: str, calls: int) -> list[Figure]:
    """Return SWE-ReX's times. Raises ``CalledProcessError`` if it cannot be installed or does not run in the image."""
    python, ready = str(venv.absolute() / "bin" / "python"), venv / "ready"
    if not ready.exists():
        _run(sys.executable, "-m", "venv", str(venv))
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES)
        ready.touch()
    site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    launcher = venv.absolute() / "swerex-remote"
    launcher.write_text('#!/bin/sh\nexec python3 -m swerex "$@"\n')
    launcher.chmod(0o755)
    found = json.loads(_run(python, "-m", "benchmarks.sandbox.swe_rex", image, site, str(launcher), str(calls)))
    return [
        Figure("SWE-ReX `execute` of `true`, p50", p(found["execute"], 50), "ms"),
        Figure("SWE-ReX `run_in_session` of `true`, p50", p(found["session"], 50), "ms"),
        Figure("SWE-ReX `execute`/s, 16 at once", 1e3 * len(found["execute"]) / found["at_once"], "/s"),
        Figure("SWE-ReX deployment until ready to work", found["start"], "ms"),
    ]


def _run(*command: str) -> str:
    return subprocess.check_output(
        command, text=True, timeout=900, env={**os.environ, "SWE_REX_LOG_STREAM_LEVEL": "ERROR"}
    )


async def drive(image: str, site: str, launcher: str, calls: int) -> dict[str, Any]:
    """Return milliseconds; runs in the Python that has SWE-ReX."""
    from swerex.deployment.docker import DockerDeployment  # pyright: ignore[reportMissingImports]
    from swerex.runtime import abstract as rex  # pyright: ignore[reportMissingImports]

    mounts = ["-v", f"{site}:/opt/swe-rex:ro", "-v", f"{launcher}:/usr/local/bin/swerex-remote:ro"]
    environment = ["-e", "PYTHONPATH=/opt/swe-rex", "-e", "HOME=/tmp"]
    deployment = DockerDeployment(image=image, pull="never", docker_args=[*mounts, *environment])
    start = await timed(deployment.start())
    try:
        runtime = deployment.runtime
        runtime._config.timeout = 60.0  # of a request; that of its deployment is for a server that comes up

        def true() -> Awaitable[Any]:
            return runtime.execute(rex.Command(command=["true"], timeout=60))

        execute = [await timed(true()) for _ in range(calls + 5)][5:]
        line = iter(execute)

        async def caller() -> None:
            for _ in line:
                await true()

        at_once = await timed(asyncio.gather(*(caller() for _ in range(16))))
        await runtime.create_session(rex.CreateBashSessionRequest())
        session = [await timed(runtime.run_in_session(rex.BashAction(command="true"))) for _ in range(10)]
    finally:
        await deployment.stop()
    return {"start": start, "execute": execute, "at_once": at_once, "session": session}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # it prints, too
        taken = asyncio.run(drive(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
    print(json.dumps(taken))
