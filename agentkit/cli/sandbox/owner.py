"""A process that owns one sandbox, for commands that exit before their sandbox ends.

Invariant: the owner process lives as long as its sandbox. It exits when the sandbox is removed, is lost or expires, and
removes the sandbox on SIGTERM. If it is killed, the reaper removes the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys

from agentkit.errors import SandboxError, StartTimeout
from agentkit.sandboxes import paths
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.server.protocol import pack_error, unpack, unpack_error
from agentkit.sandboxes.spec import SandboxSpec

_MARGIN = 60.0
"""Seconds, added to the timeouts of the specification, within which the owner process must answer."""


def start(spec: SandboxSpec, backend: str) -> str:
    """Create a sandbox that outlives this process, and return its id. Block; raise the errors of ``Sandbox.create``."""
    with open(paths.runtime_root() / "owner.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as pipe:
            pipe.write(spec.model_dump_json().encode())
        timeout = spec.pull_timeout + spec.start_timeout + _MARGIN
        if not select.select([process.stdout], [], [], timeout)[0]:
            raise StartTimeout(f"the sandbox was not created within {timeout:g} s", phase="create")
        with process.stdout as pipe:
            answer = pipe.readline()
    except BaseException:
        process.terminate()
        raise
    if not answer:
        raise SandboxError(f"the owner process of the sandbox exited; see {paths.runtime_root() / 'owner.log'}")
    reply = json.loads(answer)
    if "id" not in reply:
        raise unpack_error(answer)
    return reply["id"]


async def _own(spec: SandboxSpec, backend: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        box = await Sandbox.create(spec, backend=backend)
    except Exception as error:
        _answer(pack_error(error))
        raise
    async with box:
        _answer(json.dumps({"id": box.id}).encode())
        async for change in box.events():
            if change.after == "unhealthy":
                break


def _answer(line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line + b"\n")
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_own(unpack(SandboxSpec, sys.stdin.buffer.read()), sys.argv[1]))
