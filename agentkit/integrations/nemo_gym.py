"""Environments for NeMo Gym 0.7: a resources server, and the agent that masks episodes whose environment failed.

Invariant: a failure of the environment is never a reward. The server answers 500, with which NeMo Gym's own agent ends
the rollout without a result; to ``AgentkitAgent`` it names the failure, and the sample is masked.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import Field, PrivateAttr
from resources_servers.gymnasium import GymnasiumServer, extract_text
from responses_api_agents.gymnasium_agent.app import GymnasiumAgent, GymnasiumAgentRunRequest, GymnasiumRunResponse

from agentkit.errors import EnvError
from agentkit.integrations.episodes import Episode, Episodes

_MASKS = "agentkit_masks_failures"
"""With this in a request, the agent masks failures."""


class AgentkitServerConfig(BaseResourcesServerConfig):
    """Which environment is served."""

    env: str = Field(min_length=1)
    """A registered name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of ``Episodes``: ``retries``, ``kwargs``, ``max_turns``, ``parser``, ``sandbox``, …"""


class AgentkitServer(GymnasiumServer):
    """Serves an environment of agentkit to NeMo Gym's ``gymnasium_agent`` and to ``AgentkitAgent``.

    A row of the dataset has the ``seed`` of its task. The first observation begins with the rules of the environment
    and the format of answers.
    """

    ray_enabled = False
    config: AgentkitServerConfig
    _episodes: Episodes = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Return the server.

        Raises:
            ConfigError: a setting is wrong or unknown.
            RegistryError: the environment is unknown.
            SandboxError, EnvError: the environment cannot be made in a sandbox.
        """
        self._episodes = Episodes(self.config.env, **self.config.settings)
        app = super().setup_webserver()
        app.post("/close")(self._close_endpoint)
        before = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with before(app) as state:
                yield state
            await self._episodes.close()

        app.router.lifespan_context = lifespan
        return app

    async def reset(self, metadata: dict, session_id: str | None = None) -> tuple[str | None, dict]:
        """Begin the episode of the row's ``seed``; return the rules with the first observation.

        Raises:
            ConfigError: the row has no valid seed.
            EnvError: the environment failed in all attempts.
        """
        await self.close_session(session_id)
        episode = await self._episodes.begin(metadata.get("seed"))
        self.session_state[session_id] = episode
        return f"{self._episodes.system}\n\n{episode.observation}", {"supports_explicit_close": True}

    async def step(
        self, action: NeMoGymResponse, metadata: dict, session_id: str | None = None
    ) -> tuple[str | None, float, bool, bool, dict]:
        """Carry out an answer of the policy; ``info`` has the metrics of the episode at its end.

        Raises:
            EnvError: the environment failed, and the agent does not mask failures.
        """
        episode: Episode | None = self.session_state.get(session_id)
        if episode is None:
            raise RuntimeError("step was called before reset, or after the end of the episode")
        try:
            reply = await episode.answer(extract_text(action))
        except EnvError as error:
            if not metadata.get(_MASKS):
                raise
            return None, 0.0, False, True, {"failure_kind": _kind(error), "failure_reason": str(error)}
        if reply.done:
            return None, reply.reward, True, False, episode.metrics
        return reply.text, reply.reward, False, False, {}

    async def close_session(self, session_id: str | None) -> None:
        """Give the environment back. Idempotent."""
        episode: Episode | None = self.session_state.pop(session_id, None)
        if episode is not None:
            await episode.end()

    async def _close_endpoint(self, request: Request) -> dict:
        await self.close_session(request.session.get(SESSION_ID_KEY))
        return {}


class AgentkitAgent(GymnasiumAgent):
    """NeMo Gym's ``gymnasium_agent``, which also masks a sample whose environment failed after its first answer."""

    async def run(self, request: Request, body: GymnasiumAgentRunRequest) -> GymnasiumRunResponse:
        """Play one episode; a failed one has ``mask_sample``, ``failure_kind`` and ``failure_reason``."""
        marked = GymnasiumAgentRunRequest.model_validate({**body.model_dump(by_alias=True), _MASKS: True})
        marked.capture_rollout_id = body.capture_rollout_id
        result = await super().run(request, marked)
        failure = {name: result.info[name] for name in ("failure_kind", "failure_reason") if name in result.info}
        return result.model_copy(update={**failure, "mask_sample": True}) if failure else result


def _kind(error: EnvError) -> str:
    """Return a name such as ``agentkit:env_crashed``."""
    return "agentkit:" + re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
