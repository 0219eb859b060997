"""The configuration of a sandbox server.

Invariant: misspelt keys and wrong types raise before the server starts. It has defaults for everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from agentkit.errors import ConfigError
from agentkit.sandboxes.server.policy import Policy, Quota, TenantQuota, Watermarks
from agentkit.sandboxes.spec import Spec

OPERATOR = "operator"
"""Name of the tenant that has the server's own token."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_DIGEST = r"^[0-9a-f]{64}$"


class TenantConfig(Spec):
    """One group of clients of a sandbox server, which knows nothing of the others."""

    token_file: str | None = None
    """File with the tenant's token, readable by the server's user only. With several lines, each is a valid token."""
    token_sha256: tuple[Annotated[str, Field(pattern=_DIGEST)], ...] = ()
    """SHA-256 of further tokens, in hexadecimal digits: ``printf %s TOKEN | sha256sum``."""
    policy: Mapping[str, Any] = {}
    """Fields of ``Policy`` that replace those of the server."""
    quota: TenantQuota = TenantQuota()
    """Limits of the tenant."""

    @model_validator(mode="after")
    def _has_a_token(self) -> TenantConfig:
        if self.token_file is None and not self.token_sha256:
            raise ValueError("a tenant needs token_file or token_sha256")
        return self


class ImageConfig(Spec):
    """Which images a server fetches ahead, and when it removes images that it fetched."""

    pull: tuple[str, ...] = ()
    """Images that are fetched at the start and kept up to date; they are never removed."""
    keep: tuple[str, ...] = ()
    """Patterns of further images that are never removed."""
    keep_days: float | None = Field(default=None, gt=0)
    """Days without use after which an image is removed. None: no limit."""
    max_disk: float | None = Field(default=None, gt=0, le=1)
    """Share of the disk in use from which unused images of any age are removed. None: no limit."""
    interval: float = Field(default=3600.0, gt=0)
    """Seconds between two rounds of fetching and removing."""
    pull_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that fetching a listed image may take."""


class ServerConfig(Spec):
    """The content of the file of ``agentkit sandbox serve --config FILE``."""

    policy: Policy = Policy()
    """What a client may request."""
    quota: Quota = Quota()
    """What all clients together may use."""
    watermarks: Watermarks = Watermarks()
    """Use of the machine from which no more sandboxes are created."""
    images: ImageConfig = ImageConfig()
    """Images that are fetched ahead, and those that are removed."""
    metrics_token_file: str | None = None
    """File with a token that may only read ``GET /metrics``, for Prometheus. The server's own token may, too."""
    tenants: Mapping[Annotated[str, Field(pattern=_NAME)], TenantConfig] = {}
    """Groups of clients by name. With tenants, the server's own token is the operator's and creates no sandboxes."""

    @model_validator(mode="after")
    def _tenants_are_consistent(self) -> ServerConfig:
        if OPERATOR in self.tenants:
            raise ValueError(f"the name {OPERATOR} belongs to the server's own token; choose another one")
        for name in self.tenants:
            self.policy_of(name)
        return self

    def policy_of(self, name: str) -> Policy:
        """Return the policy of a tenant."""
        overrides = self.tenants[name].policy if name in self.tenants else {}
        return Policy.model_validate_json(json.dumps({**self.policy.model_dump(mode="json"), **overrides}))

    def quota_of(self, name: str) -> TenantQuota:
        """Return the limits of a tenant."""
        if name in self.tenants:
            return self.tenants[name].quota
        return TenantQuota(sandboxes=0, snapshots=0) if self.tenants else TenantQuota()


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
