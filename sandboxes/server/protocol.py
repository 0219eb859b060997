"""Wire format of the sandbox server: encode and decode requests, results and errors.

Used by both sides; no I/O. An error is sent as a code, and ``ERRORS`` alone maps codes to classes, so received data
never selects a class, module or path. Decoding returns the declared types or raises ``ProtocolError``.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from agentkit import errors
from agentkit.errors import ProtocolError, SandboxError, SideEffects
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.types import ExecRequest, ExecResult

CLIENT_HEADER = "agentkit-client"
"""Request header: the id of the client. A sandbox stays alive while a client that created or attached it is connected.
"""
CALL_HEADER = "agentkit-call"
"""Request header: the id of this call, by which it can be cancelled."""
HEARTBEAT_SECONDS = 1.0
"""Longest time between two lines of an event stream."""
SNAPSHOT_IMAGE = "agentkit-snapshot"
"""``agentkit-snapshot/SERVER/ID`` is the image name of a snapshot on a server."""

ERRORS: Mapping[str, type[Exception]] = {
    "image": errors.ImageError,
    "start_timeout": errors.StartTimeout,
    "lost": errors.SandboxLost,
    "breaker": errors.BreakerOpen,
    "unavailable": errors.EngineUnavailable,
    "command": errors.CommandNotFound,
    "resources": errors.ResourcesExhausted,
    "path": errors.PathError,
    "too_large": errors.FileTooLarge,
    "disk_full": errors.DiskFull,
    "protocol": errors.ProtocolError,
    "transition": errors.InvalidTransition,
    "unsupported": errors.UnsupportedFeature,
    "expired": errors.SandboxExpired,
    "quota": errors.QuotaExceeded,
    "denied": errors.AccessDenied,
    "pipe": BrokenPipeError,
    "timeout": asyncio.TimeoutError,
    "failed": errors.SandboxError,
}
"""Error classes by their code on the wire. Subclasses come before their bases."""


def pack_error(error: BaseException) -> bytes:
    """Encode ``error`` for a client. Of an unexpected error, only that it happened."""
    code = next((code for code, kind in ERRORS.items() if isinstance(error, kind)), None)
    if code is None:
        return pack_json({"code": "failed", "message": "the server failed; see its log", "side_effects": "maybe"})
    fields: dict[str, Any] = {"code": code, "message": str(error)}
    if isinstance(error, SandboxError):
        fields |= {"retryable": error.retryable, "side_effects": error.side_effects, "details": error.details}
    return pack_json(fields)


def unpack_error(data: bytes) -> Exception:
    """Decode an error; ``ProtocolError`` if ``data`` is not one."""
    try:
        fields = json.loads(data)
        kind, message = ERRORS[fields["code"]], str(fields["message"])
        if not issubclass(kind, SandboxError):
            return kind(message)
        details = fields.get("details", {})
        error = kind(message, **{str(name): _restore_bytes(value) for name, value in details.items()})
        if fields.get("side_effects") in get_args(SideEffects):
            error.side_effects = fields["side_effects"]
        error.retryable = fields.get("retryable", kind.retryable) is True
        return error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ProtocolError(f"the response is not from a working sandbox server: {data[:200]!r}")


def pack_request(request: ExecRequest) -> bytes:
    return protocol.pack(pack_json(vars(request) | {"stdin": ""}), request.stdin)


def unpack_request(data: bytes) -> ExecRequest:
    head, stdin = protocol.unpack(data, "bb")
    return dataclasses.replace(unpack(ExecRequest, head), stdin=stdin)


def pack_result(result: ExecResult) -> bytes:
    head = vars(result) | {"stdout_bytes": "", "stderr_bytes": ""}
    return protocol.pack(pack_json(head), result.stdout_bytes, result.stderr_bytes)


def unpack_result(data: bytes) -> ExecResult:
    head, stdout, stderr = protocol.unpack(data, "bbb")
    return dataclasses.replace(unpack(ExecResult, head), stdout_bytes=stdout, stderr_bytes=stderr)


def pack_arguments(path: str, number: float, data: bytes = b"") -> bytes:
    """Encode the arguments of a call on a channel: a path, a number (a limit, a mode or seconds) and bytes."""
    return protocol.pack(os.fsencode(path), float(number), data)


def unpack_arguments(data: bytes) -> tuple[str, float, bytes]:
    path, number, content = protocol.unpack(data, "bfb")
    return os.fsdecode(path), number, content


def pack_json(value: Any) -> bytes:
    """Encode plain data, dataclasses and bytes as JSON; strings may contain lone surrogates."""
    return json.dumps(value, separators=(",", ":"), default=_jsonable).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return vars(value) if dataclasses.is_dataclass(value) else str(value)


def unpack(kind: Any, data: bytes) -> Any:
    """Decode JSON of type ``kind``. Raises ``ProtocolError``."""
    try:
        return _adapter(kind).validate_python(json.loads(data), strict=False)
    except (ValidationError, ValueError, RecursionError) as error:
        raise ProtocolError(f"expected {getattr(kind, '__name__', kind)}: {error}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _restore_bytes(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"])
    return value
