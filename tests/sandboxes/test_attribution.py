"""A failure of a sandbox is external only if the host or the engine recorded a cause outside of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import SMALL, WatchedDocker
from local_harness import runtime_directory
from relay import engine_relay

from agentkit import errors
from agentkit.errors import EngineUnavailable, SandboxError, SandboxLost
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.attribution import Cause, cause_of, decide
from agentkit.sandboxes.backends.local.state import load

__all__ = ["runtime_directory"]


def lost(reason: str, **details: Any) -> SandboxLost:
    return SandboxLost("lost", reason=reason, **details)


@pytest.mark.parametrize(
    ("error", "recorded", "cause"),
    [
        (lost("agent_dead"), {}, "unexplained"),
        (lost("agent_dead"), {"reason": "exited", "external": False}, "unexplained"),
        (lost("agent_dead"), {"reason": "exited", "external": True}, "external"),
        (lost("agent_dead"), {"reason": "removed", "external": True}, "external"),
        (lost("agent_dead"), {"reason": "oom"}, "program"),
        (lost("oom"), {}, "program"),
        (lost("oom"), {"reason": "oom", "external": True}, "external"),
        (lost("tainted"), {}, "program"),
        (lost("exited"), {}, "unexplained"),
        (lost("hung"), {}, "unexplained"),
        (lost("slow"), {}, "unexplained"),
        (lost("hung"), {"reason": "frozen", "external": True}, "external"),
        (lost("frozen"), {}, "external"),
        (lost("engine_down"), {}, "external"),
        (lost("removed"), {}, "external"),
        (lost("replaced"), {}, "external"),
        (
            lost("agent_dead", external=True, log_tail="external"),
            {},
            "unexplained",
        ),  # data from the sandbox is ignored
        (errors.EngineUnavailable("down"), {}, "external"),
        (errors.BreakerOpen("down"), {}, "external"),
        (errors.PoolExhausted("busy"), {}, "external"),
        (errors.StartTimeout("late"), {}, "external"),
        (errors.SandboxExpired("old"), {}, "external"),
        (errors.InvalidTransition("paused"), {}, "external"),
        (errors.ResourcesExhausted("no process left"), {}, "unexplained"),
        (errors.DiskFull("no space left"), {}, "unexplained"),
        (errors.PathError("not permitted"), {}, "unexplained"),
        (errors.CommandNotFound("no directory"), {}, "unexplained"),
        (errors.ProtocolError("garbage"), {}, "unexplained"),
        (errors.ExecFailed("ended with 1"), {}, "unexplained"),
        (SandboxError("anything"), {}, "unexplained"),
    ],
)
def test_table(error: SandboxError, recorded: Mapping[str, Any], cause: Cause) -> None:
    assert decide(error, recorded) == cause


async def cause_while_working(box: Sandbox, end: Any) -> Cause:
    """End a sandbox during a command and attribute the error of the command."""
    work = asyncio.ensure_future(box.exec("echo begun; sleep 600", timeout=600))
    await asyncio.sleep(0.5)
    await end()
    with pytest.raises(SandboxError) as caught:
        await work
    return await cause_of(caught.value, box)


@pytest.mark.docker
@pytest.mark.parametrize("action", ["kill", "stop", "remove", "kill while idle"])
async def test_requests_to_the_engine_are_external(docker_backend: WatchedDocker, action: str) -> None:
    async with Sandbox.create(SMALL, backend=docker_backend) as box:
        for _ in range(2):  # the requested ends of earlier generations are ignored
            await box.restart()

        def ask(client: Any) -> None:
            if action == "remove":
                client.remove_container(box.id, force=True)
            elif action == "stop":
                client.stop(box.id, timeout=1)
            else:
                client.kill(box.id)

        async def end() -> None:
            await docker_backend.engine.call(action, ask)

        if action == "kill while idle":
            await end()
            await asyncio.sleep(1)
            with pytest.raises(SandboxLost) as caught:
                await box.exec("true")
            assert await cause_of(caught.value, box) == "external"
        else:
            assert await cause_while_working(box, end) == "external"


@pytest.mark.docker
async def test_kill_from_the_host_is_unexplained(docker_backend: WatchedDocker) -> None:
    """Also after a restart, which the engine records as a kill."""
    async with Sandbox.create(SMALL, backend=docker_backend) as box:
        await box.restart()

        async def end() -> None:
            found = await docker_backend.engine.call("inspect", lambda client: client.inspect_container(box.id))
            os.kill(found["State"]["Pid"], signal.SIGKILL)

        assert await cause_while_working(box, end) == "unexplained"


@pytest.mark.docker
async def test_unreachable_engine_is_external(docker_backend: WatchedDocker, tmp_path: Path) -> None:
    async with engine_relay(tmp_path, docker_backend.engine.socket) as relay:
        backend = WatchedDocker(relay.host)
        await backend.start()
        try:
            async with Sandbox.create(SMALL, backend=backend) as box:
                found = await backend.engine.call("inspect", lambda client: client.inspect_container(box.id))

                async def end() -> None:
                    await relay.refuse()
                    os.kill(found["State"]["Pid"], signal.SIGKILL)

                assert await cause_while_working(box, end) == "external"
                await relay.open()
        finally:
            await backend.close()


@pytest.mark.usefixtures("runtime_directory")
async def test_kill_of_a_local_sandbox_is_unexplained() -> None:
    async with Sandbox.create(SMALL, backend="local") as box:
        state = load(box.id)
        assert state is not None

        async def end() -> None:
            for process in state.processes:
                os.kill(process.pid, signal.SIGKILL)

        assert await cause_while_working(box, end) == "unexplained"
    assert await cause_of(EngineUnavailable("down"), box) == "external"
