"""What an agent finds in its directory, and how it is started.

Invariant: the nonce is fresh for each start, so that an agent of an earlier start is never taken for this one. It is in
the directory until the agent has shown it and no longer, so that no program in the sandbox can pass for the agent. The
directory is complete before the agent runs, and nobody in the sandbox can write to it.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import secrets
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from agentkit.sandboxes import wire
from agentkit.sandboxes.paths import BUNDLE, MOUNT, nonce_path

SOURCE = Path(__file__).with_name("agent.py")
_HEARTBEAT = 5.0
_CONFIG, _NONCE = "config", "nonce"

_LAUNCH = """\
import marshal, posix, sys
from _frozen_importlib_external import MAGIC_NUMBER
def read(fd):
    parts = []
    while True:
        data = posix.read(fd, 1 << 20)
        if not data:
            posix.close(fd)
            return b"".join(parts)
        parts.append(data)
def compiled():
    name = sys.argv.pop(1) + "/agent."
    try:
        return read(posix.open(name + MAGIC_NUMBER.hex(), posix.O_RDONLY))
    except FileNotFoundError:
        name += "py"
    reader, writer = posix.pipe()
    child = posix.fork()
    if child == 0:
        posix.close(reader)
        data = memoryview(marshal.dumps(compile(read(posix.open(name, posix.O_RDONLY)), name, "exec", optimize=2)))
        while data:
            data = data[posix.write(writer, data):]
        posix._exit(0)
    posix.close(writer)
    code = read(reader)
    posix.waitpid(child, 0)
    return code
exec(marshal.loads(compiled()))
"""
"""Compiling takes longer than all the rest of the start: the host has done it, once for all sandboxes whose Python is
of its own version. For others a child does it, since it leaves megabytes of garbage behind, and only its result comes
back."""


@functools.cache
def _program() -> Mapping[str, bytes]:
    """The agent as files of its directory: its source, and what this Python compiles it to."""
    source = SOURCE.read_bytes()
    code = compile(source, f"{MOUNT}/agent.py", "exec", dont_inherit=True, optimize=2)
    return {"agent.py": source, f"agent.{MAGIC_NUMBER.hex()}": marshal.dumps(code)}


def new_nonce() -> str:
    """A secret of one start of one sandbox."""
    return secrets.token_hex(16)


def prepare(
    directory: Path,
    nonce: str,
    *,
    idle_timeout: float | None,
    env: Mapping[str, str] | None = None,
    relay_port: int | None = None,
    filter: bytes | None = None,
    bundled: bool = False,
) -> None:
    """Write the agent and its settings into ``directory``, in place of those of an earlier start.

    ``idle_timeout``: seconds without its host after which the agent ends (None: never). ``env`` is added to the
    environment of every command. ``relay_port``: a port of 127.0.0.1 in the sandbox whose connections are carried to
    the host. ``filter``: what the kernel takes as a filter of system calls, for the agent and all that it starts.
    ``bundled``: the agent itself is in the bundle. Raises ``ValueError`` if a value contains NUL.
    """
    entries = {**{f"env.{name}": value for name, value in (env or {}).items()}}
    if idle_timeout is not None:
        entries["idle_timeout"] = str(idle_timeout)
    if relay_port is not None:
        entries["relay_port"] = str(relay_port)
    if filter is not None:
        entries["filter"] = filter.hex()
    packed = wire.pack_strings([os.fsencode(f"{name}={value}") for name, value in entries.items()])
    shown = nonce.encode()
    for name, data in {**({} if bundled else _program()), _CONFIG: packed, _NONCE: shown}.items():
        _put(directory / name, data)
    _put(nonce_path(directory), shown, mode=0o600)


def nonce_of(directory: Path) -> str:
    """The nonce of the present start, for a second host. Raises ``FileNotFoundError`` if nothing was prepared."""
    return nonce_path(directory).read_text()


def hide_nonce(directory: Path) -> None:
    """Take the nonce from the agent's sight, which has read it; what is not there is hidden."""
    (directory / _NONCE).unlink(missing_ok=True)


def heartbeat(directory: Path) -> float:
    """Seconds between two words of a host that keep the agent from taking it for dead."""
    with contextlib.suppress(FileNotFoundError):
        if idle_timeout := _setting(directory, b"idle_timeout"):
            return min(_HEARTBEAT, float(idle_timeout) / 4)
    return _HEARTBEAT


def _setting(directory: Path, name: bytes) -> bytes | None:
    for entry in (directory / _CONFIG).read_bytes().split(b"\0"):
        if entry.startswith(name + b"="):
            return entry[len(name) + 1 :]
    return None


def command(directory: str = MOUNT, python: str = "python3", lifeline: int | None = None) -> list[str]:
    """The command line that starts the agent; ``directory`` is where the sandbox sees its directory.

    ``lifeline``: a descriptor that the agent inherits, and at whose end it ends.
    """
    ending = [] if lifeline is None else [str(lifeline)]
    return [python, "-I", "-S", "-c", _LAUNCH, directory, directory, *ending]


def bundled_command() -> list[str]:
    """The command line of an agent in a container, where all that it needs of Python is in the bundle."""
    python = [f"{BUNDLE}/ld.so", "--library-path", f"{BUNDLE}/lib", f"{BUNDLE}/py/bin/python3"]
    return [*python, "-I", "-S", "-c", _LAUNCH, BUNDLE, MOUNT]


def _put(path: Path, data: bytes, mode: int = 0o644) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(path)
