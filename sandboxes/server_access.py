"""Where a sandbox server is and with which token, as both sides find it.

Invariant: a token comes from a file that only its owner can read or from the environment, never from a command line,
and is long enough not to be guessed.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from pathlib import Path

from agentkit.errors import ConfigError
from agentkit.sandboxes import paths

PORT = 8765
TOKEN = "AGENTKIT_SANDBOX_TOKEN"
TOKEN_FILE = "AGENTKIT_SANDBOX_TOKEN_FILE"
_SHORTEST = 20


def find_token(file: str | Path | None = None, *, make: bool = False) -> str:
    """The token in ``file``, in ``$AGENTKIT_SANDBOX_TOKEN``, in the file ``$AGENTKIT_SANDBOX_TOKEN_FILE``, or in this
    user's runtime directory, where ``make`` puts one if there is none. Raises ``ConfigError``."""
    if file is None and (given := os.environ.get(TOKEN)):
        return _usable(given, TOKEN)
    own = paths.runtime_root() / "server-token"
    path = Path(file or os.environ.get(TOKEN_FILE) or own)
    if make and path == own and not path.exists():
        hidden = path.with_name(f".server-token.{secrets.token_hex(4)}")
        hidden.touch(0o600)
        hidden.write_text(secrets.token_urlsafe(32))
        hidden.replace(path)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"the token file {path} can be read by others: chmod 600 it, and change the token")
        return _usable(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"no token: {path}: {error.strerror}; set {TOKEN} or {TOKEN_FILE}") from None


def _usable(text: str, where: str) -> str:
    token = text.strip()
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable():
        raise ConfigError(f"the token in {where} must have at least {_SHORTEST} printable ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
