"""ALFWorld: household tasks in text."""

from agentkit.envs.alfworld.env import AlfWorld as AlfWorld
