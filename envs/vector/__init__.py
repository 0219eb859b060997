"""Vector environments."""

from agentkit.envs.vector.env import TextVectorEnv, make_vec

__all__ = ["TextVectorEnv", "make_vec"]
