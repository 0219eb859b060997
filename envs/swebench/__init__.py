"""SWE-bench: issues of Python repositories, resolved in a sandbox."""

from agentkit.envs.swebench.env import SWEBench as SWEBench
