"""Hostile programs in real sandboxes: they cannot control other processes or end their sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import attacks
import pytest
from docker_boxes import SMALL, WatchedDocker
from local_harness import WatchedLocal
from requiring import require

from agentkit.errors import EngineUnavailable, SandboxError
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import seccomp
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.types import ExecRequest, ExecResult

pytestmark = pytest.mark.timeout(600)

SOURCE = Path(attacks.__file__).read_bytes()
PATIENCE = 5.0
"""Seconds that a healthy sandbox on a busy machine may take for a command."""
IDLE = "import time; time.sleep(600)"


@dataclass
class Target:
    """A sandbox under attack."""

    backend: Backend
    id: str
    channel: Channel

    async def run(self, *argv: str, timeout: float = 60.0, stdin: bytes = b"") -> ExecResult:
        return await self.channel.exec(ExecRequest(argv, timeout, 1 << 20, "/workspace", stdin=stdin))

    async def python(self, script: str, *arguments: str, timeout: float = 60.0) -> ExecResult:
        return await self.run("python3", "-c", script, *arguments, timeout=timeout)

    async def attack(self, *pids: int) -> list[str]:
        result = await self.run("python3", "-c", SOURCE.decode(), *map(str, pids))
        assert result.exit_code == 0, result.stderr
        return result.stdout.splitlines()

    async def processes(self) -> set[int]:
        """Return all running processes, except those of this query."""
        listing = "import os; print(*(p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()))"
        return set(map(int, (await self.python(listing)).stdout.split()))

    async def unharmed(self, running: set[int] = frozenset({1})) -> None:  # pyright: ignore[reportArgumentType]
        """The sandbox works as before, and nothing runs in it but ``running``."""
        began = time.monotonic()
        result = await self.run("echo", "usable", timeout=PATIENCE)
        assert result.stdout == "usable\n"
        assert time.monotonic() - began < PATIENCE
        assert (await self.backend.inspect(self.id)).state == "running"
        await self.channel.write("/workspace/after", b"data", 0o644)
        assert await self.channel.read("/workspace/after", 10) == b"data"
        assert await self.processes() == running


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), "bubblewrap", "namespaces"])
async def target(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Target]:
    if request.param == "docker":
        backend: Backend = await _docker(monkeypatch, tmp_path)
    else:
        monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
        backend = WatchedLocal(request.param)
        try:
            await backend.start()
        except EngineUnavailable as error:
            require(False, f"apt-get install bubblewrap, and let users make name spaces ({error})")
    id = paths.new_id()
    try:
        yield Target(backend, id, await backend.create(id, SMALL, {"agentkit.managed": "1", "agentkit.id": id}))
    finally:
        await backend.remove(id)
        await backend.close()


async def _docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WatchedDocker:
    require("docker", "pip install 'agentkit-rl[docker]'")
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    backend = WatchedDocker()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"start a container engine ({error})")
    return backend


def refused(lines: Sequence[str], count: int = len(attacks.ATTEMPTS)) -> None:
    assert len(lines) == count + 1
    assert [line for line in lines[:-1] if not line.endswith(": refused")] == []


async def test_the_agent_is_process_one(target: Target) -> None:
    assert await target.processes() == {1}


async def test_process_one_is_out_of_reach(target: Target) -> None:
    refused(await target.attack(1), len(attacks.ATTEMPTS) + len(attacks.STARVING))
    await target.unharmed()


WAYS_OUT = """
import ctypes, errno, fcntl, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == "aarch64"
def refused(name, code):
    print(name, errno.errorcode.get(code, code))
for family in (socket.AF_VSOCK, socket.AF_ALG):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind)
            print("opened", family)
        except OSError as error:
            refused(family.name, error.errno)
calls = {
    "io_uring_setup": (425, 8, 0), "open_tree": (428, -100, 0, 0), "fsopen": (430, 0, 0),
    "setns": (268 if arm else 308, 0, 0), "unshare": (97 if arm else 272, 0x10000000),
    "keyctl": (219 if arm else 250, 0), "bpf": (280 if arm else 321, 0, 0, 0),
    "mount": (40 if arm else 165, 0, 0, 0, 0, 0), "userfaultfd": (282 if arm else 323, 0),
    "perf_event_open": (241 if arm else 298, 0, 0, 0, 0, 0), "clone": (220 if arm else 56, 0x10000011, 0, 0, 0, 0),
}
for name, (number, *arguments) in calls.items():
    if libc.syscall(number, *map(ctypes.c_long, arguments)) >= 0:
        print("done", name)
        os._exit(0)
    refused(name, ctypes.get_errno())
try:
    fcntl.ioctl(os.openpty()[1], 0x5412, b"x")
except OSError as error:
    refused("TIOCSTI", error.errno)
"""


async def test_ways_out_of_a_name_space_are_refused(target: Target) -> None:
    require(seccomp.program() is not None, "run it on x86_64 or aarch64")
    lines = (await target.python(WAYS_OUT)).stdout.splitlines()
    assert len(lines) == 18
    assert [line for line in lines if not line.endswith(" EPERM")] == []
    await target.unharmed()


ORDINARY = """
import asyncio, concurrent.futures, multiprocessing, os, resource, sqlite3, subprocess, sys, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.check_output(["echo", "child"]).decode().strip())
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(sum(pool.map(abs, [-1, 2])))
print(sqlite3.connect("/workspace/data").execute("select 7").fetchone()[0])
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(b"async"))[0].decode()
print(asyncio.run(main()))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, os.getpid(), 5); os.setpriority(os.PRIO_PGRP, 0, 6)
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


async def test_ordinary_programs_work(target: Target) -> None:
    result = await target.python(ORDINARY)
    assert result.stdout.split() == ["thread", "child", "3", "7", "async", "6"], result.stderr
    await target.unharmed()


async def test_killing_all_processes_keeps_the_sandbox(target: Target) -> None:
    result = await target.run("sh", "-c", "kill -9 -1; echo survived")
    assert result.stdout in ("survived\n", "")
    await target.unharmed()
    await target.python("import os; os.fork() or os.kill(-1, 9)")
    await target.unharmed()


async def test_a_flood_of_signals_does_not_stop_the_agent(target: Target) -> None:
    flood = "import os, signal\nwhile True:\n    for n in (signal.SIGCHLD, signal.SIGURG, 34): os.kill(1, n)"
    running = [asyncio.ensure_future(target.python(flood, timeout=4.0)) for _ in range(2)]
    await asyncio.sleep(1.0)
    assert (await target.run("echo", "usable", timeout=20.0)).stdout == "usable\n"
    assert [result.timed_out for result in await asyncio.gather(*running)] == [True, True]
    await target.unharmed()


async def test_a_file_worker_is_isolated_and_its_death_is_reported(target: Target) -> None:
    await target.run("sh", "-c", "mkdir d; head -c 8000000 /dev/zero > d/file")
    packing = target.channel.pack(["/workspace/d"])  # pyright: ignore[reportAttributeAccessIssue]
    assert await anext(packing)  # and the rest waits in the worker
    workers = await target.processes() - {1}
    assert len(workers) == 1
    lines = await target.attack(*workers)
    refused(lines)
    with pytest.raises(SandboxError, match="killed") as caught:
        [None async for _ in packing]
    assert caught.value.details["signal"] in range(1, 65)
    assert caught.value.side_effects == "maybe"
    await target.unharmed()


IMPOSTOR = """
import glob, os, socket, struct, time
def pack(*fields):
    packed = [b"i" + struct.pack("!q", f) if type(f) is int else b"b" + struct.pack("!I", len(f)) + f for f in fields]
    return b"".join(packed)
def read(path):
    with open(path, "rb") as file:
        return file.read()
seen, kept = set(), []
print("ready", flush=True)
while True:
    found = set(glob.glob("/run/agentkit/*")) - seen
    seen |= {path for path in found if path.endswith(".sock")}
    for path in found:
        if path.endswith(".sock"):
            text = b"\\0".join(read(path) for path in glob.glob("/run/agentkit/[cn]*"))
            nonces = [word.partition(b"=")[2] if b"=" in word else word for word in text.split(b"\\0")]
            for nonce in nonces:
                kept.append(socket.socket(socket.AF_UNIX))
                kept[-1].connect(path)
                hello = pack(1, nonce, b"impostor")
                kept[-1].send(struct.pack("!IBI", len(hello), 1, 0) + hello)
    time.sleep(0.001)
"""


async def test_no_program_can_imitate_the_agent(target: Target) -> None:
    impostor = await target.channel.spawn(ExecRequest(("python3", "-c", IMPOSTOR), 120.0, 1 << 16, "/workspace"))
    async for _ in impostor:
        break
    _, second = await target.backend.attach(target.id)
    assert second.boot == target.channel.boot  # pyright: ignore[reportAttributeAccessIssue]
    assert (await second.exec(ExecRequest(("echo", "real"), 20.0, 1 << 16, "/workspace"))).stdout == "real\n"
    await second.close()
    await impostor.kill()
    await target.unharmed()


HIDING = {
    "another session": "leave()",
    "no environment": "leave(); os.execve('/proc/self/exe', ['python3', '-c', LOOP], {})",
    "a forged mark": "leave(); os.execve('/proc/self/exe', ['python3', '-c', LOOP], {'AGENTKIT_JOB': 'another'})",
    "a forged number": "import resource; resource.setrlimit(10, (5, 5)); leave()",
    "all signals ignored": "[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]; leave()",
    "an own group for each": "leave(); os.setpgid(0, 0); leave()",
}
LEAVE = """
import os, signal, time
LOOP = "import time; time.sleep(600)"
def leave():
    if os.fork():
        time.sleep(600)
    os.setsid()
    if os.fork():
        os._exit(0)
{how}
time.sleep(600)
"""


@pytest.mark.parametrize("how", HIDING)
async def test_a_timeout_ends_what_hides(target: Target, how: str) -> None:
    result = await target.python(LEAVE.format(how=HIDING[how]), timeout=1.0)
    assert (result.timed_out, result.tainted) == (True, False)
    await target.unharmed()


async def test_a_timeout_spares_what_an_earlier_command_left(target: Target) -> None:
    """This includes processes that the earlier command starts meanwhile and detaches."""
    server = f"""
import os, time
if os.fork(): os._exit(0)
os.setsid()
time.sleep(1.5)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/workspace/child", "w").write(str(os.getpid()))
        {IDLE.replace("; ", chr(10) + "        ")}
    os._exit(0)
os.wait()
{IDLE}
"""
    assert (await target.python(server)).exit_code == 0
    (first,) = await target.processes() - {1}
    assert (await target.run("sleep", "600", timeout=3.0)).timed_out
    child = int(await target.channel.read("/workspace/child", 10))
    await target.unharmed({1, first, child})


async def test_the_directory_of_a_command_is_the_one_that_is_there_now(target: Target) -> None:
    async def at(path: str, script: str) -> str:
        return (await target.channel.exec(ExecRequest(("/bin/sh", "-c", script), 60.0, 1 << 16, path))).stdout

    await at("/workspace", "mkdir d")
    await at("/workspace/d", "rmdir /workspace/d; mkdir /workspace/d; touch /workspace/d/new")
    assert await at("/workspace/d", "ls") == "new\n"


async def test_a_fork_bomb_ends_with_its_time(target: Target) -> None:
    bomb = "import os, time\nwhile True:\n    try: os.fork() or os.setsid()\n    except OSError: time.sleep(0.01)"
    with contextlib.suppress(SandboxError):  # it may leave no process for its own end
        await target.python(bomb, timeout=1.0)
    await target.unharmed()
