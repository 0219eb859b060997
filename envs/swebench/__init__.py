from agentkit.envs.swebench.env import SWEBench

__all__ = ["SWEBench"]
