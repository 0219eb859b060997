"""SWE-bench: ``instance`` (data), ``grading`` (the official rules), ``evaluation`` (in a fresh sandbox), ``tools``,
``history``, ``supply`` (sandboxes), ``env``, and ``releases`` (tasks made of anybody's releases)."""

from agentkit.envs.swebench.env import SWEBench as SWEBench
