"""The token of an OpenEnv server, on either side."""

from __future__ import annotations

import os
from pathlib import Path

from agentkit.sandboxes.server.auth import checked_token, read_tokens

TOKEN = "AGENTKIT_OPENENV_TOKEN"


def find_tokens(file: str | Path | None = None) -> tuple[str, ...]:
    """Return the tokens in ``file`` or in ``$AGENTKIT_OPENENV_TOKEN``; none if neither is given.

    Raises:
        ConfigError: the file cannot be read, others can read it, or a token is too short.
    """
    if file is not None:
        return read_tokens(Path(file), "name another file")
    token = os.environ.get(TOKEN)
    return (checked_token(token, TOKEN),) if token else ()
