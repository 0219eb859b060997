"""Play the environment of an OpenEnv server (protocol 0.10): ``agentkit.make("openenv:http://127.0.0.1:8000")``.

Invariant: a failure of the server or of the connection is an ``EnvError``, which voids the episode; an action that the
server refuses is an invalid action of the policy. After a failure or an interrupted call the connection is not used
again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.isolation import validation
from agentkit.envs.spaces import Text
from agentkit.errors import ConfigError, EnvContractError, EnvCrashed, EnvTimeout
from agentkit.extras import require_openenv
from agentkit.integrations.openenv_session import MAX_STEPS, Refusal, parsed
from agentkit.integrations.openenv_tokens import TOKEN, find_tokens
from agentkit.sandboxes.arguments import check_positive
from agentkit.sandboxes.server.auth import is_loopback
from agentkit.sandboxes.tasks import bounded

_LIMIT = 16 << 20
"""Bytes of the longest message or description."""
_CONNECT_SECONDS, _PING_SECONDS, _LONGEST_WAIT = 10.0, 20.0, 2.0
_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}

_waiting: collections.Counter[str] = collections.Counter()
"""Environments of this process that wait for a session, by server: others give theirs back between episodes."""


@dataclass(frozen=True)
class Server:
    """What a server says about its environment."""

    instructions: str
    field: str | None
    """The field of an action that holds its text; None: an action is a JSON object."""
    actions: Text
    max_steps: int | None
    """Steps after which the server truncates an episode; None: it does not say."""


class OpenEnv(AsyncTextEnv):
    """An environment on an OpenEnv server: one of `agentkit env serve`, or any other.

    An action is a text if the server's actions have exactly one required field and it is a text, otherwise a JSON
    object, whose schema is part of the instructions. Each environment has a session of its own from ``reset`` on.

    Args:
        url: address of the server, with the scheme ``http``, ``https``, ``ws`` or ``wss``.
        token_file: file with the token for the server; default: ``$AGENTKIT_OPENENV_TOKEN``, if it is set.
        success_reward: return from which an ended episode is a success, if the server does not send ``success``.
        timeout: seconds that the server may take to answer.
        capacity_timeout: seconds to wait for a session while all are in use. Keep it below ``reset_timeout``.

    Raises:
        ConfigError: an argument is wrong.
        MissingExtra: the extra ``openenv`` is not installed.
        EnvError: the server does not answer, or is not an OpenEnv server.
    """

    deterministic = False

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        success_reward: float = 1.0,
        timeout: float = 60.0,
        capacity_timeout: float = 50.0,
    ) -> None:
        check_positive(timeout=timeout, capacity_timeout=capacity_timeout)
        self._server = _described(url, token_file)
        self.instructions = self._server.instructions
        self.max_turns = self._server.max_steps or type(self).max_turns
        self.action_space = self._server.actions
        self._url, self._headers = _address(url), _headers(url, token_file)
        self._success_reward, self._timeout, self._capacity_timeout = success_reward, timeout, capacity_timeout
        self._socket: Any = None
        self._playing = False
        self._return = 0.0
        self._shown = ""

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        return _described(kwargs["url"], kwargs.get("token_file")).instructions

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        return _described(kwargs["url"], kwargs.get("token_file")).max_steps or cls.max_turns

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        self._playing = False
        data = {**(options or {}), **({} if seed is None else {"seed": seed})}
        try:
            answer = await self._begin(data)
        except Refusal as refusal:
            await self.close()
            raise EnvContractError(f"{self._url} refuses the reset {validation.short(data)}: {refusal}") from None
        text, _, terminated, truncated, info = _step(answer, 0.0, self._success_reward)
        if terminated or truncated:
            raise EnvContractError(f"{self._url} ended the episode in its reset")
        self._playing, self._return, self._shown = True, 0.0, text
        return text, info

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if not self._playing:
            raise EnvCrashed("step without an episode: call reset first")
        try:
            answer = await self._call("step", _payload(action, self._server.field))
        except Refusal as refusal:
            text = f"The action is not valid: {refusal}\n\n{self._shown}"
            return text, 0.0, False, False, {"success": False, "action_valid": False}
        result = _step(answer, self._return, self._success_reward)
        self._shown, reward, terminated, truncated, _ = result
        self._return += reward
        self._playing = not (terminated or truncated)
        if not self._playing and _waiting[self._url]:
            await self.close()
        return result

    async def close(self) -> None:
        self._playing = False
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(Exception):
                await socket.close()

    async def _begin(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Reset, in a new session if there is none; wait while all sessions are in use."""
        loop = asyncio.get_running_loop()
        end, delay = loop.time() + self._capacity_timeout, 0.05
        try:
            return await self._call("reset", data)
        except _Full:
            _waiting[self._url] += 1
        try:
            while True:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _LONGEST_WAIT)
                try:
                    return await self._call("reset", data)
                except _Full as full:
                    if loop.time() > end:
                        raise EnvTimeout(
                            f"{self._url} had no free session within {self._capacity_timeout:g} s ({full}); let it "
                            "serve more sessions, or increase capacity_timeout and reset_timeout"
                        ) from None
        finally:
            _waiting[self._url] -= 1

    async def _call(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            Refusal: the server refuses the message, and the session continues.
            _Full: the server has no session left.
            EnvCrashed, EnvTimeout, EnvContractError: the session is over.
        """
        from websockets.exceptions import WebSocketException

        try:
            answer = await bounded(self._exchange({"type": kind, "data": data}), self._timeout)
            if answer.get("type") == "error" and answer["data"].get("code") == "VALIDATION_ERROR":
                raise Refusal("VALIDATION_ERROR", _reason(answer["data"]))
            return _data(answer, self._url)
        except Refusal:
            raise
        except BaseException as error:  # also a cancellation: the answer to this message would be taken for the next
            self._playing = False
            socket, self._socket = self._socket, None
            if socket is not None:
                socket.transport.abort()
            if isinstance(error, asyncio.TimeoutError):
                raise EnvTimeout(f"{self._url} did not answer {kind} within {self._timeout:g} s") from None
            if isinstance(error, OSError | WebSocketException):
                raise EnvCrashed(f"the connection to {self._url} failed: {_said(error)}") from error
            raise

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            self._socket = await self._connect()
        with contextlib.suppress(ConnectionClosed):  # a server that is full answers before it is asked
            await self._socket.send(json.dumps(message))
        text = await self._socket.recv()
        try:
            return parsed(text if isinstance(text, str) else None)
        except Refusal as error:
            raise EnvContractError(f"{self._url} is not an OpenEnv server: {error}") from None

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect

        try:
            return await connect(
                f"{self._url.replace('http', 'ws', 1)}/ws",
                additional_headers=self._headers,
                max_size=_LIMIT,
                open_timeout=_CONNECT_SECONDS,
                ping_interval=_PING_SECONDS,
                ping_timeout=None,  # `timeout` bounds each call, and a silent server may be busy
                proxy=None if is_loopback(urlsplit(self._url).hostname or "") else True,
            )
        except (TimeoutError, asyncio.TimeoutError):
            raise EnvCrashed(f"no connection to {self._url} within {_CONNECT_SECONDS:g} s") from None


class _Full(Exception):
    """All sessions of the server are in use."""


def _data(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the data of an observation. Raises ``_Full``, ``EnvCrashed`` or ``EnvContractError``."""
    kind, data = answer.get("type"), answer.get("data")
    if kind == "observation" and isinstance(data, dict):
        return data
    if kind != "error" or not isinstance(data, dict):
        raise EnvContractError(f"{url} is not an OpenEnv server: it sent a message {validation.short(kind)}")
    if data.get("code") == "CAPACITY_REACHED":
        raise _Full(_reason(data))
    raise EnvCrashed(f"{url} reports {validation.short(data.get('code'))}: {_reason(data)}")


def _reason(data: Mapping[str, Any]) -> str:
    """Return the text of an error, with the first of pydantic's details if it has them."""
    message, errors = str(data.get("message", "no reason given"))[:2000], data.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict) and message == "Invalid message":
        where = ".".join(map(str, errors[0].get("loc") or ()))
        return f"{where}: {errors[0].get('msg', message)}"
    return message


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _step(data: Mapping[str, Any], earlier: float, success_reward: float) -> tuple[str, float, bool, bool, Info]:
    """Return the result of a step from the data of an observation. Raises ``EnvContractError``.

    Args:
        data: what the server sent.
        earlier: return of the episode so far.
        success_reward: return from which an ended episode is a success, if the server does not say.
    """
    observation, reward = data.get("observation"), data.get("reward")
    if not isinstance(observation, dict):
        raise EnvContractError(f"the observation is {validation.short(observation)}, which is not an object")
    metadata = data.get("metadata") or observation.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise EnvContractError(f"the metadata is {validation.short(metadata)}, which is not an object")
    text, done = _text(observation), bool(data.get("done"))
    truncated = done and metadata.get("truncated") is True
    terminated = done and not truncated
    text, number, terminated, truncated, info = validation.check_step(
        (text, 0.0 if reward is None else reward, terminated, truncated, metadata)
    )
    success = metadata.get("success", earlier + number >= success_reward)
    admissible = observation.get("admissible_actions")
    known = {"admissible_actions": admissible} if _are_texts(admissible) else {}
    own = {name: value for name, value in info.items() if name != "truncated"}
    valid = metadata.get("action_valid") is not False
    own |= {**known, "success": terminated and success is True, "action_valid": valid}
    return text, number, terminated, truncated, own


def _text(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field if that is a text, otherwise JSON."""
    shown = {name: value for name, value in observation.items() if name != "metadata"}
    if set(shown) == {"text", "instructions", "admissible_actions"}:  # of `agentkit env serve`
        shown = {"text": shown["text"]}
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _payload(action: str, field: str | None) -> dict[str, Any]:
    """Return the data of an action. Raises ``Refusal`` if it has to be a JSON object and is not."""
    if field is not None:
        return {field: action}
    try:
        value = json.loads(action)
    except (ValueError, RecursionError) as error:
        raise Refusal("VALIDATION_ERROR", f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("VALIDATION_ERROR", "it is not a JSON object")
    return value


def _address(url: str) -> str:
    """Return the address of a server with the scheme ``http`` or ``https``. Raises ``ConfigError``."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _SCHEMES and parts.hostname and not (parts.query or parts.fragment or parts.username):
            _ = parts.port
            return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"
    except ValueError:
        pass
    raise ConfigError(f"{url!r} is not the address of an OpenEnv server, such as openenv:http://127.0.0.1:8000")


def _headers(url: str, token_file: str | None) -> dict[str, str]:
    """Return the header with the token. Raises ``ConfigError`` if it would be sent unprotected."""
    tokens = find_tokens(token_file)
    if not tokens:
        return {}
    address = urlsplit(_address(url))
    if address.scheme != "https" and not is_loopback(address.hostname or ""):
        raise ConfigError(f"the token would be sent unprotected to {url}; use https")
    return {"Authorization": f"Bearer {tokens[0]}"}


@functools.lru_cache(maxsize=1024)
def _described(url: str, token_file: str | None) -> Server:
    """Ask a server for its description; once in a process. Blocks.

    Raises:
        ConfigError, MissingExtra: the arguments or the installation are wrong.
        EnvCrashed, EnvContractError: the server does not answer, or is not an OpenEnv server.
    """
    require_openenv("an OpenEnv server")
    address, headers = _address(url), _headers(url, token_file)
    local = is_loopback(urlsplit(address).hostname or "")
    with httpx.Client(timeout=_CONNECT_SECONDS, headers=headers, trust_env=not local) as client:
        schema = _fetched(client, f"{address}/schema")
        metadata = _fetched(client, f"{address}/metadata")
    action = schema.get("action")
    if not isinstance(action, dict):
        raise EnvContractError(f"{address} is not an OpenEnv server: its /schema has no action")
    return server_of(action, str(metadata.get("description") or ""))


def _fetched(client: httpx.Client, url: str) -> dict[str, Any]:
    body = bytearray()
    try:
        with client.stream("GET", url) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > _LIMIT:
                    raise EnvContractError(f"{url} is longer than {_LIMIT} bytes")
            if response.status_code in (401, 403):
                raise ConfigError(f"{url} refuses the token, or needs one: set {TOKEN} or token_file")
            response.raise_for_status()
        return parsed(body.decode())
    except httpx.HTTPError as error:
        raise EnvCrashed(f"no OpenEnv server answers at {url}: {_said(error)}") from None
    except (Refusal, UnicodeDecodeError) as error:
        raise EnvContractError(f"{url} is not of an OpenEnv server: {error}") from None


def server_of(action: Mapping[str, Any], description: str) -> Server:
    """Return what the schema of actions and the description of an environment say.

    Args:
        action: JSON schema of actions.
        description: what the environment is.
    """
    properties: dict[str, Any] = {
        name: value for name, value in (action.get("properties") or {}).items() if name != "metadata"
    }
    required = [name for name in action.get("required") or () if name in properties]
    limit = action.get(MAX_STEPS)
    max_steps = limit if isinstance(limit, int) and limit > 0 else None
    if len(required) == 1 and properties[required[0]].get("type") == "string":
        field = properties[required[0]]
        said = f"An action is a text: {field['description']}" if field.get("description") else ""
        examples = field.get("enum") or field.get("examples")
        longest = field.get("maxLength")
        space = Text(
            longest if isinstance(longest, int) else None, examples=tuple(examples) if _are_texts(examples) else ()
        )
        return Server("\n\n".join(filter(None, (description, said))), required[0], space, max_steps)
    shown = {
        "properties": properties,
        "required": required,
        **({"$defs": action["$defs"]} if "$defs" in action else {}),
    }
    said = f"An action is a JSON object with this schema:\n{json.dumps(shown, ensure_ascii=False)}"
    return Server("\n\n".join(filter(None, (description, said))), None, Text(), max_steps)
