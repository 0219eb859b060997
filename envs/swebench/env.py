"""The SWEBench environment: resolve an issue with a shell and an editor in a sandbox with the repository.

Invariant: the score comes from a sandbox that the agent never used; it receives only the agent's patch, which is read
by ``exec`` and not by the agent's shell. A sandbox that fails for an external cause, or before the agent acted, is an
``EnvError``; another failure of the agent's sandbox is an ``UnexplainedCrash``. A patch with which two fresh sandboxes
fail is not resolved.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import posixpath
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gymnasium.error import ResetNeeded
from pydantic import ValidationError

from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.isolation.redundancy import Redundancy, check_redundancy
from agentkit.envs.spaces import Text
from agentkit.envs.swebench import evaluation, instance, sandbox_pools, tools
from agentkit.envs.swebench.evaluation import ENVIRONMENT, REPOSITORY, Verdict
from agentkit.envs.swebench.instance import Instance, Split
from agentkit.envs.swebench.releases import locations
from agentkit.errors import ConfigError, EnvCrashed, ImageError, SandboxError, UnexplainedCrash
from agentkit.sandboxes.attribution import cause_of
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.pool.pool import Lease
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.shell import Shell
from agentkit.sandboxes.spec import Resources

PATCH_LIMIT = 8 << 20
"""Bytes of the largest patch that is evaluated."""
_RULES = (
    "You are a software engineer at a shell, in a copy of a repository that is yours to change. Resolve the issue that "
    "you are given by changing the code; hidden tests decide. Changes to the tests themselves have no effect. There is "
    "no network. You have these tools:\n\n" + tools.USAGE
)
# Official images keep the packages of the repository in a conda environment.
_ENTER = "[ ! -f /opt/miniconda3/bin/activate ] || . /opt/miniconda3/bin/activate testbed"
_DIFF = r"""
export GIT_INDEX_FILE="/tmp/.index-$$"
git() {{ command git -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }}
git read-tree {base} || exit
git add --update --ignore-errors
git ls-files -z --others --exclude-standard | grep -zv '/$' |
    git --literal-pathspecs add --ignore-errors --pathspec-from-file=- --pathspec-file-nul
git diff-index --cached --patch --binary --no-color --no-ext-diff --no-textconv --no-renames {base}
"""
"""Print the change since the first commit. Uses a separate index: the agent's may be locked or manipulated.
Unreadable files and nested repositories (names that end in a slash) are excluded. ``diff-index`` ignores settings of
the diff format."""
_GIT_TIMEOUT = 120.0


class SWEBench(AsyncTextEnv):
    """Resolve an issue of a real repository.

    Action space: calls of the tools ``bash``, ``view``, ``create``, ``edit`` and ``submit``.

    Observation space: the issue; then the result of each call.

    Rewards: 1 if the hidden tests pass after ``submit``, otherwise 0.

    Args:
        instances: name of a data set (``agentkit data list``), a ``.parquet``, ``.jsonl`` or ``.json`` file of
            SWE-bench, or a task repository; None uses the tasks that ``agentkit data swe-from-releases`` built.
        instance_ids: use only these instances; None uses all.
        split: use only the ``"train"`` or the ``"test"`` part, which share no instance; None uses both.
        backend: ``"docker"``, the name of another back end with images, or a started back end.
        resources: limits of a sandbox, fields of ``Resources`` (``memory``, ``cpus``, …).
        command_timeout: seconds that one command may take.
        time_limit: seconds that all commands of an episode may take together; then it is truncated.
        output_limit: characters of one observation.
        eval_timeout: seconds that the tests may take.
        redundancy: its ``spares``, ``hedge`` and ``health`` apply to the sandboxes of each image in use; None keeps one
            spare.

    Raises:
        ConfigError, DataError: no instance was found, or an argument is out of range.
    """

    instructions = _RULES
    max_turns = 30
    actions_per_turn = 1
    deterministic: ClassVar[bool] = False  # output of commands may contain times and addresses

    def __init__(
        self,
        *,
        instances: str | os.PathLike[str] | None = None,
        instance_ids: Sequence[str] | None = None,
        split: Split | None = None,
        backend: str | Backend = "docker",
        resources: Mapping[str, Any] | None = None,
        command_timeout: float = 60.0,
        time_limit: float = 1800.0,
        output_limit: int = 10_000,
        eval_timeout: float = 1800.0,
        redundancy: Redundancy | None = None,
    ) -> None:
        seconds = {"command_timeout": command_timeout, "time_limit": time_limit, "eval_timeout": eval_timeout}
        for name, value in seconds.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} must be a positive number of seconds")
        if output_limit < 100:
            raise ConfigError(f"output_limit={output_limit} must be at least 100")
        check_backend("backend", backend)
        check_redundancy(redundancy)
        path = locations.find(instances)
        self.instances = _chosen(instance.load(path), instance_ids, split, path)
        """The instances that episodes are drawn from."""
        self.instance: Instance | None = None
        """The instance of the current episode."""
        self.action_space = Text(examples=("bash ls", "bash git log --oneline", "view setup.py 1 20", "edit"))
        self._backend, self._redundancy = backend, redundancy or Redundancy(spares=1)
        try:
            self._resources = Resources(**(resources or {}))
        except (TypeError, ValidationError) as error:
            raise ConfigError(f"resources={resources!r} are not limits of a sandbox: {error}") from None
        self._command_timeout, self._time_limit = command_timeout, time_limit
        self._output_limit, self._eval_timeout = output_limit, eval_timeout
        self._pools: sandbox_pools.SandboxPools | None = None
        self._lease: Lease | None = None
        self._shell: Shell | None = None
        self._base = ""
        self._spent = 0.0
        self._solved_by_expert = False

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str:
        return "backend"

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode in a fresh sandbox; ``options={"instance_id": …}`` or the seed chooses the instance."""
        await super().reset(seed=seed)
        await self._put_away()
        task = self._drawn(options or {})
        if self._pools is None:
            self._pools = sandbox_pools.acquire_pools(self._backend, self._redundancy)
        try:
            self._lease = await self._pools.acquire(sandbox_pools.spec_of(task, self._resources))
            box = self._lease.box
            self._shell = await box.shell(cwd=REPOSITORY, env=ENVIRONMENT)
            await self._shell.run(_ENTER, check=True)
            self._base = (await box.exec("git rev-parse HEAD", cwd=REPOSITORY, check=True)).stdout.strip()
        except ImageError as error:
            await self._put_away()
            ours = task.image.startswith(locations.IMAGES)
            remedy = (
                f"`{locations.BUILD}` builds it" if ours else "it is pulled from its registry, or made by `swebench`"
            )
            raise ImageError(f"{task.id} needs the image {task.image}; {remedy} ({error})", image=task.image) from error
        except SandboxError as error:
            await self._put_away()
            if not error.retryable:
                raise
            raise EnvCrashed(f"no sandbox for {task.id}: {error}") from error
        except BaseException:
            await self._put_away()
            raise
        self.instance, self._spent, self._solved_by_expert = task, 0.0, False
        return f"Repository: {task.row['repo']} {task.row['version']}, in {REPOSITORY}.\n\n{task.problem}", self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._shell is None or self._lease is None or self.instance is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        try:
            call = tools.parse(action)
        except ValueError as problem:
            return f"[{problem}: nothing was changed]", 0.0, False, False, self._info(valid=False)
        if call is None:
            return f"[this is no action; the tools are:\n{tools.USAGE}]", 0.0, False, False, self._info(valid=False)
        if isinstance(call, tools.Submit):
            self.policy_code_ran = True
            verdict = await self._graded(self.instance)
            info = self._info(success=verdict.resolved, evaluation=_told(verdict))
            return _summary(verdict), float(verdict.resolved), True, False, info
        self.policy_code_ran = True
        try:
            observation = await self._use(call, self._shell, self._lease)
        except SandboxError as error:
            raise await self._failed(error, self._lease) from error
        self._solved_by_expert = self._solved_by_expert or action == _expert_action(self.instance)
        over = self._spent >= self._time_limit
        if over:
            await self._put_away()
            observation += f"\n[the time of {self._time_limit:g} s is over]"
        return observation, 0.0, False, over, self._info()

    def expert(self) -> Iterator[str]:
        """Yield the reference solution as a command, then ``submit``."""
        if self.instance is None:
            raise ResetNeeded("call reset() before expert()")
        if not self._solved_by_expert:
            yield _expert_action(self.instance)
        yield "submit"

    async def close(self) -> None:
        held, self._pools = self._pools, None
        try:
            await self._put_away()
        finally:
            if held is not None:
                await sandbox_pools.release_pools(held)

    async def _use(self, call: tools.Bash | tools.View | tools.Create | tools.Edit, shell: Shell, lease: Lease) -> str:
        if isinstance(call, tools.Bash):
            timeout = min(self._command_timeout, max(self._time_limit - self._spent, 0.1))
            # A character takes up to four bytes; the text is clipped to the limit afterwards.
            result = await shell.run(call.command, timeout=timeout, output_limit=4 * self._output_limit)
            if result.session_restarted:
                await shell.run(_ENTER, check=True)
            self._spent += result.duration
            return tools.shown(result, self._output_limit, timeout)
        path = posixpath.normpath(posixpath.join(REPOSITORY, call.path))
        placed = type(call)(**{**vars(call), "path": path})
        return tools.clip(await tools.use_editor(lease.box.files, placed, self._output_limit), self._output_limit)

    async def _graded(self, task: Instance) -> Verdict:
        """Read the agent's patch, remove its sandbox, and evaluate the patch in another one."""
        assert self._pools is not None
        assert self._lease is not None
        quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        try:
            taken = await self._lease.box.exec(
                _DIFF.format(base=self._base), cwd=REPOSITORY, env=quiet, timeout=_GIT_TIMEOUT, output_limit=PATCH_LIMIT
            )
        except SandboxError as error:
            raise await self._failed(error, self._lease) from error
        await self._put_away()
        # An agent that broke its repository, or filled its disk, has no patch.
        if not taken.ok or not taken.stdout_bytes.strip():
            return Verdict("no patch")
        if taken.truncated:
            return Verdict("patch too large")
        try:
            return await evaluation.evaluate_twice(
                lambda: self._grader(task), task.row, taken.stdout_bytes, self._eval_timeout
            )
        except SandboxError as error:
            raise EnvCrashed(f"{task.id} could not be graded: {error}") from error

    @contextlib.asynccontextmanager
    async def _grader(self, task: Instance) -> AsyncIterator[Sandbox]:
        """Provide a fresh sandbox for an evaluation; waiting for it does not count as the policy's time."""
        assert self._pools is not None
        self.policy_code_ran = False
        async with self._pools.fresh(sandbox_pools.spec_of(task, self._resources)) as box:
            self.policy_code_ran = True
            yield box

    async def _failed(self, error: SandboxError, lease: Lease) -> EnvCrashed:
        """Remove the agent's sandbox, and return the error for its failure."""
        cause = await cause_of(error, lease.box)
        await self._put_away()
        name = "" if self.instance is None else f" of {self.instance.id}"
        if cause == "external":
            return EnvCrashed(f"the sandbox{name} failed: {error}")
        return UnexplainedCrash(f"the sandbox{name} failed after the agent worked in it: {error}")

    def _drawn(self, options: Mapping[str, Any]) -> Instance:
        wanted = options.get("instance_id")
        if wanted is None:
            return self.instances[int(self.np_random.integers(len(self.instances)))]
        found = next((task for task in self.instances if task.id == wanted), None)
        if found is None:
            raise ValueError(f"instance {wanted!r} is not one of the {len(self.instances)} of this environment")
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
        name = {} if self.instance is None else {"instance_id": self.instance.id}
        return {"success": success, "action_valid": valid, **name, **more}


def _chosen(tasks: list[Instance], ids: Sequence[str] | None, split: Split | None, where: Path) -> tuple[Instance, ...]:
    if split not in (None, "train", "test"):
        raise ConfigError(f"split={split!r} must be 'train', 'test' or None")
    ids = (ids,) if isinstance(ids, str) else ids
    missing = set(ids or ()) - {task.id for task in tasks}
    if missing:
        raise ConfigError(f"{where} has no instance {', '.join(sorted(missing))}")
    chosen = tuple(task for task in tasks if (ids is None or task.id in ids) and split in (None, task.split))
    if not chosen:
        raise ConfigError(f"{where} has {len(tasks)} instances, but none of split={split!r} among instance_ids={ids!r}")
    return chosen


def _expert_action(task: Instance) -> str:
    """Return the reference solution as an action."""
    mark = "END_OF_PATCH"
    while mark in task.patch:
        mark += "_"
    return f"bash git apply --whitespace=nowarn - <<'{mark}'\n{task.patch.rstrip(chr(10))}\n{mark}"


def _told(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data."""
    report = verdict.report
    if report is None:
        return {"outcome": verdict.outcome}
    counts = {"fixed": report.fixed, "to_fix": report.to_fix, "broken": report.broken}
    suspicion = {} if report.suspicion is None else {"suspicion": report.suspicion}
    return {"outcome": verdict.outcome, **counts, **suspicion}


def _summary(verdict: Verdict) -> str:
    if verdict.report is None or not verdict.report.graded:
        return f"[{verdict.outcome}]"
    told = verdict.report
    return f"[{verdict.outcome}: {told.fixed} of {told.to_fix} failing tests pass now, {told.broken} others broke]"
