"""Paths of sockets, heartbeats and records on this host: one directory tree per user, private to that user.

Invariant: the root is a directory of this user with mode 0700, not a link; it is checked on every use, since ``/tmp``
is shared. Directories below may be readable, because a sandbox runs as another user and sees its own directory mounted.
Only valid ids become paths.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from agentkit.errors import ConfigError

MOUNT = "/run/agentkit"
"""Mount point of a sandbox's own directory, read-only."""

BUNDLES = "/agentkit"
"""Mount point of the agent's interpreter in a container, read-only."""
BUNDLE = f"{BUNDLES}/agent"

_ID = re.compile(r"ak-[0-9a-f]{16}")
_SERVER = re.compile(r"[0-9a-zA-Z_][0-9a-zA-Z_.-]{0,63}")
_RUN = re.compile(r"[0-9a-zA-Z-]{1,64}")


def new_id() -> str:
    """A fresh sandbox id: ``ak-`` and 64 random bits in hexadecimal; a container's name too."""
    return f"ak-{secrets.token_hex(8)}"


def is_id(text: str) -> bool:
    """Return whether ``text`` is a sandbox id."""
    return _ID.fullmatch(text) is not None


def checked_id(text: str) -> str:
    """Return ``text`` if it is a sandbox id, else raise ``ValueError``."""
    if not is_id(text):
        raise ValueError(f"{text!r} is not a sandbox id: ak- and 16 hexadecimal digits")
    return text


def runtime_root() -> Path:
    """Return this user's root: ``$AGENTKIT_RUNTIME_DIR``, ``$XDG_RUNTIME_DIR/agentkit`` or ``/tmp/agentkit-<uid>``.

    Creates it. Raises ``ConfigError`` if it belongs to another user, is a link, or is open to others.
    """
    if chosen := os.environ.get("AGENTKIT_RUNTIME_DIR"):
        root = Path(chosen)
    elif session := os.environ.get("XDG_RUNTIME_DIR"):
        root = Path(session) / "agentkit"
    else:
        root = Path(f"/tmp/agentkit-{os.getuid()}")
    if not root.is_absolute():
        raise ConfigError(f"AGENTKIT_RUNTIME_DIR={str(root)!r} must be an absolute path")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot create {root}: {error.strerror}; set AGENTKIT_RUNTIME_DIR to a directory of yours"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{root} must be a directory of user {os.getuid()} with mode 0700, not a link; remove it, or set "
            "AGENTKIT_RUNTIME_DIR to another place"
        )
    return root


def sandbox_directory(id: str) -> Path:
    """Return the directory of sandbox ``id`` without creating it. Raises ``ValueError`` for an invalid id."""
    return _subdirectory("sandboxes") / checked_id(id)


def make_sandbox_directory(id: str) -> Path:
    """Create the directory of sandbox ``id``, readable by the sandbox's user."""
    directory = sandbox_directory(id)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)  # for the agent, which looks for sockets; the umask may have removed the bits
    return directory


def remove_sandbox_directory(id: str) -> None:
    """Remove the directory of sandbox ``id``, if it exists."""
    shutil.rmtree(sandbox_directory(id), ignore_errors=True)
    nonce_path(sandbox_directory(id)).unlink(missing_ok=True)


def nonce_path(directory: Path) -> Path:
    """Return the file with the agent's secret: beside ``directory``, where the sandbox does not see it."""
    return directory.with_name(f"{directory.name}.nonce")


def heartbeat_directory() -> Path:
    """Return the directory with one heartbeat file per owner process."""
    return _subdirectory("heartbeats")


def heartbeat_path(run: str) -> Path:
    """Return the heartbeat file of owner process ``run``. Raises ``ValueError`` for an invalid name."""
    if _RUN.fullmatch(run) is None:
        raise ValueError(f"{run!r} is not the name of a run (letters, digits and dashes)")
    return heartbeat_directory() / run


def record_path(id: str) -> Path:
    """Return the record of sandbox ``id``. Raises ``ValueError`` for an invalid id."""
    return _subdirectory("records") / checked_id(id)


def recorded_ids() -> Iterator[str]:
    """Yield the sandboxes that have a record."""
    return (entry.name for entry in sorted(_subdirectory("records").iterdir()) if is_id(entry.name))


def server_directory(name: str) -> Path:
    """Return the directory of the sandbox server ``name``. Raises ``ValueError`` for an invalid name."""
    if _SERVER.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a server (letters, digits, dots, dashes and underscores)")
    return _subdirectory("servers") / name


def backend_directory(name: str) -> Path:
    """Return the directory of a back end's own files."""
    return _subdirectory(f"backend-{name}")


def _subdirectory(name: str) -> Path:
    directory = runtime_root() / name
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
