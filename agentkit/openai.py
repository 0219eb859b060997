"""Client of OpenAI-compatible chat endpoints.

Invariant: every call ends with a reply or an ``EngineError`` that quotes the server. Temporary failures (a busy or
restarting server, a lost connection) are retried with growing pauses; others are not. Only some servers return token
ids, such as `agentkit serve` and vLLM; a reply without them cannot be used for training.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agentkit.errors import EngineError
from agentkit.tool_calls import Tool
from agentkit.types import Message

API_KEY = "OPENAI_API_KEY"
"""Environment variable of the key. It is sent only to the endpoint that the user named."""
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The tokens of a reply."""

    prompt: tuple[int, ...]
    """Ids of the whole prompt."""
    answer: tuple[int, ...]
    """Ids that were sampled, with the one that ends the answer."""
    logprobs: tuple[float, ...]
    """Log-probability of each id of ``answer``."""


class ContextExceeded(EngineError):
    """The conversation and ``max_tokens`` exceed the endpoint's context."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply, with the token counts of the server (0 if it reports none)."""

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (JSON text) of tool calls."""
    tokens: TokenIds | None = None
    """The tokens, if they were asked for."""


class ChatEndpoint:
    """A client of ``POST <url>/chat/completions``. Use it as an asynchronous context manager, in one event loop."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        retries: int = 6,
        first_pause_s: float = 0.5,
        connections: int = 64,
    ) -> None:
        """Create a client; it connects with the first request.

        Args:
            url: base URL of the API, such as ``http://localhost:8000/v1``.
            model: name of the model at the endpoint.
            api_key: key; None reads ``OPENAI_API_KEY``. Local servers need none.
            timeout_s: seconds for one attempt.
            retries: attempts after the first one.
            first_pause_s: seconds before the second attempt; doubled with each further one, up to a minute.
            connections: maximum number of open connections.

        Raises:
            EngineError: ``url`` is not an HTTP URL.
        """
        self.url = base_url(url)
        self.model = model
        key = api_key if api_key is not None else os.environ.get(API_KEY)
        self._retries, self._first_pause_s = retries, first_pause_s
        self._limit_name = "max_tokens"
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def __aenter__(self) -> ChatEndpoint:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        tools: Sequence[Tool] = (),
        token_ids: bool = False,
    ) -> ChatReply:
        """Return the model's reply to ``messages``. Raises ``ContextExceeded`` or another ``EngineError``.

        Args:
            messages: the conversation.
            max_tokens: maximum number of tokens of the reply.
            temperature: of sampling.
            seed: of sampling; servers may ignore it.
            tools: functions that the model may call.
            token_ids: ask for the ids and log-probabilities of the tokens; the server must support
                ``return_token_ids``.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _as_dicts(messages),
            "temperature": temperature,
            self._limit_name: max_tokens,
        }
        if tools:
            body["tools"] = list(tools)
        if seed is not None:
            body["seed"] = seed
        if token_ids:
            body |= {"logprobs": True, "return_token_ids": True}
        answer = await self._post(body)
        if answer.status_code == 400 and "max_completion_tokens" in answer.text and "max_tokens" in body:
            # Newer OpenAI models refuse ``max_tokens``; most other servers know only that name.
            self._limit_name = "max_completion_tokens"
            body[self._limit_name] = body.pop("max_tokens")
            answer = await self._post(body)
        if answer.status_code != 200:
            raise self._refused(answer)
        return self._read(answer, token_ids)

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Send a request, with retries. The response may have an error status."""
        for attempt in range(self._retries + 1):
            try:
                answer = await self._client.post(f"{self.url}/chat/completions", json=body)
            except httpx.TransportError as error:
                if attempt == self._retries:
                    raise EngineError(
                        f"the endpoint {self.url} did not answer, {attempt + 1} times ({type(error).__name__}: "
                        f"{error}): check the URL and that the server runs"
                    ) from error
                pause = self._pause(attempt, None)
            else:
                if answer.status_code not in RETRIED or attempt == self._retries:
                    return answer
                pause = self._pause(attempt, answer.headers.get("retry-after"))
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int, retry_after: str | None) -> float:
        """Return seconds until the next attempt: the server's ``Retry-After``, else doubling with jitter."""
        if retry_after is not None and retry_after.strip().isdigit():
            return min(float(retry_after), MAX_PAUSE_S)
        return min(self._first_pause_s * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0)

    def _refused(self, answer: httpx.Response) -> EngineError:
        message = _message(answer)
        if answer.status_code in (400, 413, 422) and _is_about_context(message):
            return ContextExceeded(f"{self.model} at {self.url}: {message}")
        remedy = {
            401: f"set {API_KEY} to a valid key",
            403: f"set {API_KEY} to a key that may use this model",
            404: "check the URL (it usually ends in /v1) and the model's name",
            429: "the server stayed over its limit: play fewer episodes at once with a smaller engine.max_batch",
        }.get(answer.status_code, "see the server's own log")
        return EngineError(f"{self.model} at {self.url} refused with status {answer.status_code} ({message}): {remedy}")

    def _read(self, answer: httpx.Response, token_ids: bool) -> ChatReply:
        try:
            content = answer.json()
            choice = content["choices"][0]
            usage = content.get("usage") or {}
            message = choice["message"]
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            tokens = _tokens(content) if token_ids else None
            if token_ids and tokens is None:
                raise EngineError(
                    f"{self.url} returns no token ids, or not one log-probability for each: serve the model with "
                    "`agentkit serve` or vLLM, or do without them"
                )
            return ChatReply(
                text=message.get("content") or "",
                finish_reason=choice.get("finish_reason") or "stop",
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
                calls=tuple((function["name"], function.get("arguments") or "{}") for function in functions),
                tokens=tokens,
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.url} does not speak the chat-completions protocol ({answer.text[:200]!r}): check the URL"
            ) from error


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of the protocol; the result of a tool belongs to the last call."""
    given: list[dict[str, Any]] = []
    last = ""
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        for call in message.calls:
            last = f"call{len(given):05d}"
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            one.setdefault("tool_calls", []).append({"id": last, "type": "function", "function": function})
        if message.role == "tool":
            one["tool_call_id"] = last
        given.append(one)
    return given


def base_url(url: str) -> str:
    """``url`` without a trailing slash; ``/v1`` is added to a bare host. Raises ``EngineError`` for no HTTP URL."""
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise EngineError(f"the endpoint {url!r} is not a URL ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EngineError(f"the endpoint {url!r} is not an HTTP URL; write it like http://localhost:8000/v1")
    text = str(parsed).rstrip("/").removesuffix("/chat/completions")
    return text if parsed.path.strip("/") else f"{text}/v1"


def _tokens(content: dict[str, Any]) -> TokenIds | None:
    """Return the tokens of a response; None if ids or log-probabilities are missing."""
    choice = content["choices"][0]
    prompt, answer = content.get("prompt_token_ids"), choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("content")
    if not prompt or not answer or not logprobs or len(logprobs) != len(answer):
        return None
    return TokenIds(tuple(prompt), tuple(answer), tuple(float(token["logprob"]) for token in logprobs))


def _message(answer: httpx.Response) -> str:
    """What a refusal says, in one line: the protocol's ``error.message`` where there is one, else the body."""
    try:
        error = answer.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        text = answer.text
    return " ".join(str(text).split())[:500]


def _is_about_context(message: str) -> bool:
    text = message.lower()
    return "context" in text and any(word in text for word in ("length", "token", "window", "exceed"))
