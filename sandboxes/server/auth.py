"""Find the token of a sandbox server, on either side.

Invariant: a token comes from a file that only its owner can read or from the environment, never from a command line,
and is long enough that it cannot be guessed.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from pathlib import Path

from agentkit.atomic_file import write_atomically
from agentkit.errors import ConfigError
from agentkit.sandboxes import paths

PORT = 8765
TOKEN = "AGENTKIT_SANDBOX_TOKEN"
TOKEN_FILE = "AGENTKIT_SANDBOX_TOKEN_FILE"
_MIN_LENGTH = 20


def find_token(file: str | Path | None = None, *, make: bool = False) -> str:
    """Return the token of the sandbox server: the first one of ``find_tokens``."""
    return find_tokens(file, make=make)[0]


def find_tokens(file: str | Path | None = None, *, make: bool = False) -> tuple[str, ...]:
    """Return the tokens that a sandbox server accepts from one tenant, the newest first.

    Each line of a file is a token. With the new and the old one, clients can change to the new one at any time.

    The first of these is used: ``file``, ``$AGENTKIT_SANDBOX_TOKEN``, the file ``$AGENTKIT_SANDBOX_TOKEN_FILE``, the
    file ``server-token`` in this user's runtime directory.

    Args:
        file: a file that contains the tokens.
        make: create the file in the runtime directory if it is the one to use and does not exist.

    Raises:
        ConfigError: there is no token, it is too short, or others can read its file.
    """
    if file is None and (token := os.environ.get(TOKEN)):
        return (checked_token(token, TOKEN),)
    default = paths.runtime_root() / "server-token"
    path = Path(file or os.environ.get(TOKEN_FILE) or default)
    if make and path == default and not path.exists():
        write_atomically(path, secrets.token_urlsafe(32), mode=0o600)
    return read_tokens(path, f"set {TOKEN} or {TOKEN_FILE}")


def read_tokens(path: Path, remedy: str) -> tuple[str, ...]:
    """Return the tokens in a file, one per line.

    Args:
        path: the file.
        remedy: what to do if it cannot be read.

    Raises:
        ConfigError: the file cannot be read, others can read it, or a token is too short.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"other users can read the token file {path}; chmod 600 it and change the token")
        lines = [line for line in path.read_text().splitlines() if line.strip()] or [""]
        return tuple(checked_token(line, str(path)) for line in lines)
    except OSError as error:
        raise ConfigError(f"no token: {path}: {error.strerror}; {remedy}") from None


def checked_token(text: str, origin: str) -> str:
    """Return a token without surrounding spaces. Raises ``ConfigError`` if it is too short or not printable ASCII."""
    token = text.strip()
    if len(token) < _MIN_LENGTH or not token.isascii() or not token.isprintable():
        raise ConfigError(f"the token in {origin} must have at least {_MIN_LENGTH} printable ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
