"""Faults of an agent: it dies, hangs, sends invalid messages, loses its host, or runs out of memory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from agent_harness import PYTHON, eventually, lives, local_agent, request, sh

from agentkit.errors import ProtocolError, ResourcesExhausted, SandboxLost, StartTimeout
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.channel import AgentChannel, listen
from agentkit.sandboxes.agent.launch import command, new_nonce, nonce_of, prepare
from agentkit.sandboxes.agent.protocol import Kind


@pytest.fixture
async def agent(tmp_path):
    async with local_agent(tmp_path) as agent:
        yield agent


async def test_a_killed_agent_is_seen_at_once(agent):
    running = asyncio.ensure_future(agent.channel.exec(sh("echo partial; sleep 1000")))
    process = await agent.channel.spawn(sh("sleep 1000"))
    await asyncio.sleep(1)  # Output is sent ahead after a tenth of a second.
    start = time.monotonic()
    os.kill(agent.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost) as caught:
        await running
    assert time.monotonic() - start < 5
    assert caught.value.details["reason"] == "agent_dead"
    assert caught.value.details["stdout"] == b"partial\n"
    assert caught.value.side_effects == "maybe"
    assert agent.channel.lost.result() == "agent_dead"
    with pytest.raises(SandboxLost):
        await process.wait()
    for call in (
        agent.channel.exec(request("true")),
        agent.channel.spawn(request("true")),
        agent.channel.read("/etc/passwd", 10),
        agent.channel.stats(),
        agent.channel.ping(1),
    ):
        with pytest.raises(SandboxLost):
            await call


async def test_a_stopped_agent_answers_no_ping_and_comes_back(agent):
    os.kill(agent.pid, signal.SIGSTOP)
    with pytest.raises(asyncio.TimeoutError):
        await agent.channel.ping(0.3)
    os.kill(agent.pid, signal.SIGCONT)
    assert await agent.channel.ping(30) < 30
    assert (await agent.channel.exec(request("true"))).ok


async def test_a_stopped_agent_does_not_hold_its_callers(agent, monkeypatch):
    monkeypatch.setattr("agentkit.sandboxes.agent.connection._OVERDUE", 0.3)
    os.kill(agent.pid, signal.SIGSTOP)
    with pytest.raises(SandboxLost):
        await agent.channel.exec(request("true", timeout=0.2))
    assert agent.channel.lost.done()


async def test_closing_ends_what_waits(agent):
    running = asyncio.ensure_future(agent.channel.exec(request("sleep", "1000")))
    await eventually(lambda: len(agent.descendants()) == 1)
    await agent.channel.close()
    await agent.channel.close()
    with pytest.raises(SandboxLost) as caught:
        await running
    assert caught.value.details["reason"] == "closed"
    # No caller is left that could ask for its result.
    await eventually(lambda: agent.descendants() == [])


async def test_a_second_host_may_connect(agent, tmp_path):
    listener = await listen(tmp_path, nonce_of(tmp_path), isolation="none")
    second = await listener.accept(60)
    assert second.boot == agent.channel.boot
    first = asyncio.ensure_future(agent.channel.exec(sh("sleep 1; echo one")))
    assert (await second.exec(sh("echo two"))).stdout == "two\n"
    await second.close()
    assert (await first).stdout == "one\n"


async def test_a_keyed_command_outlives_its_connection(agent, tmp_path):
    task = asyncio.ensure_future(agent.channel.exec(sh(f"echo x >> {tmp_path}/ran; sleep 2; echo done", key="k")))
    await eventually(lambda: (tmp_path / "ran").exists())
    await agent.channel.close()
    with pytest.raises(SandboxLost):
        await task
    async with await listen(tmp_path, agent.nonce) as listener:
        channel = await listener.accept(60)
    assert (await channel.exec(sh("anything", key="k"))).stdout == "done\n"
    assert (tmp_path / "ran").read_text() == "x\n"
    await channel.close()


async def test_without_a_host_the_agent_ends(tmp_path):
    async with local_agent(tmp_path, idle_timeout=1.5) as agent:
        await agent.channel.exec(sh("setsid sleep 1000 >/dev/null 2>&1 &"))
        below = agent.descendants()
        assert below
        await asyncio.sleep(3)
        assert agent.process.returncode is None  # The heartbeat is contact enough.
        await agent.channel.close()
        assert await asyncio.wait_for(agent.process.wait(), 30) == 0
        assert not any(lives(process) for process in below)


async def test_the_agent_takes_its_commands_with_it(agent):
    await agent.channel.exec(sh("(setsid env -i sleep 1000 >/dev/null 2>&1 &)"))
    below = agent.descendants()
    agent.process.terminate()
    assert await asyncio.wait_for(agent.process.wait(), 30) == 0
    assert below
    assert not any(lives(process) for process in below)


async def test_commands_cannot_look_into_the_agent(tmp_path):
    nobody = 65534
    directory = Path("/tmp") / f"agentkit-test-{os.getpid()}"
    if os.getuid() != 0:
        pytest.skip("becoming another user takes root")
    directory.mkdir(mode=0o755)
    nonce = new_nonce()
    prepare(directory, nonce, idle_timeout=60)
    listener = await listen(directory, nonce)
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else PYTHON
    arguments = command(str(directory), python)
    process = await asyncio.create_subprocess_exec(*arguments, user=nobody, group=nobody, extra_groups=[])
    try:
        channel = await listener.accept(60)
        script = "id -u; cat /proc/$0/environ; ls /proc/$0/fd; echo 0 > /proc/$0/oom_score_adj"
        result = await channel.exec(request("sh", "-c", script, str(process.pid)))
        assert result.stdout == "65534\n"
        assert result.stderr.count("ermission denied") == 3
        score = await channel.exec(sh(f"sleep 1; cat /proc/{process.pid}/oom_score_adj /proc/self/oom_score_adj"))
        agents, own = map(int, score.stdout.split())
        assert agents < own
        await channel.close()
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 60)
        await listener.close()
        for entry in directory.iterdir():
            entry.unlink()
        directory.rmdir()


async def test_out_of_processes_is_reported(tmp_path):
    if os.getuid() != 0:
        pytest.skip("making a control group takes root")
    group = Path("/sys/fs/cgroup/pids") / f"agentkit-test-{os.getpid()}"
    if not group.parent.is_dir():
        group = Path("/sys/fs/cgroup") / group.name
    group.mkdir()
    try:
        async with local_agent(tmp_path) as agent:
            (group / "cgroup.procs").write_text(str(agent.pid))
            (group / "pids.max").write_text("20")
            bomb = await agent.channel.spawn(sh("for i in $(seq 18); do sleep 1000 & done; wait"))
            await eventually(lambda: (group / "pids.current").read_text().strip() == "20")
            for _ in range(3):
                with pytest.raises(ResourcesExhausted):
                    await agent.channel.exec(request("true"))
            await agent.channel.ping(30)
            await bomb.kill()
            await bomb.wait()
            await eventually(lambda: agent.descendants() == [])
            assert (await agent.channel.exec(request("true"))).ok
            script = "import os\nwhile 1:\n try: os.fork()\n except OSError: pass"
            bomb = await agent.channel.exec(request(sys.executable, "-c", script, timeout=2))
            assert bomb.timed_out
            assert not bomb.tainted
            assert agent.descendants() == []
    finally:
        await asyncio.sleep(0.2)
        group.rmdir()


async def test_out_of_memory_is_reported(tmp_path):
    if os.getuid() != 0:
        pytest.skip("making a control group takes root")
    group = Path("/sys/fs/cgroup/memory") / f"agentkit-test-{os.getpid()}"
    limit = group / "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group = Path("/sys/fs/cgroup") / group.name
        limit = group / "memory.max"
    group.mkdir()
    limit.write_text(str(100 << 20))
    try:
        # The agent has to be in the group from its first moment on: it looks for its counters once.
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {PYTHON} "$@"\n')
        wrapper.chmod(0o755)
        async with local_agent(tmp_path, python=str(wrapper)) as agent:
            hog = f"{sys.executable} -c 'x = bytearray(300 << 20)'"
            result = await agent.channel.exec(sh(hog))
            assert result.oom_killed
            assert result.exit_code == 137
            within = await agent.channel.exec(sh(f"{hog}; echo survived"))
            assert within.oom_killed
            assert within.stdout == "survived\n"
            innocent = await agent.channel.exec(sh("kill -9 $$"))
            assert innocent.signal == 9
            assert not innocent.oom_killed
            stats = await agent.channel.stats()
            assert stats.oom_kills == 2
            assert stats.memory_limit == 100 << 20
            assert stats.memory is not None
            assert 0 < stats.memory < 100 << 20
            assert agent.process.returncode is None
    finally:
        await asyncio.sleep(0.2)
        group.rmdir()


# --- an agent that lies -----------------------------------------------------------------------------------------------


class Liar:
    """An agent that sends invalid messages as a test requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = protocol.Decoder()
        self._frames: list[protocol.Frame] = []

    async def request(self) -> protocol.Frame:
        """Return the next frame of the host, skipping pings."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.kind != Kind.PING:
                    return frame
                self.say(Kind.PONG, frame.id)
            data = await self.reader.read(65536)
            assert data
            self._frames += self._decoder.feed(data)

    def say(self, kind: int, id: int, payload: bytes = b"") -> None:
        self.writer.write(protocol.encode(kind, id, payload))


async def _connect(directory: Path) -> Liar:
    (name,) = [name for name in os.listdir(directory) if name.endswith(".sock")]
    parent = os.open(directory, os.O_PATH)
    try:
        return Liar(*await asyncio.open_unix_connection(f"/proc/self/fd/{parent}/{name}"))
    finally:
        os.close(parent)


async def _pair(directory: Path) -> tuple[Liar, AgentChannel]:
    async with await listen(directory, "nonce") as listener:
        liar = await _connect(directory)
        liar.say(Kind.HELLO, 0, protocol.pack(protocol.VERSION, b"nonce", b"boot"))
        return liar, await listener.accept(30)


def _done(code: int = 0, signal: int = 0, flags: int = 0, duration: float = 0.1, out: bytes = b"", err: bytes = b""):
    return protocol.pack(code, signal, flags, duration, out, err)


_LIES = {
    "garbage": lambda liar, id: liar.writer.write(b"\xff" * 100),
    "oversize": lambda liar, id: liar.writer.write((2**31).to_bytes(4, "big") + b"\x0d" + id.to_bytes(4, "big")),
    "unknown kind": lambda liar, id: liar.say(99, id),
    "a host's kind": lambda liar, id: liar.say(Kind.RUN, id),
    "unknown request": lambda liar, id: liar.say(Kind.DONE, id + 1, _done()),
    "malformed end": lambda liar, id: liar.say(Kind.DONE, id, b"i"),
    "fields missing": lambda liar, id: liar.say(Kind.DONE, id, protocol.pack(0, 0)),
    "fields too long": lambda liar, id: liar.say(Kind.DONE, id, b"b\xff\xff\xff\xff"),
    "impossible code": lambda liar, id: liar.say(Kind.DONE, id, _done(code=4000)),
    "impossible signal": lambda liar, id: liar.say(Kind.DONE, id, _done(signal=-1)),
    "not a duration": lambda liar, id: liar.say(Kind.DONE, id, _done(duration=float("nan"))),
    "unknown failure": lambda liar, id: liar.say(Kind.FAIL, id, protocol.pack(77, 1)),
    "too much output": lambda liar, id: [liar.say(Kind.OUTPUT, id, b"x" * 900) for _ in range(3)],
    "too much at the end": lambda liar, id: liar.say(Kind.DONE, id, _done(out=b"x" * 2001)),
    "pong without ping": lambda liar, id: liar.say(Kind.PONG, 12345),
    "relay unasked": lambda liar, id: liar.say(Kind.OPEN, protocol.RELAYS),
    "relay unknown": lambda liar, id: liar.say(Kind.OUTPUT, protocol.RELAYS + 5, b"x"),
    "input never sent": lambda liar, id: liar.say(Kind.CREDIT, id, protocol.pack(10**9)),
    "negative input": lambda liar, id: liar.say(Kind.CREDIT, id, protocol.pack(-5)),
    "second hello": lambda liar, id: liar.say(Kind.HELLO, 0, protocol.pack(protocol.VERSION, b"nonce", b"boot")),
}


@pytest.mark.parametrize("lie", _LIES, ids=str)
async def test_an_invalid_message_ends_the_connection(tmp_path, lie):
    liar, channel = await _pair(tmp_path)
    call = asyncio.ensure_future(channel.exec(request("true", limit=1000)))
    frame = await liar.request()
    _LIES[lie](liar, frame.id)
    with pytest.raises(ProtocolError):
        await asyncio.wait_for(call, 30)
    assert channel.lost.result() == "agent_dead"
    with pytest.raises(SandboxLost):
        await channel.exec(request("true"))
    liar.writer.close()


async def test_an_answer_counts_once(tmp_path):
    liar, channel = await _pair(tmp_path)
    call = asyncio.ensure_future(channel.exec(request("true")))
    frame = await liar.request()
    liar.say(Kind.DONE, frame.id, _done(out=b"first"))
    liar.say(Kind.DONE, frame.id, _done(out=b"second"))
    assert (await call).stdout == "first"
    assert await asyncio.wait_for(channel.lost, 30) == "agent_dead"
    liar.writer.close()


async def test_a_result_before_the_start_is_a_protocol_error(tmp_path):
    liar, channel = await _pair(tmp_path)
    call = asyncio.ensure_future(channel.spawn(request("true")))
    frame = await liar.request()
    liar.say(Kind.DONE, frame.id, _done())
    with pytest.raises(ProtocolError):
        await call
    liar.writer.close()


async def test_error_texts_come_from_the_host(tmp_path):
    liar, channel = await _pair(tmp_path)
    call = asyncio.ensure_future(channel.read("/a", 10))
    frame = await liar.request()
    liar.say(Kind.FAIL, frame.id, protocol.pack(protocol.Failure.PATH, 10**6))
    with pytest.raises(Exception, match=r"^cannot read /a$"):
        await call
    for text in (b"f 1 644 0 ../../etc/passwd\0", b"f 1 644 0 ..\0", b"x 1 644 0 a\0", b"f -1 644 0 a\0", b"junk\0"):
        liar, channel = await _pair(tmp_path)
        listing = asyncio.ensure_future(channel.list("/d"))
        frame = await liar.request()
        liar.say(Kind.OUTPUT, frame.id, text)
        liar.say(Kind.DONE, frame.id, _done())
        with pytest.raises(ProtocolError):
            await listing
        await channel.close()


async def test_an_oversized_read_is_a_protocol_error(tmp_path):
    liar, channel = await _pair(tmp_path)
    call = asyncio.ensure_future(channel.read("/a", 1000))
    frame = await liar.request()
    liar.say(Kind.OUTPUT, frame.id, b"x" * 1001)
    with pytest.raises(ProtocolError):
        await call
    liar.writer.close()


async def test_invalid_frames_use_bounded_memory(tmp_path):
    liar, channel = await _pair(tmp_path)
    before = psutil.Process().memory_info().rss
    call = asyncio.ensure_future(channel.exec(request("true", limit=1000)))
    frame = await liar.request()
    try:
        for _ in range(500):
            liar.say(Kind.OUTPUT, frame.id, b"x" * protocol.MAX_PAYLOAD)
            await liar.writer.drain()
    except OSError:
        pass
    with pytest.raises(ProtocolError):
        await call
    assert psutil.Process().memory_info().rss - before < 32 << 20
    liar.writer.close()


async def test_only_an_agent_with_the_nonce_is_accepted(tmp_path):
    async with await listen(tmp_path, "secret") as listener:
        for frame in (
            protocol.encode(Kind.HELLO, 0, protocol.pack(protocol.VERSION, b"guess", b"boot")),
            protocol.encode(Kind.HELLO, 0, protocol.pack(protocol.VERSION + 1, b"secret", b"boot")),
            protocol.encode(Kind.HELLO, 0, b"junk"),
            protocol.encode(Kind.PONG, 0),
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            liar = await _connect(tmp_path)
            liar.writer.write(frame)
            assert await asyncio.wait_for(liar.reader.read(1), 30) == b""
            liar.writer.close()
        silent = await _connect(tmp_path)
        with pytest.raises(StartTimeout, match="nonce is wrong") as caught:
            await listener.accept(0.3)
        assert caught.value.details["phase"] == "agent"
        silent.writer.close()
    assert list(tmp_path.glob("*.sock")) == []


async def test_a_listener_that_is_cancelled_leaves_nothing(tmp_path):
    listener = await listen(tmp_path, "secret")
    waiting = asyncio.ensure_future(listener.accept(60))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert list(tmp_path.iterdir()) == []
