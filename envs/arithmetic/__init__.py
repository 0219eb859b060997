"""Arithmetic questions: single-turn tasks for small language models."""

from agentkit.envs.arithmetic.env import Arithmetic as Arithmetic
