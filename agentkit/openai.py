"""Any OpenAI-compatible server as a policy to be evaluated: chat messages in, text out.

Invariant: every call ends, with a reply or with an ``EngineError`` that says what the server said; what may pass by
itself (a busy or restarting server, a lost connection) is tried again with growing pauses, what will not is not.
An endpoint gives neither token ids nor versions of its weights, so that it can be measured but never trained on.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from agentkit.errors import EngineError
from agentkit.types import Message

API_KEY = "OPENAI_API_KEY"
"""Environment variable of the key, sent to the endpoint that the user named and nowhere else."""
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_PAUSE_S = 60.0


class ContextExceeded(EngineError):
    """The conversation and the answer asked for do not fit into the endpoint's context."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One answer, with the server's own count of tokens (0 where it does not tell)."""

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


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
        """``timeout_s`` bounds one attempt; ``first_pause_s`` doubles with each further one, up to a minute.

        ``api_key`` is read from the environment (``OPENAI_API_KEY``) when it is None; local servers need none.
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
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> ChatReply:
        """The answer to ``messages``. Raises ``ContextExceeded`` or another ``EngineError``."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [asdict(message) for message in messages],
            "temperature": temperature,
            self._limit_name: max_tokens,
        }
        if seed is not None:
            body["seed"] = seed
        answer = await self._post(body)
        if answer.status_code == 400 and "max_completion_tokens" in answer.text and "max_tokens" in body:
            # Newer servers of OpenAI's renamed the limit and refuse the old name, which most other servers know only.
            self._limit_name = "max_completion_tokens"
            body[self._limit_name] = body.pop("max_tokens")
            answer = await self._post(body)
        if answer.status_code != 200:
            raise self._refused(answer)
        return self._read(answer)

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """One request with its retries; the answer may still be a refusal."""
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
        """Seconds until the next attempt: what the server asks for, else doubling, with jitter against stampedes."""
        if retry_after is not None and retry_after.strip().isdigit():
            return min(float(retry_after), MAX_PAUSE_S)
        return min(self._first_pause_s * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0)

    def _refused(self, answer: httpx.Response) -> EngineError:
        said = _message(answer)
        if answer.status_code in (400, 413, 422) and _is_about_context(said):
            return ContextExceeded(f"{self.model} at {self.url}: {said}")
        remedy = {
            401: f"set {API_KEY} to a valid key",
            403: f"set {API_KEY} to a key that may use this model",
            404: "check the URL (it usually ends in /v1) and the model's name",
            429: "the server stayed over its limit: play fewer episodes at once with a smaller engine.max_batch",
        }.get(answer.status_code, "see the server's own log")
        return EngineError(f"{self.model} at {self.url} refused with status {answer.status_code} ({said}): {remedy}")

    def _read(self, answer: httpx.Response) -> ChatReply:
        try:
            content = answer.json()
            choice = content["choices"][0]
            usage = content.get("usage") or {}
            return ChatReply(
                text=choice["message"].get("content") or "",
                finish_reason=choice.get("finish_reason") or "stop",
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.url} does not speak the chat-completions protocol ({answer.text[:200]!r}): check the URL"
            ) from error


def base_url(url: str) -> str:
    """``url`` without a trailing slash; ``/v1`` is added to a bare host. Raises ``EngineError`` for no HTTP URL."""
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise EngineError(f"the endpoint {url!r} is no URL ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EngineError(f"the endpoint {url!r} is no HTTP URL: write it like http://localhost:8000/v1")
    text = str(parsed).rstrip("/").removesuffix("/chat/completions")
    return text if parsed.path.strip("/") else f"{text}/v1"


def _message(answer: httpx.Response) -> str:
    """What a refusal says, in one line: the protocol's ``error.message`` where there is one, else the body."""
    try:
        error = answer.json()["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        said = answer.text
    return " ".join(str(said).split())[:500]


def _is_about_context(said: str) -> bool:
    text = said.lower()
    return "context" in text and any(word in text for word in ("length", "token", "window", "exceed"))
