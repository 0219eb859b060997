"""What a sandbox server and its clients say to each other, as bytes and back.

Invariant: pure, and the same for both sides. An error crosses the wire as a code of ``Code``; ``ERRORS`` alone decides
which class that is, so that nothing received ever names a class, a module or a path that the receiver acts on. What is
read either has the declared types or raises ``ProtocolError``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from agentkit import errors
from agentkit.errors import ProtocolError, SandboxError, SideEffects
from agentkit.sandboxes import wire
from agentkit.sandboxes.types import ExecRequest, ExecResult

T = TypeVar("T")

CLIENT = "agentkit-client"
"""Header: which client asks; whoever made or attached a sandbox keeps it alive by staying connected."""
CALL = "agentkit-call"
"""Header: a number of this one call, by which it can be withdrawn."""
BEAT = 2.0
"""Seconds between two lines of a silent event stream."""
SNAPSHOTS = "agentkit-snapshot"
"""``agentkit-snapshot/SERVER/ID`` is the image that stands for a snapshot on a server."""


class Code(str, Enum):
    """What went wrong."""

    IMAGE = "image"
    START_TIMEOUT = "start_timeout"
    LOST = "lost"
    UNAVAILABLE = "unavailable"
    BREAKER = "breaker"
    COMMAND = "command"
    RESOURCES = "resources"
    PATH = "path"
    TOO_LARGE = "too_large"
    DISK_FULL = "disk_full"
    PROTOCOL = "protocol"
    TRANSITION = "transition"
    UNSUPPORTED = "unsupported"
    EXPIRED = "expired"
    QUOTA = "quota"
    DENIED = "denied"
    PIPE = "pipe"
    TIMEOUT = "timeout"
    FAILED = "failed"


ERRORS: Mapping[Code, type[Exception]] = {
    Code.IMAGE: errors.ImageError,
    Code.START_TIMEOUT: errors.StartTimeout,
    Code.LOST: errors.SandboxLost,
    Code.BREAKER: errors.BreakerOpen,
    Code.UNAVAILABLE: errors.EngineUnavailable,
    Code.COMMAND: errors.CommandNotFound,
    Code.RESOURCES: errors.ResourcesExhausted,
    Code.PATH: errors.PathError,
    Code.TOO_LARGE: errors.FileTooLarge,
    Code.DISK_FULL: errors.DiskFull,
    Code.PROTOCOL: errors.ProtocolError,
    Code.TRANSITION: errors.InvalidTransition,
    Code.UNSUPPORTED: errors.UnsupportedFeature,
    Code.EXPIRED: errors.LeaseExpired,
    Code.QUOTA: errors.QuotaExceeded,
    Code.DENIED: errors.AccessDenied,
    Code.PIPE: BrokenPipeError,
    Code.TIMEOUT: asyncio.TimeoutError,
    Code.FAILED: errors.SandboxError,
}
"""Subclasses come before their bases."""


@dataclass(frozen=True)
class About:
    """What a call on a channel is about."""

    path: str = ""
    number: float = 0.0
    """A limit, a mode or seconds."""


def pack_error(error: BaseException) -> bytes:
    """What a client may know of ``error``; of one that nobody foresaw, only that there was one."""
    code = next((code for code, kind in ERRORS.items() if isinstance(error, kind)), None)
    if code is None:
        return pack_json({"code": "failed", "message": "the server failed; its log says why", "side_effects": "maybe"})
    told: dict[str, Any] = {"code": code.value, "message": str(error)}
    if isinstance(error, SandboxError):
        told |= {"retryable": error.retryable, "side_effects": error.side_effects, "details": _plain(error.details)}
    return pack_json(told)


def unpack_error(data: bytes) -> Exception:
    """The error that the other side met."""
    try:
        told = json.loads(data)
        kind, message = ERRORS[Code(told["code"])], str(told["message"])
        if not issubclass(kind, SandboxError):
            return kind(message)
        error = kind(message, **{str(name): _rich(value) for name, value in told.get("details", {}).items()})
        if told.get("side_effects") in get_args(SideEffects):
            error.side_effects = told["side_effects"]
        error.retryable = told.get("retryable", kind.retryable) is True
        return error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ProtocolError(f"what answers is no sandbox server, or is broken: it said {data[:200]!r}")


def pack_request(request: ExecRequest) -> bytes:
    head = asdict(request)
    return wire.pack(pack_json({**head, "stdin": None}), head.pop("stdin"))


def unpack_request(data: bytes) -> ExecRequest:
    head, stdin = wire.unpack(data, "bb")
    return unpack(ExecRequest, pack_json({**_object(head), "stdin": ""}), stdin=stdin)


def pack_result(result: ExecResult) -> bytes:
    head = asdict(result)
    stdout, stderr = head.pop("stdout_bytes"), head.pop("stderr_bytes")
    return wire.pack(pack_json(head), stdout, stderr)


def unpack_result(data: bytes) -> ExecResult:
    head, stdout, stderr = wire.unpack(data, "bbb")
    empty = {"stdout_bytes": "", "stderr_bytes": ""}
    return unpack(ExecResult, pack_json({**_object(head), **empty}), stdout_bytes=stdout, stderr_bytes=stderr)


def pack_json(value: Any) -> bytes:
    """JSON of plain data, also where a word is no Unicode."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(kind: Any, data: bytes, **fields: bytes) -> Any:
    """JSON that must have the type ``kind``; ``fields`` are set in it afterwards. Raises ``ProtocolError``."""
    try:
        value = _adapter(kind).validate_python(json.loads(data), strict=False)
    except (ValidationError, ValueError, RecursionError) as error:
        raise ProtocolError(f"what came is no {getattr(kind, '__name__', kind)}: {error}") from None
    for name, content in fields.items():
        object.__setattr__(value, name, content)
    return value


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _object(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    raise ProtocolError(f"{data[:200]!r} is no JSON object")


def _plain(value: Any) -> Any:
    """Details of an error as JSON; bytes as ``{"base64": …}``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _rich(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"])
    return value
