"""Failures and cancellations of Docker sandboxes: the errors they raise, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import WatchedDocker, make, spec

from agentkit.errors import (
    ImageError,
    SandboxError,
    StartTimeout,
    UnsupportedFeature,
)
from agentkit.sandboxes.agent import seccomp
from agentkit.sandboxes.backends.docker import options as docker_options
from agentkit.sandboxes.backends.docker.engine import DockerEngine
from agentkit.sandboxes.spec import Mount

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.mark.fault(20)
async def test_a_missing_image_is_an_error(docker_backend: WatchedDocker) -> None:
    for image, pull, told in (
        ("agentkit/no-such-image", "missing", "agentkit sandbox build"),
        ("agentkit/no-such-image", "always", "agentkit sandbox build"),
        ("127.0.0.1:1/nothing", "never", "pull='never'"),
        ("127.0.0.1:1/nothing", "missing", "refused"),
        ("Not//A:Name", "missing", "invalid reference"),
    ):
        with pytest.raises(ImageError, match=told):
            await make(docker_backend, spec(image=image, pull=pull))


@pytest.mark.fault(20)
async def test_a_stalled_pull_ends_in_time(docker_backend: WatchedDocker) -> None:
    with socket.socket() as registry:
        registry.bind(("127.0.0.1", 0))
        registry.listen()
        image = f"127.0.0.1:{registry.getsockname()[1]}/stalled"
        began = time.monotonic()
        pulls = [make(docker_backend, spec(image=image, pull_timeout=2)) for _ in range(3)]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        assert [type(result) for result in results] == [ImageError] * 3
        assert time.monotonic() - began < 60


async def test_a_specification_that_the_engine_refuses(docker_backend: WatchedDocker, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="does not exist"):
        await make(docker_backend, spec(mounts=(Mount(source=str(tmp_path / "none"), target="/data"),)))
    with pytest.raises(UnsupportedFeature, match="capability"):
        await make(docker_backend, spec(cap_add=("NO_SUCH",)))


@pytest.mark.slow
@pytest.mark.fault(19)
async def test_a_main_process_that_never_connects(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _main(monkeypatch, "python3", "-c", "import time; print('waiting', flush=True); time.sleep(1000)")
    with pytest.raises(StartTimeout) as caught:
        await make(docker_backend, spec(start_timeout=15))
    assert caught.value.details["phase"] == "agent"
    assert "waiting" in caught.value.details["log_tail"]


@pytest.mark.fault(19)
async def test_a_main_process_that_ends_at_once(docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, "python3", "-c", "print('alas'); raise SystemExit(3)")
    with pytest.raises(StartTimeout, match="alas") as caught:
        await make(docker_backend)
    assert (caught.value.details["phase"], caught.value.details["exit_code"]) == ("agent", 3)


async def test_a_main_process_that_runs_out_of_memory(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _main(monkeypatch, "python3", "-c", "x = bytearray(300_000_000)")
    with pytest.raises(StartTimeout, match="out of memory"):
        await make(docker_backend)


async def test_without_its_filter_no_sandbox_starts(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "program", lambda **_: bytes(8))  # which no kernel takes
    with pytest.raises(StartTimeout, match="refuses a system call filter"):
        await make(docker_backend)


def _main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(docker_options, "MAIN", argv)


Hook = Callable[[str], None]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook, Hook], None]:
    """Call a hook before and after each call of the engine that changes state."""
    real = DockerEngine.call

    def install(before: Hook, after: Hook) -> None:
        async def call(self: DockerEngine, what: str, job: Any, **options: Any) -> Any:
            before(what.split()[0])
            try:
                return await real(self, what, job, **options)
            finally:
                after(what.split()[0])

        monkeypatch.setattr(DockerEngine, "call", call)

    return install


@pytest.mark.parametrize("delay", [0.0, 0.01])
@pytest.mark.fault(19)
async def test_a_cancelled_creation_leaves_nothing(
    docker_backend: WatchedDocker, hooked: Callable[[Hook, Hook], None], delay: float
) -> None:
    calls = 0
    task: asyncio.Task[Any] | None = None
    target = 0

    def count(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == target and task is not None:
            asyncio.get_running_loop().call_later(delay, task.cancel)

    hooked(count, lambda _: None)
    for target in range(1, 12):
        calls = 0
        task = asyncio.ensure_future(make(docker_backend))
        with contextlib.suppress(asyncio.CancelledError):
            id, _ = await task
            await docker_backend.remove(id)
            if calls < target:
                break
        task = None
        assert await docker_backend.left() == []
    assert target > 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.fault(19)
async def test_a_creation_that_the_engine_interrupts_leaves_nothing(
    docker_backend: WatchedDocker, hooked: Callable[[Hook, Hook], None]
) -> None:
    for step in ("create", "start"):

        def fail(what: str, step: str = step) -> None:
            if what == step:
                raise SandboxError("injected")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DockerEngine, "call", DockerEngine.call)
            hooked(lambda _: None, fail)
            with pytest.raises(SandboxError, match="injected"):
                await make(docker_backend)
        hooked(lambda _: None, lambda _: None)
        assert await docker_backend.left() == []
