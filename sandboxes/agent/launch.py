"""The agent's directory and command line.

Invariant: each start has a fresh nonce, which distinguishes its agent from earlier ones. The nonce is deleted from the
directory once the agent has sent it, so that programs in the sandbox cannot impersonate the agent. The directory is
complete before the agent starts, and read-only in the sandbox.
"""

from __future__ import annotations

import functools
import marshal
import os
import secrets
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from agentkit.atomic_file import write_atomically
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.paths import BUNDLE, MOUNT, nonce_path

SOURCE = Path(__file__).with_name("agent.py")
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
"""Loads code that the host compiled for its own version of Python, since compiling takes longer than the rest of the
start. For other versions a child process compiles it, so that the agent does not keep the compiler's memory."""


@functools.cache
def _program() -> Mapping[str, bytes]:
    """Return the agent's files: its source, and the code compiled by this Python."""
    source = SOURCE.read_bytes()
    code = compile(source, f"{MOUNT}/agent.py", "exec", dont_inherit=True, optimize=2)
    return {"agent.py": source, f"agent.{MAGIC_NUMBER.hex()}": marshal.dumps(code)}


def new_nonce() -> str:
    """Return a secret for one start of one sandbox."""
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
    """Write the agent and its settings into ``directory``; replaces those of an earlier start.

    Args:
        directory: the sandbox's directory.
        nonce: secret of this start.
        idle_timeout: seconds without contact to a host after which the agent exits; None: never.
        env: added to the environment of every command.
        relay_port: port of 127.0.0.1 in the sandbox whose connections are relayed to the host.
        filter: a system call filter for the agent and its descendants, as the kernel expects it.
        bundled: the agent is in the bundle and is not written here.

    Raises:
        ValueError: a value contains NUL.
    """
    entries = {f"env.{name}": value for name, value in (env or {}).items()}
    if idle_timeout is not None:
        entries["idle_timeout"] = str(idle_timeout)
    if relay_port is not None:
        entries["relay_port"] = str(relay_port)
    if filter is not None:
        entries["filter"] = filter.hex()
    packed = protocol.pack_strings([os.fsencode(f"{name}={value}") for name, value in entries.items()])
    shown = nonce.encode()
    for name, data in {**({} if bundled else _program()), _CONFIG: packed, _NONCE: shown}.items():
        write_atomically(directory / name, data, mode=0o644, ignore_umask=True)
    write_atomically(nonce_path(directory), shown, mode=0o600)


def nonce_of(directory: Path) -> str:
    """Return the nonce of the current start. Raises ``FileNotFoundError`` if nothing was prepared."""
    return nonce_path(directory).read_text()


def hide_nonce(directory: Path) -> None:
    """Delete the nonce from the directory, after the agent has read it."""
    (directory / _NONCE).unlink(missing_ok=True)


def command(directory: str = MOUNT, python: str = "python3", lifeline: int | None = None) -> list[str]:
    """Return the command line of the agent; ``directory`` is the mount point of its directory.

    ``lifeline``: an inherited descriptor; the agent exits at its end.
    """
    ending = [] if lifeline is None else [str(lifeline)]
    return [python, "-I", "-S", "-c", _LAUNCH, directory, directory, *ending]


def bundled_command() -> list[str]:
    """Return the command line of an agent in a container with the bundled interpreter."""
    return [*bundled_python(), "-c", _LAUNCH, BUNDLE, MOUNT]


def bundled_python() -> list[str]:
    """Return the command line of the bundled interpreter, which has few modules; ``-c PROGRAM`` follows."""
    return [f"{BUNDLE}/ld.so", "--library-path", f"{BUNDLE}/lib", f"{BUNDLE}/py/bin/python3", "-I", "-S"]
