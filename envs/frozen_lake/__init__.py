"""FrozenLake: the symbolic game in ``game``, its text layer in ``env``, its picture in ``render``."""

from agentkit.envs.frozen_lake.env import FrozenLake as FrozenLake
