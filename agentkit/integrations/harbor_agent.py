"""A model behind a chat endpoint as an agent of Harbor 0.25: ``harbor run --agent MODULE:AgentkitAgent``.

Invariant: the model sees the system message, the tools and the results of ``harbor:TASKS``, and the ids in
``rollout_details`` are those that its engine saw and sampled. Needs Harbor's own package, and is imported by Harbor
only.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import base64
import binascii
import importlib.metadata
import posixpath
import shlex
from typing import Any, Literal

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from agentkit.envs.swebench import tools
from agentkit.errors import ConfigError, FileTooLarge, PathError
from agentkit.integrations.harbor import INSTRUCTIONS
from agentkit.openai import API_KEY, ChatEndpoint, ContextExceeded
from agentkit.sandboxes.shell import ShellResult
from agentkit.sandboxes.types import FileInfo
from agentkit.trainers.rollout.episode import invalid_answer_message, system_message
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.types import Message

_STATE = "/tmp/.agentkit-shell"
"""File with the directory and the variables of the shell: each command of Harbor is a process of its own."""
_SHELL = """\
[ ! -f {state} ] || . {state}
trap 'status=$?; {{ export -p; printf "cd %q\\n" "$PWD"; }} >{state}; exit $status' EXIT
{command}
"""
_PIECE = 60_000
"""Characters of a file in one command."""


class AgentkitAgent(BaseAgent):
    """An agent with the tools ``bash``, ``view``, ``create``, ``edit`` and ``submit`` of ``harbor:TASKS``.

    Args:
        *args: arguments of Harbor; its ``--model`` is the name of the model at the endpoint.
        url: base URL of the endpoint, such as that of ``agentkit serve``. The key is in ``OPENAI_API_KEY``.
        max_turns: answers of the model.
        max_tokens: tokens of an answer.
        temperature: of sampling.
        parser: format of answers, as ``env.parser`` of a run.
        command_timeout: seconds of one command.
        output_limit: characters of one observation.
        token_ids: fill ``rollout_details``; the endpoint must return token ids.
        **kwargs: arguments of Harbor.
    """

    def __init__(
        self,
        *args: Any,
        url: str,
        max_turns: int = 50,
        max_tokens: int = 1024,
        temperature: float = 1.0,
        parser: Literal["tagged", "plain"] = "tagged",
        command_timeout: int = 180,
        output_limit: int = 10_000,
        token_ids: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not self.model_name:
            raise ConfigError("the agent needs the name of a model at the endpoint: add --model NAME")
        self._url, self._max_turns, self._token_ids = url, max_turns, token_ids
        self._sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        self._parser = ActionParser(parser)
        self._command_timeout, self._output_limit = command_timeout, output_limit

    @staticmethod
    def name() -> str:
        return "agentkit"

    def version(self) -> str:
        return importlib.metadata.version("agentkit-rl")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: the agent installs nothing in the environment."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Play until the model submits, has no turns left, or its context is full.

        Raises:
            EngineError: the endpoint failed, or returns no token ids.
        """
        turns: dict[str, list[Any]] = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
        context.rollout_details = [turns] if self._token_ids else None
        context.n_input_tokens = context.n_output_tokens = 0
        messages = [
            Message("system", system_message(INSTRUCTIONS, self._parser)),
            Message("user", instruction),
        ]
        workdir = ((await environment.exec("pwd")).stdout or "/").strip()
        observation = instruction
        key = self.extra_env.get(API_KEY)
        async with ChatEndpoint(self._url, str(self.model_name), api_key=key) as endpoint:
            for _ in range(self._max_turns):
                try:
                    reply = await endpoint.chat(messages, **self._sampling, token_ids=self._token_ids)
                except ContextExceeded:
                    return
                context.n_input_tokens += reply.prompt_tokens
                context.n_output_tokens += reply.completion_tokens
                if reply.tokens is not None:
                    turns["prompt_token_ids"].append(list(reply.tokens.prompt))
                    turns["completion_token_ids"].append(list(reply.tokens.answer))
                    turns["logprobs"].append(list(reply.tokens.logprobs))
                answer = self._parser.parse(reply.text)
                if answer.valid:
                    result = await self._act(answer.actions[0], environment, workdir)
                    if result is None:
                        return
                    shown = observation = result
                else:
                    shown = invalid_answer_message(observation, self._parser, answer.problem)
                messages += [Message("assistant", reply.text), Message("user", shown)]

    async def _act(self, action: str, environment: BaseEnvironment, workdir: str) -> str | None:
        """Return the observation after an action; None after ``submit``."""
        try:
            call = tools.parse(action)
        except ValueError as problem:
            return f"[{problem}: nothing was changed]"
        if call is None:
            return f"[this is no action; the tools are:\n{tools.USAGE}]"
        if isinstance(call, tools.Submit):
            return None
        if isinstance(call, tools.Bash):
            return await self._bash(call.command, environment)
        placed = type(call)(**{**vars(call), "path": posixpath.normpath(posixpath.join(workdir, call.path))})
        files: Any = _Files(environment)
        return tools.clip(await tools.use_editor(files, placed, self._output_limit), self._output_limit)

    async def _bash(self, command: str, environment: BaseEnvironment) -> str:
        timeout = self._command_timeout
        try:
            done = await environment.exec(_SHELL.format(state=_STATE, command=command), timeout_sec=timeout)
        except (RuntimeError, TimeoutError) as error:  # environments have no common error
            if not isinstance(error, TimeoutError) and "timed out" not in str(error):
                raise
            result = ShellResult(None, b"", b"", 0.0, timed_out=True)
        else:
            result = ShellResult(done.return_code, (done.stdout or "").encode(), (done.stderr or "").encode(), 0.0)
        return tools.shown(result, self._output_limit, timeout)


class _Files:
    """The files that the agent's user may use, in the form that the editor needs."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self._environment = environment

    async def stat(self, path: str) -> FileInfo | None:
        done = await self._environment.exec(f"stat -c '%a %s %F' -- {shlex.quote(path)}")
        if done.return_code != 0:
            return None
        mode, size, kind = (done.stdout or "").strip().split(" ", 2)
        known = "file" if "regular" in kind else "directory" if kind == "directory" else "other"
        return FileInfo(path, known, int(size), int(mode, 8), 0.0)

    async def read(self, path: str, *, limit: int) -> bytes:
        found = await self.stat(path)
        if found is None:
            raise PathError(f"cannot read {path}: No such file or directory", path=path)
        if found.kind != "file":
            problem = "Is a directory" if found.kind == "directory" else "it is not a regular file"
            raise PathError(f"cannot read {path}: {problem}", path=path)
        if found.size > limit:
            raise FileTooLarge(f"{path} has {found.size} bytes, more than {limit}")
        try:
            return base64.b64decode(await self._do(f"base64 -- {shlex.quote(path)}", path))
        except binascii.Error:
            raise PathError(f"cannot read {path}: the output of base64 is cut", path=path) from None

    async def write(self, path: str, data: str, *, mode: int) -> None:
        text, target = base64.b64encode(data.encode()).decode(), shlex.quote(path)
        await self._do(f"mkdir -p -- {shlex.quote(posixpath.dirname(path))} && : >{target}", path)
        for start in range(0, len(text), _PIECE):
            await self._do(f"printf %s {text[start : start + _PIECE]} | base64 -d >>{target}", path)
        await self._do(f"chmod {mode:o} -- {target}", path)

    async def _do(self, command: str, path: str) -> str:
        done = await self._environment.exec(command)
        if done.return_code != 0:
            raise PathError((done.stderr or done.stdout or f"{path} cannot be used").strip(), path=path)
        return done.stdout or ""
