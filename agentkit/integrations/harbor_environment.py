"""Sandboxes of agentkit as an environment of Harbor 0.25: ``harbor run --env MODULE:AgentkitEnvironment``.

Invariant: commands run as the user that Harbor names, and no sandbox outlives the process of Harbor that started it.
Needs Harbor's own package, and is imported by Harbor only.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import posixpath
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import (
    BaseEnvironment,
    ExecResult,
    SandboxBuildFailedError,
)
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.environments.definition import (
    require_agent_environment_definition,
)

from agentkit.errors import ImageError
from agentkit.integrations import harbor_sandbox, harbor_tasks
from agentkit.integrations.harbor_tasks import Environment, Phase
from agentkit.sandboxes.agent.launch import bundled_python
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.images import dockerfiles
from agentkit.sandboxes.sandbox import Sandbox

_LONGEST = 24 * 3600.0
"""Seconds of a command without a limit."""
_AS_USER = (
    "import os, sys\n"
    "uid, gid = map(int, sys.argv[1:3])\n"
    "os.setgroups([gid]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)\n"
    "shell = '/bin/bash' if os.path.exists('/bin/bash') else '/bin/sh'\n"
    "os.execv(shell, [shell, '-c', sys.argv[3]])\n"
)
"""Runs the command ``argv[3]`` as the user and group ``argv[1:3]``, independent of the programs of the image."""


class AgentkitEnvironment(BaseEnvironment):
    """A sandbox of agentkit in which an agent of Harbor works and the tests of its task run.

    Args:
        *args: arguments of Harbor.
        backend: name of the back end of the sandboxes, which must have images.
        **kwargs: arguments of Harbor.
    """

    def __init__(self, *args: Any, backend: str = "docker", **kwargs: Any) -> None:
        check_backend("backend", backend)
        self._backend = backend
        self._box: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "agentkit"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv6_cidrs=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        image = self.task_env_config.docker_image
        require_agent_environment_definition(self.environment_dir, docker_image=image)
        if not image and not (self.environment_dir / "Dockerfile").exists():
            raise ValueError(f"{self.environment_dir} has no Dockerfile; agentkit does not run Docker Compose")
        if self._host_mounts:
            raise ValueError("agentkit mounts no folders of this machine in sandboxes of Harbor; leave mounts out")

    async def start(self, force_build: bool) -> None:
        """Build the image, and start a sandbox.

        Raises:
            SandboxBuildFailedError: the image cannot be built, or agentkit cannot run it.
            SandboxError: the sandbox cannot be started.
        """
        config = self.task_env_config
        try:
            image = await asyncio.to_thread(
                harbor_sandbox.image_of,
                config.docker_image,
                self.environment_dir,
                config.build_timeout_sec,
                again=force_build,
            )
            self._defaults = await asyncio.to_thread(dockerfiles.defaults_of, image)
        except ImageError as error:
            raise SandboxBuildFailedError(str(error)) from error
        self._workdir = posixpath.join("/", config.workdir or self._defaults.workdir)
        limits = Environment(
            cpus=self._resource_limit_value("cpu", auto_mode="limit"),
            memory_mb=self._resource_limit_value("memory", auto_mode="limit"),
        )
        policy = Environment(
            network_mode=self.network_policy.network_mode.value, allowed_hosts=self.network_policy.allowed_hosts
        )
        self._box = await Sandbox.create(
            harbor_sandbox.spec_of(
                image,
                self._defaults.user_of(0),
                self._startup_env(),
                harbor_tasks.resources_of(limits, {}),
                harbor_tasks.network_of(policy, Phase()),
            ),
            backend=self._backend,
        )
        await self._box.files.mkdir(self._workdir)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Remove the sandbox; without ``delete`` too, because no sandbox outlives its process."""
        box, self._box = self._box, None
        if box is not None:
            if not delete:
                self.logger.warning("sandbox %s is removed: agentkit keeps no sandbox after its trial", box.id)
            await box.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash, or with sh if the image has no bash.

        Raises:
            ImageError: the image has no such user.
            RuntimeError: the command did not end in time.
            SandboxError: the sandbox failed, or the working directory does not exist.
        """
        who = self._defaults.user_of(self._resolve_user(user))
        done = await self._sandbox.exec(
            [*bundled_python(), "-c", _AS_USER, str(who.uid), str(who.gid), command],
            cwd=cwd or self._workdir,
            env={"HOME": who.home, **(self._merge_env(env) or {})},
            timeout=float(timeout_sec or _LONGEST),
        )
        if (emit := self._output_callback()) is not None:
            await emit(done.stdout, "stdout")
            await emit(done.stderr, "stderr")
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the sandbox, as root."""
        await self._sandbox.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy the files of a folder into a folder of the sandbox, as root."""
        await self._sandbox.files.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file from the sandbox. Raises ``PathError`` if it is missing or a link."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self._sandbox.files.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the regular files of a folder of the sandbox into a folder, whose files they replace."""
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary, "copy")
            await self._sandbox.files.download(source_dir, copy)
            await asyncio.to_thread(shutil.copytree, copy, target_dir, dirs_exist_ok=True)

    @property
    def _sandbox(self) -> Sandbox:
        if self._box is None:
            raise RuntimeError("the environment is not started, or stopped already")
        return self._box
