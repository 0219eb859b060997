"""Validate commands and paths, and translate them into requests to a back end. Pure functions."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from agentkit.errors import CommandNotFound, ExecFailed, ExecTimeout, PathError
from agentkit.sandboxes.spec import SandboxSpec, command_words
from agentkit.sandboxes.types import ExecRequest, ExecResult


def path_in(spec: SandboxSpec, path: str) -> str:
    """Return ``path`` as an absolute path; relative paths start at the working directory. Raises ``PathError``."""
    if not path or "\0" in path:
        raise PathError(f"{path!r} is not a path: it is empty or contains a NUL", path=path)
    joined = posixpath.normpath(posixpath.join(spec.workdir, path))
    return joined[1:] if joined.startswith("//") else joined


def request(
    spec: SandboxSpec,
    cmd: str | Sequence[str],
    *,
    timeout: float | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    output_limit: int | None = None,
    idempotency_key: str | None = None,
) -> ExecRequest:
    """Return a request with all defaults filled in; see ``Sandbox.exec``.

    Raises ``CommandNotFound``, ``PathError``, ``ValueError``.
    """
    argv = command_words(cmd)
    if not argv or not argv[0] or any("\0" in word for word in argv):
        raise CommandNotFound(f"{argv!r} is not a command: it is empty or contains a NUL", argv=argv)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r} must be a positive, finite number of seconds")
    if output_limit is not None and output_limit < 0:
        raise ValueError(f"output_limit={output_limit!r} must not be negative (bytes)")
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env: {name!r} is not a valid variable: empty name, or contains = or NUL")
    return ExecRequest(
        argv=argv,
        timeout=spec.exec_timeout if timeout is None else float(timeout),
        output_limit=spec.output_limit if output_limit is None else output_limit,
        cwd=path_in(spec, cwd or spec.workdir),
        env=dict(env or {}),
        stdin=stdin.encode() if isinstance(stdin, str) else bytes(stdin),
        idempotency_key=idempotency_key,
    )


def shown(request: ExecRequest) -> str:
    """Return the command, short enough for a message."""
    text = request.argv[2] if request.argv[:2] == ("/bin/sh", "-c") else " ".join(request.argv)
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


def output_tail(result: ExecResult) -> str:
    """Return the last output of a command, for a message."""
    return (result.stderr or result.stdout)[-1000:].strip()


def check(result: ExecResult, command: str, timeout: float) -> None:
    """Raise ``ExecTimeout`` or ``ExecFailed`` if ``command`` timed out or failed."""
    if result.timed_out:
        raise ExecTimeout(f"{command} ran longer than {timeout:g} s", result=result)
    if not result.ok:
        raise ExecFailed(f"{command} ended with {result.exit_code}: {output_tail(result)}", result=result)
