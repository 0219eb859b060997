"""The configuration of a sandbox server.

Invariant: misspelt keys and wrong types raise before the server starts. It has defaults for everything.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from agentkit.errors import ConfigError
from agentkit.sandboxes.server.policy import Policy, Quota, Watermarks
from agentkit.sandboxes.spec import Spec


class ServerConfig(Spec):
    """The content of the file of ``agentkit sandbox serve --config FILE``."""

    policy: Policy = Policy()
    """What a client may request."""
    quota: Quota = Quota()
    """What all clients together may use."""
    watermarks: Watermarks = Watermarks()
    """Use of the machine from which no more sandboxes are created."""
    metrics_token_file: str | None = None
    """File with a token that may only read ``GET /metrics``, for Prometheus. The server's own token may, too."""


def read_config(path: str | Path) -> ServerConfig:
    """Read a YAML file. Raises ``ConfigError``."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    try:
        return ServerConfig.model_validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{path}: {problems}") from None
