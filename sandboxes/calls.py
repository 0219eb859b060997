"""What a caller may write, as what a back end gets: commands, paths, limits.

Invariant: pure; whatever cannot be meant is refused here, with the reason, before anything is sent.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Mapping, Sequence

from agentkit.errors import CommandNotFound, PathError
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import ExecRequest


def new_id() -> str:
    """A name that no other sandbox has: ``ak-`` and 16 hexadecimal digits."""
    return f"ak-{secrets.token_hex(8)}"


def path_in(spec: SandboxSpec, path: str) -> str:
    """The absolute path that ``path``, seen from the working directory, is. Raises ``PathError``."""
    if not path or "\0" in path:
        raise PathError(f"{path!r} is no path: it is empty or holds a NUL", path=path)
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
    """Everything resolved. A text is run by ``/bin/sh``. Raises ``CommandNotFound``, ``PathError``, ``ValueError``."""
    argv = ("/bin/sh", "-c", cmd) if isinstance(cmd, str) else tuple(cmd)
    if not argv or not argv[0] or any("\0" in word for word in argv):
        raise CommandNotFound(f"{argv!r} is no command: it is empty or holds a NUL", argv=argv)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r} must be a positive, finite number of seconds")
    if output_limit is not None and output_limit < 0:
        raise ValueError(f"output_limit={output_limit!r} must be a number of bytes")
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env: {name!r} cannot be a variable: an empty name, an = in it, or a NUL")
    return ExecRequest(
        argv=argv,
        timeout=spec.exec_timeout if timeout is None else float(timeout),
        output_limit=spec.output_limit if output_limit is None else output_limit,
        cwd=path_in(spec, cwd or spec.workdir),
        env=dict(env or {}),
        stdin=stdin.encode() if isinstance(stdin, str) else bytes(stdin),
        idempotency_key=idempotency_key,
    )
