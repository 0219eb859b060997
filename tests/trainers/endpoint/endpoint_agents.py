"""Agents as users write them, with OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from agentkit.errors import EnvError
from agentkit.trainers.endpoint.agent import Endpoint, Task


def client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """A client; certificates, which take long to load, are not needed."""
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, http_client=plain, timeout=60)


async def ask(endpoint: Endpoint, messages: list[Any], **options: Any) -> Any:
    async with client(endpoint) as asking:
        answer = await asking.chat.completions.create(model=endpoint.model, messages=messages, **options)
    return answer.choices[0].message


def opening(task: Task) -> list[Any]:
    return [{"role": "system", "content": task.instructions}, {"role": "user", "content": task.text}]


async def answering(task: Task, endpoint: Endpoint) -> str:
    """Ask once, and return the answer."""
    return (await ask(endpoint, opening(task))).content


async def stepping(task: Task, endpoint: Endpoint) -> None:
    """Play to the end in one conversation."""
    messages, done = opening(task), False
    while not done:
        answer = await ask(endpoint, messages)
        observation, _, done = await task.step("Go" if "Go" in answer.content else "Bad")
        messages += [answer, {"role": "user", "content": observation}]


async def forgetful(task: Task, endpoint: Endpoint) -> None:
    """Show only the latest observation."""
    messages, done = opening(task), False
    while not done:
        await ask(endpoint, messages)
        observation, _, done = await task.step("Go")
        messages[-1] = {"role": "user", "content": observation}


async def broken(task: Task, endpoint: Endpoint) -> str:
    raise KeyError("my bug")


async def silent(task: Task, endpoint: Endpoint) -> str:
    return "<answer>Go</answer>"


async def greedy(task: Task, endpoint: Endpoint) -> str:
    try:
        await ask(endpoint, opening(task), temperature=0)
    except openai.BadRequestError:
        return "refused"
    raise AssertionError("the request was accepted")


async def breaking(task: Task, endpoint: Endpoint) -> str:
    """Break on what the policy says."""
    answer = await ask(endpoint, opening(task))
    await task.step("Go")
    return answer.content.split("END")[1]


async def slow(task: Task, endpoint: Endpoint) -> str:
    await ask(endpoint, opening(task))
    await asyncio.sleep(3600)
    return ""


async def stubborn(task: Task, endpoint: Endpoint) -> str:
    """Hide failures of the environment."""
    answer = await ask(endpoint, opening(task))
    try:
        await task.step("Go")
    except EnvError:
        return answer.content
    return answer.content


LEFT: list[asyncio.Task[Any]] = []


async def lingering(task: Task, endpoint: Endpoint) -> str:
    """Leave work behind that steps after the end; step twice at once, and with what is not a text."""

    async def late() -> None:
        await asyncio.sleep(0.2)
        await task.step("Go")

    answer = await ask(endpoint, opening(task))
    LEFT.append(asyncio.ensure_future(late()))
    await asyncio.gather(task.step("Go"), task.step("Go"))
    await task.step(7)  # pyright: ignore[reportArgumentType]
    return answer.content


def plain(task: Task, endpoint: Endpoint) -> str:
    return ""
