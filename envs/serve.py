"""Runs inside a sandbox: makes environments and answers for them over standard input and output.

Invariant: standard output carries frames and nothing else: what environments and their children print goes to standard
error. Whatever an environment raises becomes an answer with the traceback as text; one that raised is made anew for
its next ``reset``. Ends when its input does.

    python -I -m agentkit.envs.serve [DIRECTORY...]     # directories to look for modules in, besides the installed ones

A request is ``[number, seat, call, arguments...]``, an answer ``[number, "ok", value]`` or ``[number, kind, message,
traceback]``. Environments that share a process are told apart by their seat.
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
from agentkit.envs import answers, frames
from agentkit.envs.adapters import Blocking
from agentkit.envs.base import AsyncTextEnv, TextEnv
from agentkit.envs.spaces import Text
from agentkit.errors import EnvContractError, RegistryError

_TRACEBACK_LIMIT = 16_000
_MESSAGE_LIMIT = 4_000


class Seat:
    """One environment, and how it is made."""

    def __init__(self, id: str, kwargs: dict[str, Any]) -> None:
        self._id, self._kwargs = id, kwargs
        self._env: TextEnv | None = None

    def env(self) -> TextEnv:
        env = self._env
        if env is None:
            made = registry.make(self._id, **self._kwargs)
            env = self._env = Blocking(made) if isinstance(made, AsyncTextEnv) else made
        return env

    def _begun(self) -> TextEnv:
        if self._env is None:
            raise ResetNeeded("the environment failed before: reset it first")
        return self._env

    def drop(self) -> None:
        """Forget an environment that raised, or that is done with."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    # The calls.

    def describe(self) -> dict[str, Any]:
        return describe(self._id, self._kwargs, self.env())

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        observation, info = answers.check_reset(self.env().reset(seed=seed, options=options))
        return observation, answers.plain(info)

    def step(self, action: Any) -> Any:
        *outcome, info = answers.check_step(self._begun().step(action))
        return *outcome, answers.plain(info)

    def render(self) -> Any:
        rendering = self._begun().render()
        if isinstance(rendering, np.ndarray):
            return rendering
        return answers.check_rendering(rendering)

    def expert(self) -> list[str]:
        return answers.check_plan(list(islice(self._begun().expert(), answers.EXPERT_LIMIT)))


def describe(id: str, kwargs: dict[str, Any], env: TextEnv | AsyncTextEnv) -> dict[str, Any]:
    """What ``answers.Description`` holds, as plain data. Raises ``EnvContractError``."""
    real = env.env if isinstance(env, Blocking) else env
    fps = env.metadata.get("render_fps")
    arguments = {**registry.entry(id).load().kwargs, **kwargs}
    described = {
        "instructions": type(real).instructions_for(**arguments),
        "max_turns": env.max_turns,
        "actions_per_turn": env.actions_per_turn,
        # Coroutines are run to their end here, one after the other.
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
    answers.check_description(described)
    return described


def _space(space: Any) -> list[Any]:
    if not isinstance(space, Text):
        raise EnvContractError(f"a space is {answers.short(space)}, not an agentkit.Text")
    return [space.max_length, list(space.examples)]


class Server:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}

    def answer(self, request: list[Any]) -> bytes:
        """The frame that answers a request."""
        number, seat, call, *arguments = request
        try:
            value = self._do(seat, call, arguments)
            if isinstance(value, np.ndarray):
                return frames.picture(number, np.ascontiguousarray(value))
            return frames.message([number, "ok", value])
        except frames.FrameError as error:
            self._forget(seat)
            return _failure(number, "contract", f"{call}: {error}", None)
        except EnvContractError as error:
            self._forget(seat)
            return _failure(number, "contract", str(error), None)
        except RegistryError as error:
            return _failure(number, "refused", f"{error}{_remedy(error)}", None)
        except NotImplementedError as error:
            return _failure(number, "unsupported", str(error), error)
        except BaseException as error:  # an environment may raise anything, SystemExit too
            self._forget(seat)
            raised = f"{call} raised {type(error).__name__}: {_text(error)}{_remedy(error)}"
            return _failure(number, "crashed", raised, error)

    def _do(self, seat: int, call: str, arguments: list[Any]) -> Any:
        if call == "make":
            id, entry_point, kwargs, version = arguments
            if version != frames.VERSION:
                raise RegistryError(
                    f"the host speaks version {version} of the protocol, the sandbox {frames.VERSION}: build the image "
                    "again (agentkit sandbox build)"
                )
            if entry_point is not None and unknown(id, entry_point):
                registry.register(id, entry_point)
            if (argument := registry.env_class(id).own_sandboxes(**kwargs)) is not None:
                raise RegistryError(
                    f"{id} makes sandboxes itself, and none can be made in one: leave `sandbox` out, and name the back "
                    f"end as `{argument}`"
                )
            made = Seat(id, kwargs)
            self._seats[seat] = made
            return made.describe()
        if call == "close":
            gone = self._seats.pop(seat, None)
            return gone.drop() if gone is not None else None
        return getattr(self._seats[seat], call)(*arguments)

    def _forget(self, seat: int) -> None:
        if seat in self._seats:
            try:
                self._seats[seat].drop()
            except BaseException:
                traceback.print_exc()


def _remedy(error: BaseException | None) -> str:
    """What to do where a package is missing: the remedy for the host, if the message has one, is none in here."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            return f" (the sandbox has no {package}: `agentkit sandbox build --package` puts packages into its image)"
        error = error.__cause__ or error.__context__
    return ""


def unknown(id: str, entry_point: str) -> bool:
    return next((known.target != entry_point for known in registry.list_envs() if known.id == id), True)


def _failure(number: int, kind: str, message: str, error: BaseException | None) -> bytes:
    trace = "" if error is None else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    texts = (message[:_MESSAGE_LIMIT], trace[-_TRACEBACK_LIMIT:])
    return frames.message([number, kind, *(text.encode("utf-8", "replace").decode() for text in texts)])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def main() -> None:
    """Serve until standard input ends."""
    sys.path += [directory for directory in sys.argv[1:] if directory]
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    server, unpacker = Server(), frames.Unpacker()
    while data := os.read(requests, 1 << 16):
        for _, content in unpacker.feed(data):
            answer = memoryview(server.answer(frames.parsed(content)))
            while answer:
                answer = answer[os.write(replies, answer) :]


if __name__ == "__main__":
    main()
