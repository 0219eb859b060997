"""Conformance tests of the life cycle."""

from __future__ import annotations

import asyncio

import pytest

from agentkit.errors import InvalidTransition, SandboxExpired, SandboxLost, StartTimeout
from agentkit.sandboxes import Backend, Sandbox
from agentkit.sandboxes.testing.conformance.fixtures import SLACK, SMALL, Create, SandboxFixtures, optional, until


class LifecycleConformance(SandboxFixtures):
    """Tests of creation, pausing, restart, snapshots, time to live and events."""

    async def test_info(self, create: Create, backend: Backend) -> None:
        box = await create(labels={"task": "7"}, ttl=500)
        info = box.info
        assert (info.id, info.backend, info.state, info.generation) == (box.id, backend.name, "ready", 1)
        assert info.isolation
        assert backend.host_of(box.id) not in ("", "unknown")
        assert info.loosened == ()
        assert info.labels == {"task": "7"}
        assert info.expires is not None
        assert 400 < info.expires - info.created <= 500 + SLACK
        assert [item.after for item in box.history[:3]] == ["creating", "starting", "ready"]

    async def test_statistics(self, box: Sandbox) -> None:
        await box.files.write("big", b"x" * (1 << 20))
        stats = await box.stats()
        assert stats.memory is None or stats.memory >= 0
        assert stats.processes is None or stats.processes >= 0
        assert stats.workspace_used is None or stats.workspace_used >= 1 << 20

    async def test_ping(self, box: Sandbox) -> None:
        assert 0 <= await box.ping(20) < 20

    async def test_logs_are_text(self, box: Sandbox) -> None:
        assert isinstance(await box.logs(tail=10), str)

    async def test_leaving_the_context_removes_the_sandbox(self, backend: Backend) -> None:
        async with Sandbox.create(SMALL, backend=backend) as box:
            assert (await backend.inspect(box.id)).state == "running"
        assert (await backend.inspect(box.id)).state == "absent"
        assert box.state == "removed"
        with pytest.raises(SandboxLost):
            await box.exec("true")
        with pytest.raises(SandboxLost):
            await box.files.read("x")

    async def test_closing_twice_and_at_once(self, box: Sandbox) -> None:
        await asyncio.gather(box.close(), box.close(), box.close())
        await box.close()

    async def test_closing_a_removed_sandbox(self, box: Sandbox, backend: Backend) -> None:
        await backend.remove(box.id)
        await backend.remove(box.id)
        await box.close()
        assert box.state == "removed"

    async def test_closing_ends_running_commands(self, box: Sandbox) -> None:
        task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
        await asyncio.sleep(0.2)
        await box.close()
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(task, SLACK)
        assert caught.value.side_effects == "maybe"

    async def test_removal_by_another_is_noticed(self, box: Sandbox, backend: Backend) -> None:
        task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
        await asyncio.sleep(0.2)
        await backend.remove(box.id)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(task, SLACK)
        assert box.state == "unhealthy"
        assert box.loss is not None
        with pytest.raises(SandboxLost):
            await box.exec("true")

    async def test_a_lost_sandbox_does_not_affect_others(self, create: Create, backend: Backend) -> None:
        one, two = await create(), await create()
        task = asyncio.ensure_future(two.exec("sleep 0.5; echo fine"))
        await backend.remove(one.id)
        assert (await task).stdout == "fine\n"

    async def test_sandboxes_see_nothing_of_each_other(self, create: Create) -> None:
        one, two = await create(), await create()
        await one.files.write("/tmp/secret", "x")
        await one.files.write("secret", "x")
        assert not await two.files.exists("/tmp/secret")
        assert not await two.files.exists("secret")

    # Pausing.

    async def test_pausing_freezes(self, box: Sandbox, backend: Backend) -> None:
        await box.exec("(while :; do echo x >> log; sleep 0.05; done) > /dev/null 2>&1 &")
        await until(lambda: box.files.exists("log"))
        with optional():
            await box.pause()
        assert (await backend.inspect(box.id)).state == "paused"
        for refused in (box.exec("true"), box.files.read("log"), box.pause(), box.ping()):
            with pytest.raises(InvalidTransition):
                await refused
        await box.resume()
        assert (await box.exec("echo on")).stdout == "on\n"
        assert [item.after for item in box.history if item.cause in ("pause", "resume")] == ["paused", "ready"]

    async def test_a_paused_sandbox_can_be_closed_and_restarted(self, create: Create) -> None:
        one, two = await create(), await create()
        with optional():
            await one.pause()
        await one.close()
        await two.pause()
        await two.restart()
        assert (await two.exec("echo on")).ok

    async def test_a_running_sandbox_is_not_resumed_or_paused(self, box: Sandbox) -> None:
        with pytest.raises(InvalidTransition):
            await box.resume()
        task = asyncio.ensure_future(box.exec("sleep 1"))
        await asyncio.sleep(0.2)
        with optional(), pytest.raises(InvalidTransition):
            await box.pause()
        assert (await task).ok

    # Restart and reset.

    async def test_a_restart_empties_the_sandbox(self, box: Sandbox) -> None:
        await box.files.write("x", "1")
        shell = await box.shell()
        process = await box.spawn("sleep 1000", timeout=2000)
        task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
        await asyncio.sleep(0.2)
        await box.restart()
        assert (box.generation, box.state) == (2, "ready")
        assert not await box.files.exists("x")
        with pytest.raises(SandboxLost):
            await task
        with pytest.raises(SandboxLost):
            await shell.run("true")
        with pytest.raises(SandboxLost):
            await process.wait()
        assert (await box.exec("echo on")).stdout == "on\n"

    async def test_a_reset_removes_all_files(self, box: Sandbox) -> None:
        await box.files.write("x", "1")
        await box.files.write("/tmp/y", "1")
        await box.reset()
        assert list(await box.files.list()) == []
        assert not await box.files.exists("/tmp/y")

    async def test_setup_and_ready_come_first(self, create: Create) -> None:
        box = await create(setup=("sh", "-c", "echo set > up"), ready=("test", "-f", "up"))
        assert await box.files.read_text("up") == "set\n"
        await box.restart()
        assert await box.files.read_text("up") == "set\n"

    @pytest.mark.parametrize("phase", ["setup", "ready"])
    async def test_a_sandbox_that_does_not_become_ready_is_removed(
        self, create: Create, backend: Backend, phase: str
    ) -> None:
        label = {"never": phase}
        with pytest.raises(StartTimeout) as caught:
            await create(labels=label, start_timeout=1, **{phase: ("sh", "-c", "echo why >&2; false")})
        assert caught.value.details["phase"] == phase
        assert "why" in caught.value.details["log_tail"]
        assert await Sandbox.list(labels=label, backend=backend) == []

    async def test_a_cancelled_creation_leaves_nothing(self, backend: Backend) -> None:
        for delay in (0.0, 0.01, 0.05, 0.15, 0.3):
            task = asyncio.ensure_future(
                Sandbox.create(SMALL, backend=backend, labels={"cancelled": "1"}, ready=("sleep", "20"))
            )
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await Sandbox.list(labels={"cancelled": "1"}, backend=backend) == []

    # Snapshots.

    async def test_a_fork_has_the_files_and_is_independent(self, box: Sandbox, backend: Backend) -> None:
        await box.files.write("x", "1")
        await box.files.write("/tmp/y", "2")
        with optional():
            child = await box.fork()
        async with child:
            assert await child.files.read_text("x") == "1"
            assert await child.files.read_text("/tmp/y") == "2"
            await child.files.write("x", "changed")
            assert await box.files.read_text("x") == "1"
            await child.reset()
            assert await child.files.read_text("x") == "1"

    async def test_a_snapshot_keeps_its_moment(self, box: Sandbox, create: Create, backend: Backend) -> None:
        await box.files.write("x", "then")
        with optional():
            snapshot = await box.snapshot()
        try:
            await box.files.write("x", "now")
            again = await create(snapshot=snapshot)
            assert await again.files.read_text("x") == "then"
            assert await box.files.read_text("x") == "now"
        finally:
            await Sandbox.discard(snapshot, backend=backend)
        await Sandbox.discard(snapshot, backend=backend)

    # Listing and connecting.

    async def test_sandboxes_are_found_by_their_labels(self, create: Create, backend: Backend) -> None:
        one, two = await create(labels={"task": "1", "who": "me"}), await create(labels={"task": "2", "who": "me"})
        assert {seen.id for seen in await Sandbox.list(labels={"who": "me"}, backend=backend)} == {one.id, two.id}
        assert [seen.id for seen in await Sandbox.list(labels={"task": "1"}, backend=backend)] == [one.id]
        assert {one.id, two.id} <= {seen.id for seen in await Sandbox.list(backend=backend)}
        await one.close()
        assert [seen.id for seen in await Sandbox.list(labels={"who": "me"}, backend=backend)] == [two.id]

    async def test_connecting_to_a_running_sandbox(self, box: Sandbox, backend: Backend) -> None:
        await box.files.write("x", "1")
        async with Sandbox.connect(box.id, backend=backend) as other:
            assert (other.id, other.spec) == (box.id, box.spec)
            assert await other.files.read_text("x") == "1"
            assert (await other.exec("echo both")).stdout == "both\n"
        assert (await box.exec("echo still")).stdout == "still\n"
        other = await Sandbox.connect(box.id, backend=backend)
        await other.close(remove=True)
        assert (await backend.inspect(box.id)).state == "absent"

    async def test_connecting_to_a_missing_sandbox(self, backend: Backend) -> None:
        with pytest.raises(SandboxLost):
            await Sandbox.connect("ak-0123456789abcdef", backend=backend)

    # Time to live.

    async def test_the_time_to_live_ends(self, create: Create, backend: Backend) -> None:
        box = await create(ttl=1.5)
        assert (await box.exec("true")).ok
        await until(lambda: _absent(backend, box))
        with pytest.raises(SandboxExpired):
            await box.exec("true")
        with pytest.raises(SandboxExpired):
            await box.extend(100)
        await box.close()

    async def test_the_time_to_live_begins_when_the_sandbox_is_ready(self, create: Create) -> None:
        box = await create(ttl=6, setup=("sleep", "7"))
        await asyncio.sleep(1)
        assert (await box.exec("echo here")).ok

    async def test_the_time_to_live_can_be_extended(self, create: Create) -> None:
        box = await create(ttl=2)
        await box.extend(500)
        await asyncio.sleep(2.5)
        assert (await box.exec("echo here")).ok
        await box.extend(None)
        assert box.info.expires is None

    # Events.

    async def test_events(self, create: Create, backend: Backend) -> None:
        seen = []

        async def listen() -> None:
            async for event in backend.events():
                seen.append((event.id, event.kind))

        task = asyncio.ensure_future(listen())
        await asyncio.sleep(0.2)
        box = await create()
        await backend.remove(box.id)

        async def told() -> bool:
            return (box.id, "removed") in seen

        await until(told)
        assert (box.id, "died") in seen
        task.cancel()
        await asyncio.wait({task})

    async def test_changes_of_state_are_reported(self, box: Sandbox) -> None:
        seen = []

        async def listen() -> None:
            async for change in box.events():
                seen.append((change.before, change.after))

        task = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        await box.exec("true")
        await box.restart()
        await box.close()
        await asyncio.wait_for(task, SLACK)
        assert seen == [
            ("ready", "busy"),
            ("busy", "ready"),
            ("ready", "recovering"),
            ("recovering", "ready"),
            ("ready", "stopping"),
            ("stopping", "removed"),
        ]


async def _absent(backend: Backend, box: Sandbox) -> bool:
    return (await backend.inspect(box.id)).state == "absent" and box.state == "removed"
