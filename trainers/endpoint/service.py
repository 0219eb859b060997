"""Chat requests become prompts of an engine, and what it samples becomes answers.

Invariant: in a recorded session, each answer that an agent gets is recorded with exactly the ids that the engine saw
and sampled, and a request that cannot be trained on is refused with the reason.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from agentkit.errors import EngineError, RendererError
from agentkit.trainers.endpoint.dialogue import Dialogues
from agentkit.trainers.endpoint.protocol import ApiError, ChatRequest, Reply
from agentkit.trainers.endpoint.recorder import Prompt, SessionRecorder
from agentkit.trainers.inference.base import Generation, Sampling, TokenGenerator

_MAX_ABORTS = 100
"""Regenerations of one answer before the engine counts as broken."""
_PLACES = 1024
"""Sessions of the engine among which conversations without a recorder are distributed, by their first messages."""


@dataclass(eq=False)
class Session:
    """A recorded session: its requests become sequences to train on."""

    name: str
    """The engine's session."""
    temperature: float
    """The temperature of the run, which all requests have."""
    max_tokens: int
    """Maximum tokens of one answer."""
    seeds: Callable[[int], int]
    """Returns the sampling seed of a request from its number."""
    recorder: SessionRecorder = field(default_factory=SessionRecorder)
    requests: int = 0
    refusals: list[str] = field(default_factory=list)
    """Why requests were refused."""
    answering: set[asyncio.Task[Reply]] = field(default_factory=set)
    """Answers that are being generated."""
    failure: EngineError | None = None
    """The error of the engine, if it failed."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request that the engine can compute."""

    request: ChatRequest
    prompt: Prompt
    sampling: Sampling
    session: Session | None
    engine_session: str


class ChatService:
    """Answers chat requests with an engine.

    Args:
        engine: generates the tokens.
        dialogues: the chat format of its model.
        model: the model's name in requests.
        max_context: maximum tokens of prompt and answer.
    """

    def __init__(self, engine: TokenGenerator, dialogues: Dialogues, model: str, max_context: int) -> None:
        self.model = model
        self._engine, self._dialogues, self._max_context = engine, dialogues, max_context

    def accept(self, request: ChatRequest, session: Session | None = None) -> Work:
        """Return the work for a request.

        Args:
            request: the request.
            session: the session that records it; None records nothing.

        Raises:
            ApiError: the request cannot be answered, or not be trained on.
        """
        try:
            return self._accepted(request, session)
        except ApiError as error:
            if session is not None:
                session.refusals.append(str(error))
            raise

    async def answer(self, work: Work) -> Reply:
        """Generate and record the answer.

        Raises:
            ApiError: the engine failed.
        """
        begun = time.perf_counter()
        try:
            generation = await self._generate(work)
        except EngineError as error:
            if work.session is not None:
                work.session.failure = error
            raise ApiError(503 if error.fatal else 500, f"the engine failed: {error}") from error
        generate_s = time.perf_counter() - begun
        dialogue, request, ids = work.prompt.dialogue, work.request, generation.ids
        answer = dialogue.answer(ids, request.stop)
        if work.session is not None:
            work.session.recorder.add(work.prompt, generation, answer, generate_s)
        # The token that ends an answer is no part of its text; it has a log-probability where its id is asked for.
        ended = int(ids[-1]) in dialogue.stop_ids and not request.return_token_ids
        finish = "length" if generation.finish_reason == "length" else "stop"
        logprobs = zip(ids[: len(ids) - ended], generation.logprobs, strict=False) if request.logprobs else ()
        return Reply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model,
            content=answer.content,
            calls=answer.calls,
            finish_reason="tool_calls" if answer.calls else finish,
            prompt_tokens=len(work.prompt.ids),
            completion_tokens=len(ids),
            version=generation.versions[-1][0],
            tokens=tuple((dialogue.spell([id_]), float(logprob)) for id_, logprob in logprobs),
            ids=(tuple(work.prompt.ids.tolist()), tuple(ids.tolist())) if request.return_token_ids else None,
        )

    def _accepted(self, request: ChatRequest, session: Session | None) -> Work:
        if request.model != self.model:
            message = f"there is no model {request.model[:200]!r}; the model here is {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if session is not None:
            check_trainable(request, session.temperature)
        recorder = SessionRecorder() if session is None else session.recorder
        try:
            prompt = recorder.prompt(self._dialogues.of(request.tools), request.messages)
        except RendererError as error:
            param = "tools" if request.tools else "messages"
            raise ApiError(400, f"the model's chat template: {error}", param=param) from error
        room = self._max_context - len(prompt.ids)
        if room < 1:
            raise ApiError(
                400,
                f"the conversation has {len(prompt.ids)} tokens, which leaves no room for an answer in the maximum "
                f"context length of {self._max_context} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        most = room if session is None else min(room, session.max_tokens)
        temperature = 1.0 if request.temperature is None else request.temperature
        seed = None if request.seed is None else request.seed % 2**63
        if session is None:
            opening = repr(request.messages[: 1 + (request.messages[0].role == "system")])
            engine_session = f"chat{zlib.crc32(opening.encode()) % _PLACES}"
        else:
            temperature, seed, engine_session = session.temperature, session.seeds(session.requests), session.name
            session.requests += 1
        sampling = Sampling(
            min(most, request.max_tokens or most),
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            stop_ids=prompt.dialogue.stop_ids,
            stop_strings=request.stop,
            seed=seed,
        )
        return Work(request, prompt, sampling, session, engine_session)

    async def _generate(self, work: Work) -> Generation:
        """Generate an answer; repeat as long as weight updates interrupt it."""
        for _ in range(_MAX_ABORTS):
            generation = await self._engine.generate(work.prompt.ids, work.sampling, session=work.engine_session)
            if generation.finish_reason != "abort":
                if not len(generation.ids):
                    raise EngineError(f"the engine gave an empty answer (finish_reason={generation.finish_reason!r})")
                return generation
        raise EngineError(f"the engine aborted one answer {_MAX_ABORTS} times and does not resume")


def check_trainable(request: ChatRequest, temperature: float) -> None:
    """Refuse a request of a recorded session whose samples would not be those of the policy that is trained.

    Args:
        request: the request.
        temperature: the temperature of the run, at which the learner computes log-probabilities.

    Raises:
        ApiError: with the parameter and the reason.
    """
    problems = {
        "temperature": (
            request.temperature not in (None, temperature),
            f"the run samples at temperature {temperature:g} (rollout.temperature, or evaluation.temperature)",
        ),
        "top_p": (
            request.top_p not in (None, 1.0),
            "truncated sampling is not the distribution that is trained",
        ),
        "seed": (request.seed is not None, "the run chooses it, because episodes of a group must differ"),
    }
    for param, (broken, reason) in problems.items():
        if broken:
            value = getattr(request, param)
            message = f"{param}={value} cannot be trained on: {reason}; leave it out"
            raise ApiError(400, message, param=param, code="not_trainable")
