"""Run tasks with Harbor's own trial, oracle and verifier: SCRIPT TASKS TRIALS COMMANDS ENVIRONMENT; prints JSON.

Runs with the interpreter that has Harbor. Its environment for Docker needs Docker Compose; `PlainDocker` needs only the
command `docker`, and leaves resources and networks out. COMMANDS is a JSON object: for each way to play, a shell
command, null for the solution of the task, or the configuration of an agent. ENVIRONMENT is the import path of the
environment. Printed, for each task and way: the rewards with the tokens of the agent, or the type of the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent  # pyright: ignore[reportMissingImports]
from harbor.environments.base import BaseEnvironment, ExecResult  # pyright: ignore[reportMissingImports]
from harbor.environments.capabilities import EnvironmentCapabilities  # pyright: ignore[reportMissingImports]
from harbor.models.task.task import Task  # pyright: ignore[reportMissingImports]
from harbor.models.trial.config import TrialConfig  # pyright: ignore[reportMissingImports]
from harbor.trial.trial import Trial  # pyright: ignore[reportMissingImports]


class PlainDocker(BaseEnvironment):
    """A container of the command `docker`, with Docker's default capabilities and no network."""

    @staticmethod
    def type() -> str:
        return "plain-docker"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        assert self.task_env_config.docker_image or (self.environment_dir / "Dockerfile").exists()

    async def start(self, force_build: bool) -> None:
        image = self.task_env_config.docker_image
        if image is None:
            image = (await _docker("build", "--quiet", str(self.environment_dir))).stdout.strip()
        command = ["run", "--detach", "--network=none", "--entrypoint=sh", image, "-c", "sleep infinity"]
        self._container = (await _docker(*command)).stdout.strip()
        targets = " ".join(self._mount_targets(writable_only=True))
        await self.exec(f"mkdir -p {targets} && chmod 777 {targets}", user="root")

    async def stop(self, delete: bool) -> None:
        await _docker("rm", "--force", self._container)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        words = ["exec"]
        if where := cwd or self.task_env_config.workdir:
            words += ["--workdir", where]
        if (who := self._resolve_user(user)) is not None:
            words += ["--user", str(who)]
        for name, value in (self._merge_env({**self.task_env_config.env, **(env or {})}) or {}).items():
            words += ["--env", f"{name}={value}"]
        running = _docker(*words, self._container, "bash", "-c", command, check=False)
        return await asyncio.wait_for(running, timeout_sec)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await _docker("cp", str(source_path), f"{self._container}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p {target_dir}", user="root")
        await _docker("cp", f"{source_dir}/.", f"{self._container}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await _docker("cp", f"{self._container}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        os.makedirs(target_dir, exist_ok=True)
        await _docker("cp", f"{self._container}:{source_dir}/.", str(target_dir))


class Scripted(BaseAgent):
    """An agent that runs one command."""

    def __init__(self, *arguments: Any, command: str, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self._command = command

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        await environment.exec(self._command)


async def _docker(*words: str, check: bool = True) -> ExecResult:
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if check and process.returncode:
        raise RuntimeError(f"docker {words}: {errors.decode()}")
    return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode or 0)


class Copying(BaseAgent):
    """An agent that copies files both ways, and answers if they arrive; the task must have `numbers.txt`."""

    @staticmethod
    def name() -> str:
        return "copying"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        here = self.logs_dir / "here"
        (here / "deep" / "empty").mkdir(parents=True)
        (here / "deep" / "data").write_bytes(bytes(range(256)))
        (here / "run").write_text("#!/bin/sh\necho it runs\n")
        (here / "run").chmod(0o755)
        await environment.upload_dir(here, "/copies/there")
        await environment.upload_file(here / "deep" / "data", "/copies/data")
        ran = await environment.exec("./run; cmp deep/data ../data; ls -d deep/empty", cwd="/copies/there")
        assert (ran.stdout, ran.return_code) == ("it runs\ndeep/empty\n", 0), ran
        back = self.logs_dir / "back"
        (back / "deep").mkdir(parents=True)
        (back / "deep" / "data").write_text("old")
        (back / "kept").write_text("kept")
        await environment.download_dir("/copies/there", back)
        await environment.download_file("/copies/data", back / "one" / "data")
        assert (back / "deep" / "data").read_bytes() == (back / "one" / "data").read_bytes() == bytes(range(256))
        assert sorted(path.name for path in back.iterdir()) == ["deep", "kept", "one", "run"]
        assert os.access(back / "run", os.X_OK)
        assert await environment.is_dir("/copies/there/deep")
        assert not await environment.is_file("/copies/there/deep")
        failed = await environment.exec("echo out; echo err >&2; exit 3")
        assert (failed.stdout, failed.stderr, failed.return_code) == ("out\n", "err\n", 3), failed
        try:
            await environment.exec("sleep 60", timeout_sec=1)
        except RuntimeError as error:
            assert "timed out" in str(error)  # noqa: PT017  (this is a program)
        else:
            raise AssertionError("the command did not time out")
        who = await environment.exec("id -u; echo $HOME", user="nobody")
        assert who.stdout == "65534\n/nonexistent\n", who
        await environment.exec("echo 60 >sum.txt")


async def play(task: Path, trials: Path, way: str, command: str | dict[str, Any] | None, place: str) -> dict[str, Any]:
    if command is None:
        agent: dict[str, Any] = {"name": "oracle"}
    elif isinstance(command, dict):
        agent = command
    else:
        agent = {"import_path": "harbor_player:Scripted", "kwargs": {"command": command}}
    config = {
        "task": {"path": str(task)},
        "trial_name": f"{task.name}-{way}",
        "trials_dir": str(trials),
        "agent": agent,
        "environment": {"import_path": place},
    }
    trial = await Trial.create(TrialConfig.model_validate(config))
    result = await trial.run()
    if result.verifier_result is not None:
        known = {"rewards": result.verifier_result.rewards}
        if (details := result.agent_result and result.agent_result.rollout_details) is not None:
            known["rollout"] = details
        return known
    assert result.exception_info is not None
    return {"error": result.exception_info.exception_type, "message": result.exception_info.exception_message}


async def play_all(folders: list[Path], trials: Path, commands: dict[str, Any], place: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for folder in folders:
        known = told[folder.name] = {"valid": Task.is_valid_dir(folder)}
        if known["valid"]:
            known["instruction"] = Task(folder).instruction
            for way, command in commands.items():
                known[way] = await play(folder, trials, way, command, place)
    return told


if __name__ == "__main__":
    tasks = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    print(json.dumps(asyncio.run(play_all(tasks, Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]))))
