"""One session of OpenEnv's protocol (0.10): its messages, and the environment behind them.

Invariant: every message has exactly one answer. A message that is not valid leaves the episode as it is; a failure of
the environment ends the session. The names of types, fields and error codes are OpenEnv's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentkit.envs.isolation.validation import Description, plain, short
from agentkit.envs.spaces import Text
from agentkit.envs.vector.slots import Slot
from agentkit.errors import AgentkitError

M = TypeVar("M", bound=BaseModel)

MAX_STEPS = "x-max-steps"
"""Keyword of our schema of actions: steps after which an episode is truncated."""
_REASONS = 5
"""Reasons that the refusal of one message lists."""


def _encodable(text: str) -> str:
    if text not in Text():
        raise ValueError("it contains half of a surrogate pair, which cannot be encoded")
    return text


class TextAction(BaseModel):
    """One action of a text environment."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, AfterValidator(_encodable)]
    metadata: dict[str, Any] = Field(default_factory=dict)


class TextObservation(BaseModel):
    """What a text environment shows after ``reset`` or an action."""

    text: str
    instructions: str = Field(default="", description="The rules of the task; in the first observation of an episode.")
    admissible_actions: list[str] | None = Field(default=None, description="All valid actions, if they can be listed.")
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="What the environment reports, with `success`, `truncated` and `action_valid`.",
    )


class TextState(BaseModel):
    """The state of a session."""

    episode_id: str | None = None
    step_count: int = 0


class ResetRequest(BaseModel):
    """How an episode begins; further fields are the options of the environment's ``reset``."""

    model_config = ConfigDict(extra="allow", strict=True)

    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    episode_id: str | None = Field(default=None, max_length=255)


class Refusal(Exception):
    """A message that is not valid, or a session that cannot continue, as OpenEnv reports it."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    @property
    def data(self) -> dict[str, Any]:
        return {"message": str(self), "code": self.code, **self.details}


class Failure(Refusal):
    """A refusal that ends the session."""


def schemas(description: Description, max_steps: int) -> dict[str, Any]:
    """Return the JSON schemas of actions, observations and states for an environment."""
    action: dict[str, Any] = TextAction.model_json_schema() | {MAX_STEPS: max_steps}
    longest, examples = description.action_space
    action["properties"]["text"] |= {} if longest is None else {"maxLength": longest}
    action["properties"]["text"] |= {"examples": list(examples)} if examples else {}
    return {
        "action": action,
        "observation": TextObservation.model_json_schema(),
        "state": TextState.model_json_schema(),
    }


def parsed(text: str | None) -> dict[str, Any]:
    """Return the message in a frame; None is a frame of bytes. Raises ``Refusal``."""
    try:
        message = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise Refusal("INVALID_JSON", f"Invalid JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
        raise Refusal("VALIDATION_ERROR", "a message is an object with `type` and, if it has data, an object `data`")
    return message


def validated(model: type[M], data: Any) -> M:
    """Return ``data`` as ``model``. Raises ``Refusal`` with the reasons."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[:_REASONS]
        reasons = "; ".join(f"{'.'.join(map(str, reason['loc']))}: {reason['msg']}" for reason in found)
        raise Refusal("VALIDATION_ERROR", reasons, errors=found) from None


class Session:
    """An environment and its current episode.

    Args:
        slot: the environment; the session closes it.
        instructions: the rules of the task.
        max_steps: steps after which an episode is truncated.
    """

    def __init__(self, slot: Slot, instructions: str, max_steps: int) -> None:
        self._slot, self._instructions, self._max_steps = slot, instructions, max_steps
        self._state = TextState()
        self._playing = False

    async def answer(self, message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return type and data of the answer to a message. Raises ``Refusal``, and ``Failure`` at the end."""
        data = message.get("data", {})
        match message.get("type"):
            case "reset":
                return "observation", await self.reset(validated(ResetRequest, data))
            case "step":
                return "observation", await self.step(validated(TextAction, data).text)
            case "state":
                return "state", self._state.model_dump()
            case unknown:
                raise Refusal("UNKNOWN_TYPE", f"Unknown message type: {short(unknown)}")

    async def reset(self, request: ResetRequest) -> dict[str, Any]:
        """Begin an episode; return the data of an observation. Raises ``Failure``."""
        self._playing = False
        try:
            text, info = await self._slot.reset(seed=request.seed, options=request.model_extra or None)
        except AgentkitError as error:
            raise Failure("EXECUTION_ERROR", f"reset: {error}") from error
        self._state = TextState(episode_id=request.episode_id)
        self._playing = True
        return _observation(text, info, instructions=self._instructions)

    async def step(self, action: str) -> dict[str, Any]:
        """Take an action; return the data of an observation. Raises ``Refusal`` and ``Failure``."""
        if not self._playing:
            raise Refusal("VALIDATION_ERROR", "no episode is in progress: send a reset first")
        try:
            text, reward, terminated, truncated, info = await self._slot.step(action)
        except AgentkitError as error:
            raise Failure("EXECUTION_ERROR", f"step: {error}") from error
        self._state.step_count += 1
        truncated = truncated or (not terminated and self._state.step_count >= self._max_steps)
        self._playing = not (terminated or truncated)
        return _observation(text, info, reward=reward, done=not self._playing, truncated=truncated)

    async def close(self) -> None:
        """Close the environment."""
        await self._slot.close()


def _observation(
    text: str,
    info: Mapping[str, Any],
    *,
    instructions: str = "",
    reward: float | None = None,
    done: bool = False,
    truncated: bool = False,
) -> dict[str, Any]:
    """Return the data of an observation.

    It has the metadata twice, as from OpenEnv's server: typed clients read them inside the observation.
    """
    metadata = plain(info) | {"success": bool(info.get("success")), "truncated": truncated}
    admissible = metadata.pop("admissible_actions", None)
    observation = {
        "text": text,
        "instructions": instructions,
        "admissible_actions": admissible,
        "metadata": metadata,
    }
    return {"observation": observation, "reward": reward, "done": done, "metadata": metadata}
