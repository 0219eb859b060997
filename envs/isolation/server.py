"""The server inside a sandbox: makes environments and answers calls to them over standard input and output.

Usage: ``python -I -m agentkit.envs.isolation.server [DIRECTORY...]``, with directories to import modules from.

A request is ``[number, env, call, arguments...]``; ``env`` identifies the environment. A reply is
``[number, "ok", value]`` or ``[number, kind, message, traceback]``.

Invariant: standard output carries only frames; output of environments and their children goes to standard error. An
exception in an environment becomes a reply with the traceback as text, and its next ``reset`` makes it again. The
server ends when its input ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from itertools import islice
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from agentkit import registry
from agentkit.envs.base import AsyncTextEnv, TextEnv
from agentkit.envs.framing import FrameError, FrameReader
from agentkit.envs.isolation import protocol, validation
from agentkit.envs.spaces import Text, encodable
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import EnvContractError, RegistryError

_TRACEBACK_LIMIT = 16_000
_MESSAGE_LIMIT = 4_000


class ServedEnv:
    """One environment and its arguments. Makes the environment again after ``drop``."""

    def __init__(self, id: str, kwargs: dict[str, Any]) -> None:
        self._id, self._kwargs = id, kwargs
        self._env: TextEnv | None = None

    def env(self) -> TextEnv:
        """Return the environment; make it if there is none."""
        env = self._env
        if env is None:
            made = registry.make(self._id, **self._kwargs)
            env = self._env = SyncTextEnv(made) if isinstance(made, AsyncTextEnv) else made
        return env

    def _begun(self) -> TextEnv:
        if self._env is None:
            raise ResetNeeded("the environment failed before: reset it first")
        return self._env

    def drop(self) -> None:
        """Close and forget the environment."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def describe(self) -> dict[str, Any]:
        return describe(self._id, self._kwargs, self.env())

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        observation, info = validation.check_reset(self.env().reset(seed=seed, options=options))
        return observation, validation.plain(info)

    def step(self, action: Any) -> Any:
        *outcome, info = validation.check_step(self._begun().step(action))
        return *outcome, validation.plain(info)

    def render(self) -> Any:
        rendering = self._begun().render()
        if isinstance(rendering, np.ndarray):
            return rendering
        return validation.check_rendering(rendering)

    def expert(self) -> list[str]:
        return validation.check_plan(list(islice(self._begun().expert(), validation.EXPERT_LIMIT)))


def describe(id: str, kwargs: dict[str, Any], env: TextEnv | AsyncTextEnv) -> dict[str, Any]:
    """Return the fields of ``validation.Description`` as plain data. Raises ``EnvContractError``."""
    real = env.env if isinstance(env, SyncTextEnv) else env
    fps = env.metadata.get("render_fps")
    arguments = {**registry.entry(id).load().kwargs, **kwargs}
    described = {
        "instructions": type(real).instructions_for(**arguments),
        "max_turns": env.max_turns,
        "actions_per_turn": env.actions_per_turn,
        "tools": list(type(real).tools_for(**arguments)),
        # Coroutines are run one after the other.
        "concurrency": "process" if real is not env else env.concurrency,
        "deterministic": real.deterministic,
        "has_expert": type(real).has_expert(),
        "runs_policy_code": type(real).runs_policy_code(**arguments),
        "render_modes": list(env.metadata.get("render_modes", [])),
        "render_mode": env.render_mode,
        "render_fps": None if fps is None else float(fps),
        "observation_space": _space(env.observation_space),
        "action_space": _space(env.action_space),
    }
    validation.check_description(described)
    return described


def _space(space: Any) -> list[Any]:
    if not isinstance(space, Text):
        raise EnvContractError(f"a space is {validation.short(space)}, not an agentkit.Text")
    return [space.max_length, list(space.examples)]


class Server:
    """Answers requests one after the other."""

    def __init__(self) -> None:
        self._envs: dict[int, ServedEnv] = {}

    def answer(self, request: list[Any]) -> bytes:
        """Return the frame that answers a request."""
        number, env, call, *arguments = request
        try:
            value = self._call(env, call, arguments)
            if isinstance(value, np.ndarray):
                return protocol.encode_picture(number, np.ascontiguousarray(value))
            return protocol.encode([number, "ok", value])
        except FrameError as error:
            self._drop(env)
            return _failure(number, "contract", f"{call}: {error}", None)
        except EnvContractError as error:
            self._drop(env)
            return _failure(number, "contract", str(error), None)
        except RegistryError as error:
            return _failure(number, "refused", f"{error}{_remedy(error)}", None)
        except NotImplementedError as error:
            return _failure(number, "unsupported", str(error), error)
        except BaseException as error:  # an environment may raise anything, SystemExit too
            self._drop(env)
            raised = f"{call} raised {type(error).__name__}: {_text(error)}{_remedy(error)}"
            return _failure(number, "crashed", raised, error)

    def _call(self, env: int, call: str, arguments: list[Any]) -> Any:
        if call == "make":
            id, entry_point, kwargs, version = arguments
            if version != protocol.VERSION:
                raise RegistryError(
                    f"the host uses version {version} of the protocol, the sandbox version {protocol.VERSION}; "
                    "rebuild the image with `agentkit sandbox build`"
                )
            register_missing(id, entry_point)
            if (argument := registry.env_class(id).own_sandboxes(**kwargs)) is not None:
                raise RegistryError(
                    f"{id} creates sandboxes itself, which is not possible inside a sandbox: leave `sandbox` out, and "
                    f"name the back end as `{argument}`"
                )
            made = self._envs[env] = ServedEnv(id, kwargs)
            return made.describe()
        if call == "close":
            closed = self._envs.pop(env, None)
            return None if closed is None else closed.drop()
        return getattr(self._envs[env], call)(*arguments)

    def _drop(self, env: int) -> None:
        if env in self._envs:
            try:
                self._envs[env].drop()
            except BaseException:
                traceback.print_exc()


def _remedy(error: BaseException | None) -> str:
    """Return the remedy for a missing package: inside a sandbox it must be in the image."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            return f" (the sandbox has no {package}: `agentkit sandbox build --package` puts packages into its image)"
        error = error.__cause__ or error.__context__
    return ""


def register_missing(id: str, entry_point: str | None) -> None:
    """Register an environment that only the host has registered; does nothing without an ``entry_point``."""
    if entry_point is not None and all(known.id != id or known.target != entry_point for known in registry.list_envs()):
        registry.register(id, entry_point)


def _failure(number: int, kind: str, message: str, error: BaseException | None) -> bytes:
    trace = "" if error is None else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    texts = (message[:_MESSAGE_LIMIT], trace[-_TRACEBACK_LIMIT:])
    return protocol.encode([number, kind, *map(encodable, texts)])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text is not available)"


def main() -> None:
    """Serve until standard input ends."""
    sys.path += [directory for directory in sys.argv[1:] if directory]
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    server, reader = Server(), FrameReader(protocol.LIMITS)
    while data := os.read(requests, 1 << 16):
        for _, content in reader.feed(data):
            reply = memoryview(server.answer(protocol.decode(content)))
            while reply:
                reply = reply[os.write(replies, reply) :]


if __name__ == "__main__":
    main()
