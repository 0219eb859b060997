"""Several environments as one: each episode is drawn from one of them."""

from agentkit.envs.mixture.env import Mixture as Mixture
