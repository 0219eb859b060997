"""`agentkit sandbox top`: many sandboxes, silent ones, and what programs may write on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import uuid
from typing import Any

import pytest
from rich.console import Console

from agentkit.cli.sandbox.sampling import CONCURRENCY, HostRow, Sample, Sampler, SandboxRow
from agentkit.cli.sandbox.top import Order, ordered, screen
from agentkit.sandboxes import Sandbox, SandboxSpec, paths
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.reaper.labels import ID, MANAGED, OWNER, RUN
from agentkit.sandboxes.reaper.owner import Owner
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.config import ServerConfig, TenantConfig
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend


def row(number: int, **fields: Any) -> SandboxRow:
    known: dict[str, Any] = {"age": 1.0, "cpu": 0.0, "memory": 1 << 20, "memory_limit": 1 << 30, "processes": 1}
    return SandboxRow(f"ak-{number:016x}", "local", "here", "running", "pid 1", **{**known, **fields})


async def owned_sandboxes(fake: FakeBackend, number: int) -> list[str]:
    """Create sandboxes with the labels of this process as their owner, which a fake back end does not register."""
    ids = [paths.new_id() for _ in range(number)]
    for id in ids:
        owner = {MANAGED: "1", ID: id, OWNER: str(Owner.of(os.getpid())), RUN: str(uuid.uuid4())}
        await fake.create(id, SandboxSpec(), owner)
    return ids


def test_two_hundred_sandboxes_of_which_some_are_silent() -> None:
    async def scenario() -> None:
        fake = FakeBackend(create_seconds=0.01, call_seconds=0.05)
        ids = await owned_sandboxes(fake, 200)
        silent = set(ids[:10])
        for id in silent:
            fake.mute(id)
        sampler = Sampler([fake])
        loop = asyncio.get_running_loop()
        samples = []
        for _ in range(4):
            began = loop.time()
            samples.append(await sampler.sample(1.0))
            assert loop.time() - began < 1.2
            await asyncio.sleep(1.0)
        sample = samples[-1]
        assert len(sample.sandboxes) == sample.hosts[0].sandboxes == 200
        assert {one.id for one in sample.sandboxes if one.state == "silent"} == silent
        assert all(one.memory is not None for one in sample.sandboxes if one.id not in silent)
        fake.engine_down()
        stale = await sampler.sample(1.0)
        assert len(stale.problems) == 1
        assert len(stale.sandboxes) == 200
        await sampler.close()

    virtual_time.run(scenario())


def test_at_most_some_sandboxes_are_asked_at_a_time() -> None:
    async def scenario() -> None:
        fake = FakeBackend(create_seconds=0.01)
        for id in await owned_sandboxes(fake, 3 * CONCURRENCY):
            fake.mute(id)
        fake.calls.clear()
        sampler = Sampler([fake])
        await sampler.sample(1.0)
        assert len([call for call in fake.calls if call.op == "stats"]) == CONCURRENCY
        await sampler.close()

    virtual_time.run(scenario())


async def test_the_operator_sees_what_each_tenant_uses() -> None:
    own, operator = "a-token-of-one-tenant-alone", "a-token-of-the-tests-alone"
    tenants = {"alpha": TenantConfig(token_sha256=(hashlib.sha256(own.encode()).hexdigest(),))}
    async with SandboxServer(FakeBackend(), token=operator, config=ServerConfig(tenants=tenants)) as server:
        samples = []
        async with contextlib.AsyncExitStack() as stack:
            for token in (own, operator):
                backend = RemoteBackend(server.url, token)
                await backend.start()
                stack.push_async_callback(backend.close)
                if token == own:
                    await stack.enter_async_context(Sandbox.create(backend=backend))
                sampler = Sampler([backend])
                samples.append(await sampler.sample(1.0))
                await sampler.close()
    assert samples[0].tenants == []
    assert {row.tenant: row.sandboxes for row in samples[1].tenants} == {"alpha": 1, "operator": 0}
    console = Console(file=io.StringIO(), width=100, height=24)
    console.print(screen(samples[1], Order.cpu, 24))
    assert "alpha" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_control_characters_of_a_label_do_not_reach_the_terminal() -> None:
    rows = [row(1, labels={"name": "\x1b[2J\x07\u202egnp"}), row(2, labels={"markup": "[red]x[/red]"})]
    sample = Sample(0.0, [HostRow("here", "local", "up", 0.5, 0.25, None, 2, None)], rows, ["docker: \x1b]0;title\x07"])
    console = Console(file=io.StringIO(), width=160, height=30, force_terminal=True, color_system=None)
    console.print(screen(sample, Order.cpu, 30))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert not {"\x07", "\u202e"} & set(shown)
    assert "\x1b[2J" not in shown
    assert "\\x1b[2J\\x07\\u202egnp" in shown
    assert "[red]x[/red]" in shown


def test_the_screen_fits_the_terminal() -> None:
    sample = Sample(0.0, [], [row(number) for number in range(200)], [])
    console = Console(file=io.StringIO(), width=100, height=24)
    console.print(screen(sample, Order.cpu, 24))
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(lines) <= 24
    assert "more" in lines[-1]


@pytest.mark.parametrize(("order", "first"), [(Order.cpu, 2), (Order.memory, 3), (Order.age, 1)])
def test_sorting(order: Order, first: int) -> None:
    rows = [row(1, age=9.0, cpu=None), row(2, cpu=1.5), row(3, memory=1 << 30)]
    assert ordered(rows, order)[0] is rows[first - 1]
    assert [one.cpu for one in ordered(rows, Order.cpu)][-1] is None
