"""A separate container engine for tests, which can be stopped, started and frozen without affecting others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import docker

from agentkit.sandboxes.spec import DEFAULT_IMAGE

STARTS_WITHIN = 120.0


class PrivateEngine:
    """A ``dockerd`` with its own data, runtime directory, pid file and socket, and no network."""

    def __init__(self) -> None:
        # A short path: a socket's is at most 108 bytes long.
        self.root = Path(tempfile.mkdtemp(prefix="akd-", dir="/tmp"))
        self.host = f"unix://{self.root}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        options = {
            "data-root": self.root / "data",
            "exec-root": self.root / "exec",
            "pidfile": self.root / "pid",
            "host": self.host,
            "bridge": "none",
            "iptables": "false",
            "ip-forward": "false",
            "shutdown-timeout": "2",
        }
        # In a network namespace of its own: `bridge=none` removes the interface docker0, the other engine's otherwise.
        command = ["unshare", "--net", "dockerd", *(f"--{name}={value}" for name, value in options.items())]
        self._process = self._begin(command)
        end = asyncio.get_running_loop().time() + STARTS_WITHIN
        while not await asyncio.to_thread(self._answers):
            tail = (self.root / "log").read_text()[-2000:]
            assert self._process.poll() is None, f"the private engine ended: {tail}"
            assert asyncio.get_running_loop().time() < end, f"the private engine does not answer: {tail}"
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """Stop the engine; without live restore, all its containers end with it."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, 120)
            self._process = None

    def freeze(self) -> None:
        """Freeze the engine: it accepts connections but does not respond."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def take_image(self, image: str = DEFAULT_IMAGE) -> None:
        """Copy an image from the machine's usual engine."""
        await asyncio.to_thread(self._take_image, image)

    def _take_image(self, image: str) -> None:
        archive = self.root / "image.tar"
        with (
            contextlib.closing(docker.from_env(timeout=300)) as source,
            contextlib.closing(docker.DockerClient(self.host, timeout=300)) as target,
        ):
            with archive.open("wb") as file:
                file.writelines(source.images.get(image).save(named=True))
            with archive.open("rb") as file:
                target.images.load(file)
        archive.unlink()

    def _begin(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.root / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _answers(self) -> bool:
        try:
            with contextlib.closing(docker.DockerClient(self.host, timeout=5)) as client:
                return bool(client.ping())
        except Exception:
            return False

    def remove(self) -> None:
        """Unmount what a container may have left mounted, and delete everything."""
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True, timeout=30)
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.asynccontextmanager
async def private_engine() -> AsyncIterator[PrivateEngine]:
    """A running private engine with the base image. Needs root."""
    engine = PrivateEngine()
    try:
        await engine.start()
        await engine.take_image()
        yield engine
    finally:
        try:
            await engine.stop()
        finally:
            engine.remove()


def may_run_one() -> bool:
    return os.geteuid() == 0 and shutil.which("dockerd") is not None
