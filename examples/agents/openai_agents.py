"""Play an episode with OpenAI's agents SDK: the policy calls tools, and what it submits is the answer.

As ``agent.command`` of a run, with the Python of an environment that has openai-agents. The SDK finds the policy in
``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
"""

import ast
import json
import operator
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, StopAtTools, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@function_tool(strict_mode=False)
def calculate(expression: str) -> str:
    """Return the value of an expression of integers with + - *."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(ast.literal_eval(node))

    return str(value(ast.parse(expression[:100], mode="eval").body))


@function_tool(strict_mode=False)
def submit(answer: str) -> str:
    """Submit the answer. This ends the task."""
    return answer


def play(task: dict[str, str]) -> str:
    """Return the answer: what was submitted, or the text of an answer without a call."""
    set_tracing_disabled(True)
    agent = Agent(
        name="solver",
        instructions=task["instructions"],
        model=OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI()),
        tools=[calculate, submit],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["submit"]),
    )
    return str(Runner.run_sync(agent, task["text"], max_turns=10).final_output)


if __name__ == "__main__":
    print(play(json.load(sys.stdin)))
