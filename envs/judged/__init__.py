"""Questions whose answers another language model judges."""

from agentkit.envs.judged.env import Judged as Judged
