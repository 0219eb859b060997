"""ALFWorld: ``games`` (which there are), ``engine`` (TextWorld, in a process of its own), ``expert``, ``env``; and
``generator`` over ``rooms`` for games of our own."""

from agentkit.envs.alfworld.env import AlfWorld as AlfWorld
