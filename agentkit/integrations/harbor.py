"""Tasks of Harbor as an environment: ``agentkit.make("harbor:tasks")``, with a shell and an editor in a sandbox.

Invariant: the tests decide, in a container that the agent never used, with a copy of the agent's files. An agent cannot
void its episode: if the tests give no verdict on its files but one on the untouched task, it has failed. A sandbox that
fails for an external cause, or before the agent acted, is an ``EnvError``; another failure of a sandbox is an
``UnexplainedCrash``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from gymnasium.error import ResetNeeded

from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.isolation.redundancy import Redundancy, check_redundancy
from agentkit.envs.spaces import Text
from agentkit.envs.swebench import sandbox_pools, tools
from agentkit.envs.task_files import Split, check_split
from agentkit.errors import ConfigError, EngineUnavailable, EnvCrashed, ImageError, SandboxError, UnexplainedCrash
from agentkit.extras import require_harbor
from agentkit.integrations import harbor_sandbox, harbor_tasks
from agentkit.integrations.harbor_tasks import Task
from agentkit.integrations.harbor_verdict import LOGS, NoVerdict, Outcome, Verdict, cause_of_files, run_tests, settle
from agentkit.sandboxes.arguments import check_choice, check_positive
from agentkit.sandboxes.attribution import cause_of
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.images import dockerfiles
from agentkit.sandboxes.images.dockerfiles import User
from agentkit.sandboxes.pool.pool import Lease
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.shell import Shell
from agentkit.sandboxes.spec import Network, SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.types import Snapshot

INSTRUCTIONS = (
    "You are at a shell in a Linux container. Do the task that you are given; hidden tests decide. The tests run after "
    "you have submitted, when none of your processes runs any more. You have these tools:\n\n" + tools.USAGE
)


@dataclass(frozen=True)
class _Place:
    """Where a task runs."""

    image: str
    workdir: str
    agent: User
    root: User


class HarborTasks(AsyncTextEnv):
    """Do a task of Harbor at a shell.

    Action space: calls of the tools ``bash``, ``view``, ``create``, ``edit`` and ``submit``.

    Observation space: the instruction of the task; then the result of each call.

    Rewards: the reward of the task's tests after ``submit``, or when the time is over; otherwise 0. If the tests give
    no verdict because of what the agent did, the reward is 0 and ``info["verdict_error"]`` says why. If they give none
    on the untouched task either, the task is broken, and the episode is void.

    Args:
        tasks: a task directory, or a directory of them.
        names: use only these tasks; None uses all.
        split: use only the ``"train"`` or the ``"test"`` part, which share no task; None uses both.
        backend: ``"docker"``, the name of another back end with images, or a started back end.
        resources: limits of a sandbox, fields of ``Resources``, that replace those of the tasks.
        network: ``"task"`` gives each task the network that it asks for, ``"none"`` none.
        host_env: names of variables of this machine that tasks may read, as ``${NAME}`` in ``task.toml``.
        reward: name of the reward, if the tests write several.
        success_reward: least reward of a success.
        command_timeout: seconds that one command may take.
        time_limit: seconds that all commands of an episode may take together; None: ``timeout_sec`` of the task's
            ``[agent]``, or 1800 if it has none. Then the tests run.
        output_limit: characters of one observation.
        redundancy: its ``spares``, ``hedge`` and ``health`` apply to the sandboxes of each task in use; None keeps no
            spare.

    Raises:
        MissingExtra: the extra ``harbor`` is not installed.
        ConfigError: there are no tasks, one is malformed, or an argument is out of range.
    """

    instructions = INSTRUCTIONS
    max_turns = 50
    actions_per_turn = 1
    deterministic: ClassVar[bool] = False  # output of commands may contain times and addresses

    def __init__(
        self,
        *,
        tasks: str | os.PathLike[str],
        names: Sequence[str] | None = None,
        split: Split | None = None,
        backend: str | Backend = "docker",
        resources: Mapping[str, Any] | None = None,
        network: Literal["task", "none"] = "task",
        host_env: Sequence[str] = (),
        reward: str = "reward",
        success_reward: float = 1.0,
        command_timeout: float = 180.0,
        time_limit: float | None = None,
        output_limit: int = 10_000,
        redundancy: Redundancy | None = None,
    ) -> None:
        check_split(split)
        check_positive(command_timeout=command_timeout, **({} if time_limit is None else {"time_limit": time_limit}))
        if output_limit < 100:
            raise ConfigError(f"output_limit={output_limit} must be at least 100")
        check_choice("network", network, Literal["task", "none"])
        check_backend("backend", backend)
        check_redundancy(redundancy)
        require_harbor()
        self.tasks = _chosen(harbor_tasks.load(Path(tasks)), names, split, tasks)
        """The tasks that episodes are drawn from."""
        self.task: Task | None = None
        """The task of the current episode."""
        self.action_space = Text(examples=("bash ls", "bash git log --oneline", "view setup.py 1 20", "edit"))
        self._backend, self._redundancy = backend, redundancy or Redundancy()
        self._resources, self._network, self._host_env = dict(resources or {}), network, tuple(host_env)
        for task in self.tasks:
            self._check(task)
        self._reward, self._success_reward = reward, success_reward
        self._command_timeout, self._time_limit, self._output_limit = command_timeout, time_limit, output_limit
        self._pools: sandbox_pools.SandboxPools | None = None
        self._places: dict[str, _Place] = {}
        self._verdicts: dict[str, Verdict] = {}  # of untouched tasks, by their digests
        self._lease: Lease | None = None
        self._shell: Shell | None = None
        self._spent = 0.0
        self._solved_by_expert = False

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str:
        return "backend"

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode in a fresh sandbox; ``options={"task": …}`` or the seed chooses the task."""
        await super().reset(seed=seed)
        await self._put_away()
        task = self._drawn(options or {})
        if self._pools is None:
            self._pools = sandbox_pools.acquire_pools(self._backend, self._redundancy)
        try:
            place = await self._place(task)
            self._lease = await self._pools.acquire(self._spec(task, place, "agent"))
            self._shell = await self._lease.box.shell(cwd=place.workdir)
        except SandboxError as error:
            await self._put_away()
            if isinstance(error, ImageError) or not error.retryable:
                raise
            raise EnvCrashed(f"no sandbox for {task.id}: {error}") from error
        except BaseException:
            await self._put_away()
            raise
        self.task, self._spent, self._solved_by_expert = task, 0.0, False
        return task.instruction, self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._shell is None or self._lease is None or self.task is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        try:
            call = tools.parse(action)
        except ValueError as problem:
            return f"[{problem}: nothing was changed]", 0.0, False, False, self._info(valid=False)
        if call is None:
            return f"[this is no action; the tools are:\n{tools.USAGE}]", 0.0, False, False, self._info(valid=False)
        self.policy_code_ran = True
        observation = ""
        if not isinstance(call, tools.Submit):
            try:
                observation = await self._use(call, self._shell, self._lease)
            except SandboxError as error:
                raise await self._failed(error, self._lease.box) from error
            self._solved_by_expert = self._solved_by_expert or action == self._solution()
            limit = self._limit()
            if self._spent < limit:
                return observation, 0.0, False, False, self._info()
            observation += f"\n[the time of {limit:g} s is over]\n"
        verdict = await self._graded(self.task, self._lease)
        success = verdict.error is None and verdict.reward >= self._success_reward
        observation += f"[reward: {verdict.reward:.4g}]"
        more: Info = {"verdict_error": verdict.error} if verdict.error else {"metrics": dict(verdict.rewards)}
        return observation, verdict.reward, True, False, self._info(success=success, **more)

    def expert(self) -> Iterator[str]:
        """Yield the solution of the task as a command, then ``submit``; nothing if the task has no solution."""
        if self.task is None:
            raise ResetNeeded("call reset() before expert()")
        solution = self._solution()
        if solution is not None:
            if not self._solved_by_expert:
                yield solution
            yield "submit"

    async def close(self) -> None:
        held, self._pools = self._pools, None
        try:
            await self._put_away()
        finally:
            if held is not None:
                await sandbox_pools.release_pools(held)

    async def _use(self, call: tools.Bash | tools.View | tools.Create | tools.Edit, shell: Shell, lease: Lease) -> str:
        assert self.task is not None
        if isinstance(call, tools.Bash):
            timeout = min(self._command_timeout, max(self._limit() - self._spent, 0.1))
            # A character takes up to four bytes; the text is clipped to the limit afterwards.
            result = await shell.run(call.command, timeout=timeout, output_limit=4 * self._output_limit)
            self._spent += result.duration
            return tools.shown(result, self._output_limit, timeout)
        path = posixpath.normpath(posixpath.join(self._places[self.task.id].workdir, call.path))
        placed = type(call)(**{**vars(call), "path": path})
        return tools.clip(await tools.use_editor(lease.box.files, placed, self._output_limit), self._output_limit)

    async def _graded(self, task: Task, lease: Lease) -> Verdict:
        """Save the agent's files, remove its sandbox with all its processes, and run the tests in another one."""
        found = await self._of_agent(task, lease)
        return found if isinstance(found, Verdict) else settle(task.id, found, await self._untouched(task))

    async def _of_agent(self, task: Task, lease: Lease) -> Outcome:
        """Return what the tests give on the agent's files."""
        try:
            snapshot = await lease.box.snapshot()
        except SandboxError as error:
            if cause_of_files(error) == "program":
                await self._put_away()
                return NoVerdict(f"the agent's files cannot be saved for them: {error}")
            if isinstance(error, EngineUnavailable) and await self._answers():
                await self._put_away()
                raise UnexplainedCrash(f"the files of the agent of {task.id} could not be saved: {error}") from error
            raise await self._failed(error, lease.box) from error
        try:
            await self._put_away()
            return await self._tested(task, snapshot)
        finally:
            with contextlib.suppress(SandboxError):  # the reaper removes what the engine keeps
                await finished(Sandbox.discard(snapshot, backend=self._backend))

    async def _answers(self) -> bool:
        """Return whether the engine answers: then it may be the number of the agent's files that takes too long."""
        try:
            await Sandbox.list(labels={"task": "none"}, backend=self._backend)
        except SandboxError:
            return False
        return True

    async def _untouched(self, task: Task) -> Outcome:
        """Return what the tests give on the files that the task starts with. A verdict is kept; without one, the next
        call runs the tests again, because the machine may have been too slow."""
        digest = await asyncio.to_thread(dockerfiles.digest_of, task.folder)
        if digest in self._verdicts:
            return self._verdicts[digest]
        found = await self._tested(task, None)
        if isinstance(found, Verdict):
            self._verdicts[digest] = found
        return found

    async def _tested(self, task: Task, snapshot: Snapshot | None) -> Outcome:
        """Run the tests in a new sandbox, with the agent's files, or (None) with those that the task starts with."""
        place = self._places[task.id]
        env = self._variables(task, task.config.verifier.env)
        self.policy_code_ran = False  # until the sandbox is ready
        spec = self._spec(task, place, "verifier")
        try:
            box = await Sandbox.create(spec, backend=self._backend, snapshot=snapshot)
        except SandboxError as error:
            if snapshot is not None and cause_of_files(error) == "program":
                return NoVerdict(f"no sandbox for them starts with the agent's files: {error}")
            raise EnvCrashed(f"no sandbox for the tests of {task.id}: {error}") from error
        self.policy_code_ran = True
        try:
            return await run_tests(box, task, place.workdir, env, self._reward)
        except SandboxError as error:
            cause = await cause_of(error, box)
            if cause == "program":
                return NoVerdict(f"they ended their sandbox: {error}")
            kind = UnexplainedCrash if cause == "unexplained" and snapshot is not None else EnvCrashed
            raise kind(f"the sandbox for the tests of {task.id} failed: {error}") from error
        finally:
            with contextlib.suppress(SandboxError):  # as above
                await finished(box.close())

    async def _failed(self, error: SandboxError, box: Sandbox) -> EnvCrashed:
        """Remove the agent's sandbox, and return the error for the failure of ``box``."""
        cause = await cause_of(error, box)
        await self._put_away()
        name = "" if self.task is None else f" of {self.task.id}"
        if cause == "external":
            return EnvCrashed(f"the sandbox{name} failed: {error}")
        return UnexplainedCrash(f"the sandbox{name} failed after the agent worked in it: {error}")

    async def _place(self, task: Task) -> _Place:
        """Return where a task runs. Builds or pulls its image the first time."""
        if task.id not in self._places:
            self._places[task.id] = await asyncio.to_thread(_placed, task)
        return self._places[task.id]

    def _spec(self, task: Task, place: _Place, phase: Literal["agent", "verifier"]) -> SandboxSpec:
        """Return the specification of the sandbox in which the agent works, or of the one in which the tests run."""
        environment, is_agent = task.config.environment, phase == "agent"
        user = place.agent if is_agent else place.root
        ready, patience = harbor_tasks.ready_of(environment.healthcheck) if is_agent else ("", 0.0)
        asked = harbor_tasks.network_of(environment, getattr(task.config, phase))
        folders = " ".join(shlex.quote(path) for path in (*LOGS, place.workdir))
        return harbor_sandbox.spec_of(
            place.image,
            user,
            self._variables(task, environment.env),
            harbor_tasks.resources_of(environment, self._resources),
            Network.none() if self._network == "none" else asked,
            setup=("/bin/sh", "-c", f"mkdir -p {folders}") if is_agent and user.uid == 0 else (),
            ready=ready,
            patience=patience,
        )

    def _variables(self, task: Task, given: Mapping[str, str]) -> dict[str, str]:
        return harbor_tasks.variables(task, given, os.environ, self._host_env)

    def _check(self, task: Task) -> None:
        """Raise ``ConfigError`` if the task's limits or variables are wrong."""
        for table in (task.config.environment, task.config.verifier, task.config.solution):
            self._variables(task, table.env)
        try:
            harbor_tasks.resources_of(task.config.environment, self._resources)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"resources={self._resources!r} are no limits for {task.id}: {error}") from None

    def _limit(self) -> float:
        """Return the seconds that the commands of this episode may take together."""
        assert self.task is not None
        return self._time_limit or self.task.config.agent.timeout_sec or 1800.0

    def _solution(self) -> str | None:
        """Return the solution as an action; None if the task has none."""
        assert self.task is not None
        place = self._places[self.task.id]
        return solution_action(self.task, place, self._variables(self.task, self.task.config.solution.env))

    def _drawn(self, options: Mapping[str, Any]) -> Task:
        wanted = options.get("task")
        if wanted is None:
            return self.tasks[int(self.np_random.integers(len(self.tasks)))]
        found = next((task for task in self.tasks if task.id == wanted), None)
        if found is None:
            raise ValueError(f"task {wanted!r} is not one of the {len(self.tasks)} of this environment")
        return found

    async def _put_away(self) -> None:
        shell, self._shell = self._shell, None
        lease, self._lease = self._lease, None
        try:
            if shell is not None:
                with contextlib.suppress(SandboxError, asyncio.TimeoutError):
                    await shell.close()
        finally:
            if lease is not None:
                lease.release(discard=True)

    def _info(self, *, success: bool = False, valid: bool = True, **more: Any) -> Info:
        name = {} if self.task is None else {"task": self.task.id}
        return {"success": success, "action_valid": valid, **name, **more}


def _chosen(
    tasks: Sequence[Task], names: Sequence[str] | None, split: Split | None, where: str | os.PathLike[str]
) -> tuple[Task, ...]:
    names = (names,) if isinstance(names, str) else names
    missing = set(names or ()) - {task.id for task in tasks}
    if missing:
        raise ConfigError(f"{os.fspath(where)} has no task {', '.join(sorted(missing))}")
    chosen = tuple(task for task in tasks if (names is None or task.id in names) and split in (None, task.split))
    if not chosen:
        raise ConfigError(
            f"{os.fspath(where)} has {len(tasks)} tasks, but none of split={split!r} among names={names!r}"
        )
    return chosen


def _placed(task: Task) -> _Place:
    """Build or pull the image of a task, and return where the task runs. Blocks.

    Raises:
        ImageError: there is no image, or the task cannot run in it.
        EngineUnavailable: the engine does not answer.
    """
    environment = task.config.environment
    image = harbor_sandbox.image_of(
        environment.docker_image, task.folder / "environment", environment.build_timeout_sec
    )
    defaults = dockerfiles.defaults_of(image)
    if task.config.verifier.user is None and defaults.user.uid != 0:
        raise ImageError(
            f"the tests of {task.id} would run as user {defaults.user.uid} of {image}, but agentkit runs tests as "
            'root; add user = "root" to [verifier]',
            image=image,
        )
    if defaults.volumes:
        raise ImageError(
            f"{image} declares volumes ({', '.join(defaults.volumes)}), and the tests of {task.id} would not see what "
            "the agent wrote there; build it without VOLUME",
            image=image,
        )
    agent = defaults.user_of(task.config.agent.user)
    workdir = posixpath.join("/", environment.workdir or defaults.workdir)
    return _Place(image, workdir, agent, defaults.user_of(0))


def solution_action(task: Task, place: _Place, env: Mapping[str, str]) -> str | None:
    """Return the action that writes the solution of a task and runs it; None if the task has no ``solve.sh``."""
    files = task.files("solution")
    if "solve.sh" not in files:
        return None
    top = "/solution" if place.agent.uid == 0 else "/tmp/solution"
    lines = []
    for path, file in files.items():
        target = shlex.quote(posixpath.join(top, path))
        lines.append(f"mkdir -p {shlex.quote(posixpath.dirname(posixpath.join(top, path)))}")
        lines.append(_written(file.read_bytes(), target))
        if path == "solve.sh" or os.access(file, os.X_OK):
            lines.append(f"chmod +x {target}")
    settings = {"DEBIAN_FRONTEND": "noninteractive", **env}
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return "bash " + "\n".join([*lines, f"(cd {shlex.quote(place.workdir)} && {given} {top}/solve.sh)"])


def _written(data: bytes, target: str) -> str:
    """Return shell code that writes ``data`` to a file, readable if it is text."""
    if data.endswith(b"\n") and b"\0" not in data and b"\r" not in data:
        with contextlib.suppress(UnicodeDecodeError):
            text, mark = data.decode(), "END_OF_FILE"
            while mark in text:
                mark += "_"
            return f"cat >{target} <<'{mark}'\n{text}{mark}"
    return f"base64 -d >{target} <<'END_OF_FILE'\n{base64.encodebytes(data).decode()}END_OF_FILE"
