"""Run the server in the current folder, ``app.py``, with FragileLake; print the environments held at its end."""

# pyright: reportMissingImports=false

import runpy

import fragile_lake
from nemo_gym.server_utils import SimpleServer

from agentkit.integrations.environments import Environments

assert fragile_lake  # registers environments
SimpleServer.ray_enabled = False  # otherwise the relay before an agent starts Ray, which it does not use
close = Environments.close


async def counting(self: Environments) -> None:
    print("held at the end:", len(self._held), flush=True)
    await close(self)


Environments.close = counting
runpy.run_path("app.py", run_name="__main__")
