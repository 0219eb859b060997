"""Countdown arithmetic: a single-turn task whose answer is checked exactly."""

from agentkit.envs.countdown.env import Countdown as Countdown
