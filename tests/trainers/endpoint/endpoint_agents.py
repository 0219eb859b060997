"""Agents as users write them, with OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import openai

from agentkit.errors import EnvError
from agentkit.trainers.endpoint.runners import Endpoint, Task


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


async def exiting(task: Task, endpoint: Endpoint) -> str:
    await ask(endpoint, opening(task))
    sys.exit(2)


async def cancelled(task: Task, endpoint: Endpoint) -> str:
    """Wait for work that was cancelled."""
    await ask(endpoint, opening(task))
    work = asyncio.ensure_future(asyncio.sleep(9))
    work.cancel()
    await work
    return ""


async def hasty(task: Task, endpoint: Endpoint) -> str:
    """Have a shorter timeout than the run."""
    await ask(endpoint, opening(task))
    await asyncio.wait_for(asyncio.sleep(9), 0.01)
    return ""


async def deaf(task: Task, endpoint: Endpoint) -> str:
    """Ignore cancellation for some seconds."""
    await ask(endpoint, opening(task))
    end = time.monotonic() + 8
    while time.monotonic() < end:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
    return ""


async def impatient(task: Task, endpoint: Endpoint) -> str:
    """Do not wait for the answer."""
    async with client(endpoint).with_options(timeout=0.2, max_retries=0) as asking:
        await asking.chat.completions.create(model=endpoint.model, messages=opening(task))
    return ""


async def leaving(task: Task, endpoint: Endpoint) -> str:
    """Return while a step and a request are under way."""
    answer = await ask(endpoint, opening(task))
    LEFT.append(asyncio.ensure_future(task.step("Go")))
    LEFT.append(asyncio.ensure_future(ask(endpoint, [{"role": "user", "content": "left behind"}])))
    await asyncio.sleep(0)
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
