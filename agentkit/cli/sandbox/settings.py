"""Settings of commands: YAML files, ``NAME=VALUE`` options, and their validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import ConfigError

if TYPE_CHECKING:
    from agentkit.sandboxes.spec import SandboxSpec


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a file. Raises ``ConfigError``."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping")
    return content


def validated_spec(values: object, origin: object) -> SandboxSpec:
    """Validate ``values`` as a ``SandboxSpec``. Raises ``ConfigError``."""
    from pydantic import ValidationError

    from agentkit.sandboxes.spec import SandboxSpec

    try:
        return SandboxSpec.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{origin}: {problems}") from None


def pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """Parse ``NAME=VALUE`` arguments. Raises ``ConfigError``."""
    pairs = [word.partition("=") for word in words or ()]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ConfigError(f"{option} needs NAME=VALUE, not {name!r}")
    return {name: value for name, _, value in pairs}
