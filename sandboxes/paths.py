"""Where sandboxes keep their sockets and leases on this host: one tree a user, private to that user.

Invariant: the root belongs to this user, is a real directory and closed to everybody else (0700); it is checked on
every use, since ``/tmp`` is everybody's. What lies below may be open to read, because a sandbox sees its own directory
mounted and runs as another user. A name that is not a sandbox's id never becomes a path.
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
"""Where a sandbox sees its own directory, read-only."""

BUNDLES = "/agentkit"
"""Where a container sees the interpreter of its agent, read-only."""
BUNDLE = f"{BUNDLES}/agent"

_ID = re.compile(r"ak-[0-9a-f]{16}")
_RUN = re.compile(r"[0-9a-zA-Z-]{1,64}")


def new_id() -> str:
    """A fresh sandbox id: ``ak-`` and 64 random bits in hexadecimal; a container's name too."""
    return f"ak-{secrets.token_hex(8)}"


def is_id(text: str) -> bool:
    """Whether ``text`` is a sandbox id."""
    return _ID.fullmatch(text) is not None


def runtime_root() -> Path:
    """This user's directory: ``$AGENTKIT_RUNTIME_DIR``, ``$XDG_RUNTIME_DIR/agentkit`` or ``/tmp/agentkit-<uid>``.

    Made if it is missing. Raises ``ConfigError`` if it belongs to somebody else, is a link, or is open to others.
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
            f"cannot make {root}: {error.strerror}; set AGENTKIT_RUNTIME_DIR to a directory of yours"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{root} must be a directory of user {os.getuid()} with mode 0700, not a link; remove it, or set "
            "AGENTKIT_RUNTIME_DIR to another place"
        )
    return root


def sandbox_directory(id: str) -> Path:
    """The directory of sandbox ``id``; not made. Raises ``ValueError`` for anything but an id."""
    if not is_id(id):
        raise ValueError(f"{id!r} is no sandbox id: ak- and 16 hexadecimal digits")
    return _subdirectory("sandboxes") / id


def make_sandbox_directory(id: str) -> Path:
    """Make the directory of sandbox ``id``, readable by the sandbox's user and writable by this one only."""
    directory = sandbox_directory(id)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)  # The agent looks for sockets in it; the umask may have closed it.
    return directory


def remove_sandbox_directory(id: str) -> None:
    """Remove it with all that is in it; nothing there is fine."""
    shutil.rmtree(sandbox_directory(id), ignore_errors=True)
    nonce_path(sandbox_directory(id)).unlink(missing_ok=True)


def nonce_path(directory: Path) -> Path:
    """Where the host keeps the secret of the agent that has ``directory``: beside it, out of the sandbox's sight."""
    return directory.with_name(f"{directory.name}.nonce")


def sandbox_ids() -> Iterator[str]:
    """The sandboxes of this user that have a directory here."""
    return (entry.name for entry in sorted(_subdirectory("sandboxes").iterdir()) if is_id(entry.name))


def lease_directory() -> Path:
    """Where each owner process keeps one file, named like its run."""
    return _subdirectory("leases")


def lease_path(run: str) -> Path:
    """The lease file of owner process ``run``; not made. Raises ``ValueError`` for a name that could be a path."""
    if _RUN.fullmatch(run) is None:
        raise ValueError(f"{run!r} is no name of a run: letters, digits and dashes")
    return lease_directory() / run


def record_path(id: str) -> Path:
    """Where it is written down whose sandbox ``id`` is; not made. Raises ``ValueError`` for anything but an id."""
    if not is_id(id):
        raise ValueError(f"{id!r} is no sandbox id: ak- and 16 hexadecimal digits")
    return _subdirectory("records") / id


def recorded_ids() -> Iterator[str]:
    """The sandboxes that have a record."""
    return (entry.name for entry in sorted(_subdirectory("records").iterdir()) if is_id(entry.name))


def backend_directory(name: str) -> Path:
    """Where a back end keeps what only it reads."""
    return _subdirectory(f"backend-{name}")


def _subdirectory(name: str) -> Path:
    directory = runtime_root() / name
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
