"""What `_target_` names in the test of verl: a module that registers an environment and has the adapter."""

from __future__ import annotations

import fragile_lake  # noqa: F401

from agentkit.integrations.verl import AgentkitLoop as AgentkitLoop
