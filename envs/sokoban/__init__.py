"""Sokoban: ``level`` (XSB), ``game`` (rules), ``solver``, ``generator``, ``env`` (text layer), ``render``."""

from agentkit.envs.sokoban.env import Sokoban as Sokoban
