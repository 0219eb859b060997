"""Programming tasks: a program reads an input and writes an output, in a sandbox, and is judged on hidden inputs."""

from agentkit.envs.code_contest.env import CodeContest as CodeContest
