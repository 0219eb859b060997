"""Mathematical problems whose answers are compared as mathematics, with a Python tool if wanted."""

from agentkit.envs.math.env import Math as Math
