"""The environments of agentkit, for verifiers: the id of this taskset is the name of this module, agentkit_envs."""

from agentkit.integrations.verifiers import AgentkitEnv, AgentkitHarness, AgentkitTaskset

__all__ = ["AgentkitEnv", "AgentkitHarness", "AgentkitTaskset"]
