"""Local sandboxes: isolation, limits and life cycle, seen from inside and outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import attacks
import pytest
from local_harness import WatchedLocal, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable, SandboxError, SandboxLost, StartTimeout, UnsupportedFeature
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import seccomp
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends.local import cgroup
from agentkit.sandboxes.backends.local import processes as local_processes
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.backends.local.observation import changes
from agentkit.sandboxes.spec import Mount, Network, Resources, SandboxSpec
from agentkit.sandboxes.types import BackendEvent, ExecRequest, ExecResult, Observed

__all__ = ["runtime_directory"]

pytestmark = pytest.mark.usefixtures("runtime_directory")

SPEC = SandboxSpec(resources=Resources(memory=64 << 20, tmp=8 << 20, workspace=4 << 20, shm=1 << 20, pids=40))
LEVELS = ["bubblewrap", "namespaces"]

Make = Callable[..., Awaitable[Channel]]


@pytest.fixture(params=LEVELS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[WatchedLocal]:
    async with started(request.param) as backend:
        yield backend


@contextlib.asynccontextmanager
async def started(level: str) -> AsyncIterator[WatchedLocal]:
    """A back end; fails the test if anything of its sandboxes is left at the end."""
    backend = WatchedLocal(level)  # pyright: ignore[reportArgumentType]
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"apt-get install bubblewrap, and let users make name spaces ({error})")
    try:
        yield backend
    finally:
        for id in backend.asked:
            await backend.remove(id)
        await backend.close()
    assert backend.left() == []


async def sh(channel: Channel, script: str, timeout: float = 60.0, cwd: str = "/") -> ExecResult:
    return await channel.exec(ExecRequest(("/bin/sh", "-c", script), timeout, 1 << 20, cwd))


async def make(backend: LocalBackend, spec: SandboxSpec = SPEC) -> tuple[str, Channel]:
    id = paths.new_id()
    return id, await backend.create(id, spec, {"agentkit.managed": "1", "agentkit.id": id})


class TestInside:
    async def test_the_user_has_no_privileges(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        status = (await sh(channel, "id -u; id -g; id -G; cat /proc/self/status")).stdout
        assert status.splitlines()[:3] == ["65534", "65534", "65534"]
        for line in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{line}:\t{0:016x}\n" in status
        assert "NoNewPrivs:\t1\n" in status
        if seccomp.program() is not None:
            assert "Seccomp:\t2\n" in status
        assert channel.isolation.startswith(str(backend._isolation and backend._isolation.level))

    async def test_the_host_is_not_visible(self, backend: WatchedLocal, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        _, channel = await make(backend)
        seen = await sh(
            channel, f"ls /root /home /etc/shadow /etc/ssh /var /srv /opt {tmp_path} /sys/class /proc/1/root"
        )
        assert seen.stdout.strip() in ("", "/proc/1/root:")
        assert (await sh(channel, "hostname; ls /sys; cat /proc/net/dev | wc -l")).stdout.split()[0] == "sandbox"
        assert "lo" in (await sh(channel, "cat /proc/net/dev")).stdout
        assert (await sh(channel, "cat /proc/net/dev | wc -l")).stdout.strip() == "3", "two lines of heading, and lo"
        processes = (await sh(channel, "ls -d /proc/[0-9]* | wc -l")).stdout
        assert int(processes) < 10
        command_lines = (await sh(channel, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        assert str(paths.runtime_root()) not in command_lines, "no path of the host's shows"
        environment = (await sh(channel, "env")).stdout
        assert "PYTEST" not in environment
        assert "AGENTKIT_RUNTIME" not in environment

    async def test_only_its_own_directories_are_writable(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        for place in ("/", "/usr", "/etc", "/run", "/run/agentkit", "/dev", "/sys/fs/cgroup", "/proc/sys/kernel"):
            assert (await sh(channel, f"touch {place}/x")).exit_code != 0, place
        for place in ("/workspace", "/tmp", "/dev/shm"):
            assert (await sh(channel, f"touch {place}/x && rm {place}/x")).exit_code == 0, place
        assert (await sh(channel, "echo 1 > /proc/sys/kernel/panic")).exit_code != 0
        assert (await sh(channel, "cat /proc/keys /proc/timer_list; true")).stdout == ""

    async def test_no_descriptor_reaches_the_host(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        links = (await sh(channel, "ls -l /proc/self/fd | grep -o '> .*'")).stdout.splitlines()
        assert all(link.startswith(("> /dev/null", "> pipe:", "> /proc/")) for link in links), links

    async def test_calls_into_the_kernel_are_refused(self, backend: WatchedLocal) -> None:
        require(seccomp.program() is not None, "run it on x86_64 or aarch64")
        script = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), ctypes.get_errno())
print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), ctypes.get_errno())
print(libc.setns(0, 0), ctypes.get_errno())
for family in (38, 40):
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == 38 else socket.SOCK_STREAM)
    except OSError as error:
        print(-1, error.errno)
import os, subprocess, threading
thread = threading.Thread(target=print, args=("threads",)); thread.start(); thread.join()
print(subprocess.check_output(["echo", "children"]).decode().strip())
"""
        _, channel = await make(backend)
        result = await channel.exec(ExecRequest(("/usr/bin/python3", "-c", script), 60, 1 << 16, "/"))
        assert result.stdout.split() == ["-1", "1"] * 5 + ["threads", "children"], result.stderr

    async def test_connections_pass_the_allow_list(self, backend: WatchedLocal) -> None:
        spec = SPEC.model_copy(update={"network": Network.allow(domains=("example.org",))})
        _, channel = await make(backend, spec)
        script = """
import urllib.error, urllib.request
try:
    urllib.request.urlopen("http://example.com/", timeout=50)
except urllib.error.HTTPError as error:
    print(error.code)
"""
        result = await channel.exec(ExecRequest(("/usr/bin/python3", "-c", script), 60, 1 << 16, "/"))
        assert result.stdout == "403\n", result.stderr
        assert (await sh(channel, "cat /proc/net/dev | wc -l")).stdout.strip() == "3"

    async def test_mounts(self, backend: WatchedLocal, tmp_path: Path) -> None:
        for name in ("in", "out"):
            (tmp_path / name).mkdir()
            (tmp_path / name).chmod(0o777)
        (tmp_path / "in" / "data").write_text("data")
        for parent in (tmp_path, *tmp_path.parents[:2]):
            parent.chmod(0o755)
        mounts = (
            Mount(source=str(tmp_path / "in"), target="/data/in"),
            Mount(source=str(tmp_path / "out"), target="/data/out", read_only=False),
        )
        _, channel = await make(backend, SPEC.model_copy(update={"mounts": mounts}))
        assert (await sh(channel, "cat /data/in/data; echo x > /data/in/x; echo done > /data/out/x")).stdout == "data"
        assert not (tmp_path / "in" / "x").exists()
        assert (tmp_path / "out" / "x").read_text() == "done\n"


class TestLimits:
    async def test_memory(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        hog = "x = bytearray(200 << 20); print(len(x))"
        result = await channel.exec(ExecRequest(("/usr/bin/python3", "-c", hog), 60, 1 << 16, "/"))
        assert result.exit_code not in (0, None)
        if backend._cgroups is not None:
            assert (result.oom_killed, result.exit_code) == (True, 137)
        assert (await sh(channel, "echo alive")).stdout == "alive\n"

    async def test_processes(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        await sh(channel, "i=0; while [ $i -lt 100 ]; do sleep 30 & i=$((i + 1)); done", timeout=3)
        stats = await channel.stats()
        assert stats.processes is None or stats.processes <= SPEC.resources.pids

    async def test_disk(self, backend: WatchedLocal) -> None:
        _, channel = await make(backend)
        for place, size in (("/workspace", 4 << 20), ("/dev/shm", 1 << 20), ("/tmp", 8 << 20)):
            result = await sh(channel, f"head -c 20000000 /dev/zero > {place}/x; stat -c %s {place}/x; rm {place}/x")
            assert 0 < int(result.stdout) <= size, place
        assert (await channel.stats()).workspace_size == 4 << 20

    async def test_open_files(self, backend: WatchedLocal) -> None:
        spec = SPEC.model_copy(update={"resources": SPEC.resources.model_copy(update={"nofile": 80})})
        _, channel = await make(backend, spec)
        assert (await sh(channel, "ulimit -Hn; ulimit -Sn; ulimit -Hc")).stdout.split() == ["80", "80", "0"]

    async def test_pausing_without_control_groups(self, backend: WatchedLocal) -> None:
        backend._cgroups = None
        id, channel = await make(backend)
        assert channel.isolation.endswith(" without control groups")
        await sh(channel, "(while :; do date +%s%N > /workspace/t; done) > /dev/null 2>&1 &")
        await backend.pause(id)
        assert (await backend.inspect(id)).state == "paused"
        with pytest.raises(asyncio.TimeoutError):
            await channel.ping(0.3)
        await backend.resume(id)
        assert await channel.ping(30) < 30
        before = await channel.read("/workspace/t", 100)
        deadline = time.monotonic() + 30
        while await channel.read("/workspace/t", 100) in (before, b""):
            assert time.monotonic() < deadline
        await backend.pause(id)  # and is removed so


class TestLife:
    async def test_another_process_sees_and_uses_it(self, backend: WatchedLocal) -> None:
        id, channel = await make(backend)
        await channel.write("/workspace/note", b"from the owner", 0o644)
        script = f"""
import asyncio
from agentkit.sandboxes.backends.local.backend import LocalBackend
async def main():
    backend = LocalBackend()
    await backend.start()
    assert [seen.id for seen in await backend.list({{"agentkit.id": {id!r}}})] == [{id!r}]
    spec, channel = await backend.attach({id!r})
    print((await channel.read("/workspace/note", 100)).decode(), spec.digest)
    await channel.close()
    await backend.close()
asyncio.run(main())
"""
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 100)
        assert out.decode().split() == ["from", "the", "owner", SPEC.digest]
        assert (await sh(channel, "echo alive")).stdout == "alive\n"

    async def test_it_ends_with_its_owner_without_a_reaper(self, backend: WatchedLocal) -> None:
        script = f"""
import asyncio
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes import paths, SandboxSpec
async def main():
    backend = LocalBackend({backend._levels[0]!r})
    await backend.start()
    id = paths.new_id()
    await backend.create(id, SandboxSpec(), {{}})
    print(id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
        assert owner.stdout is not None
        id = (await asyncio.wait_for(owner.stdout.readline(), 100)).decode().strip()
        backend.asked.add(id)
        state = local_state.load(id)
        assert state is not None
        assert state.runs
        owner.kill()
        await owner.wait()
        deadline = time.monotonic() + 60
        while state.runs:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert (await backend.inspect(id)).state == "exited"
        with pytest.raises(SandboxLost):
            await backend.attach(id)

    async def test_it_outlives_the_thread_that_made_it(self, backend: WatchedLocal) -> None:
        """The kernel kills the process with the thread that started it, so that thread must be permanent."""
        made: list[str] = []

        def work() -> None:
            async def main() -> None:
                own = LocalBackend(backend._levels[0])
                await own.start()
                made.append((await make(own))[0])
                await own.close()

            asyncio.run(main())

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        backend.asked.update(made)
        _, channel = await backend.attach(made[0])
        assert (await sh(channel, "echo alive")).stdout == "alive\n"
        await channel.close()

    async def test_a_cancelled_start_leaves_nothing(self, backend: WatchedLocal) -> None:
        for step in range(12):
            task = asyncio.ensure_future(make(backend))
            await asyncio.sleep(step * 0.012)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                id, _ = await task
                await backend.remove(id)
            assert backend.left() == []

    async def test_a_failed_start_reports_the_cause_and_leaves_nothing(self, backend: WatchedLocal) -> None:
        spec = SPEC.model_copy(update={"workdir": "/usr/not-there/deeper"})
        with pytest.raises(StartTimeout, match=r"usr/not-there|Read-only|read-only"):
            await make(backend, spec)
        assert backend.left() == []

    async def test_without_its_filter_no_sandbox_starts(
        self, backend: WatchedLocal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(seccomp, "program", lambda **_: bytes(8))  # which no kernel takes
        with pytest.raises(StartTimeout, match="refuses a system call filter"):
            await make(backend)
        assert backend.left() == []

    async def test_the_exit_is_recorded(self, backend: WatchedLocal) -> None:
        id, channel = await make(backend)
        state = local_state.load(id)
        assert state is not None
        events = backend.events()
        following = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.2)
        os.kill(state.processes[-1].pid, signal.SIGKILL)
        event = await asyncio.wait_for(following, 60)
        assert (event.id, event.kind, event.exit_code) == (id, "died", 137)
        assert await asyncio.wait_for(channel.lost, 60)
        seen = await backend.inspect(id)
        assert (seen.state, seen.exit_code) == ("exited", 137)
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]


class TestRefusals:
    @pytest.mark.parametrize(
        "changed",
        [
            {"network": Network.bridge()},
            {"runtime": "runsc"},
            {"cap_add": ("SYS_PTRACE",)},
            {"readonly_root": False},
            {"resources": Resources(gpus=1)},
            {"resources": Resources(cpus=1e6)},
            {"workdir": "/proc/x"},
            {"mounts": (Mount(source="/etc", target="/proc/x"),)},
            {"mounts": (Mount(source="/var/run/docker.sock", target="/x"),)},
            {"mounts": (Mount(source="/run", target="/x"),)},
        ],
    )
    @pytest.mark.parametrize("level", LEVELS)
    def test_unsupported_specifications_are_refused(self, level: str, changed: dict[str, object]) -> None:
        backend = LocalBackend(level)  # pyright: ignore[reportArgumentType]
        backend.check(SPEC)
        with pytest.raises(UnsupportedFeature):
            backend.check(SPEC.model_copy(update=changed))

    def test_mounts_of_agentkits_sockets_are_refused(self) -> None:
        with pytest.raises(UnsupportedFeature):
            LocalBackend().check(
                SPEC.model_copy(update={"mounts": (Mount(source=str(paths.runtime_root()), target="/x"),)})
            )

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a sandbox root outside")
    def test_user_0_is_refused_for_root(self) -> None:
        with pytest.raises(UnsupportedFeature, match="root"):
            LocalBackend().check(SPEC.model_copy(update={"user": "0:0"}))

    def test_rlimits_refuses_what_it_cannot_isolate(self) -> None:
        with pytest.raises(UnsupportedFeature, match=r"rlimits.*network=none.*readonly_root.*user"):
            LocalBackend("rlimits").check(SPEC.model_copy(update={"user": "7:7"}))

    async def test_it_must_be_started(self) -> None:
        with pytest.raises(EngineUnavailable, match="start"):
            await make(LocalBackend())

    def test_an_unknown_isolation_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="rlimits"):
            LocalBackend("chroot")  # pyright: ignore[reportArgumentType]


class TestLimitsAlone:
    @pytest.fixture
    def spec(self, tmp_path: Path) -> SandboxSpec:
        return SandboxSpec(
            network=Network.bridge(),
            readonly_root=False,
            user=f"{os.geteuid()}:{os.getegid()}",
            workdir=str(tmp_path / "work"),
        )

    async def test_it_works_and_reports_its_isolation(self, spec: SandboxSpec, tmp_path: Path) -> None:
        async with started("rlimits") as backend:
            id, channel = await make(backend, spec)
            assert channel.isolation.startswith("rlimits")
            assert (await sh(channel, "pwd; ulimit -Hc", cwd=spec.workdir)).stdout.split() == [spec.workdir, "0"]
            await channel.write(f"{spec.workdir}/note", b"x", 0o644)
            snapshot = await backend.snapshot(id, "limits-alone")
            channel = await backend.restart(id)
            assert await channel.list(spec.workdir) == []
            await backend.restore(id, snapshot)
            assert await channel.read(f"{spec.workdir}/note", 10) == b"x"
            await backend.discard(snapshot)
        assert "work" not in os.listdir(tmp_path)

    async def test_the_whole_process_tree_ends(self, spec: SandboxSpec) -> None:
        async with started("rlimits") as backend:
            backend._cgroups = None
            id, channel = await make(backend, spec)
            result = await sh(channel, "setsid sleep 600 > /dev/null 2>&1 & (sleep 600 > /dev/null 2>&1 &) ; echo $$")
            state = local_state.load(id)
            assert state is not None
            assert result.exit_code == 0
            running = local_processes.running(state)
            assert len(running) == 3
            await backend.remove(id)
            assert not any(process.runs for process in running)

    async def test_an_existing_working_directory_is_refused(self, spec: SandboxSpec) -> None:
        os.makedirs(f"{spec.workdir}/mine")
        async with started("rlimits") as backend:
            with pytest.raises(SandboxError, match="must be new"):
                await make(backend, spec)
        assert os.listdir(spec.workdir) == ["mine"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
@pytest.mark.parametrize("level", LEVELS)
def test_a_user_without_rights_can_have_sandboxes(level: str) -> None:
    script = f"""
import asyncio, sys
sys.path[:0] = {[path for path in sys.path if path]!r}
try:
    import __editable___agentkit_rl_0_1_0_finder as finder
    finder.install()
except ImportError:
    pass  # not an editable installation
from agentkit.sandboxes import SandboxSpec, paths
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.types import ExecRequest
async def main():
    backend = LocalBackend({level!r})
    await backend.start()
    id = paths.new_id()
    channel = await backend.create(id, SandboxSpec(), {{}})
    result = await channel.exec(ExecRequest(("/bin/sh", "-c", "id -u; touch x && echo written"), 60, 99, "/workspace"))
    await backend.pause(id)
    await backend.resume(id)
    await channel.ping(60)
    attack = ("/usr/bin/python3", "-c", {Path(attacks.__file__).read_text()!r}, "1")
    tried = (await channel.exec(ExecRequest(attack, 60, 1 << 16, "/"))).stdout.splitlines()
    await channel.exec(ExecRequest(("/bin/sh", "-c", "kill -9 -1"), 60, 99, "/"))
    await channel.exec(ExecRequest(("true",), 60, 99, "/"))
    worked = [line for line in tried if not line.endswith(": refused")]
    await backend.remove(id)
    await backend.close()
    print(channel.isolation, *result.stdout.split(), worked, await backend.list({{}}), sep="; ")
asyncio.run(main())
"""
    run = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "/usr/bin/python3", "-c", script]
    probe = subprocess.run([*run[:5], "-c", f"import sys; sys.path[:0]={sys.path!r}; import pydantic"],
                           capture_output=True, timeout=60, check=False)  # fmt: skip
    require(probe.returncode == 0, "make the installation readable for other users")
    with tempfile.TemporaryDirectory() as home:  # pytest's own directories are for root alone
        os.chown(home, 1234, 1234)
        environment = {"PATH": os.environ["PATH"], "AGENTKIT_RUNTIME_DIR": f"{home}/runtime"}
        result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("; ")[1:] == ["65534", "written", "['signals: sent']", "[]\n"]


class TestPure:
    def test_limits_of_both_versions(self) -> None:
        resources = Resources(cpus=1.5, memory=1 << 30, pids=99)
        assert cgroup.limits(resources, unified=True) == [
            ("memory", "memory.max", "1073741824"),
            ("memory", "memory.swap.max", "0"),
            ("pids", "pids.max", "99"),
            ("cpu", "cpu.max", "150000 100000"),
        ]
        old = {file: value for _, file, value in cgroup.limits(resources, unified=False)}
        assert old["memory.limit_in_bytes"] == old["memory.memsw.limit_in_bytes"] == "1073741824"
        assert old["cpu.cfs_quota_us"] == "150000"

    def test_filters(self) -> None:
        for machine in ("x86_64", "aarch64"):
            code = seccomp.program(machine)
            assert code is not None
            assert len(code) % 8 == 0
            assert len(code) // 8 < 4096
        assert seccomp.program("pdp11") is None

    def test_capabilities_allow_their_system_calls(self) -> None:
        def size(*capabilities: str) -> int:
            code = seccomp.program("x86_64", capabilities)
            assert code is not None
            return len(code)

        assert size("ALL") < size("SYS_ADMIN", "SYS_TIME") < size("SYS_ADMIN") < size("SYS_TIME") < size()
        assert size("CHOWN") == size()

    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            ("running", "running", []),
            ("running", "exited", ["died"]),
            ("running", "paused", ["paused"]),
            ("paused", "running", ["resumed"]),
            ("paused", "exited", ["died"]),
            ("running", None, ["died", "removed"]),
            ("exited", None, ["removed"]),
            (None, "running", []),
            (None, "exited", ["died"]),
        ],
    )
    def test_events_between_two_observations(self, before: str | None, now: str | None, expected: list[str]) -> None:
        def observation(state: str | None, ooms: int = 0) -> dict[str, tuple[Observed, int]]:
            return {} if state is None else {"box": (Observed("box", state, {}), ooms)}  # pyright: ignore[reportArgumentType]

        assert [event.kind for event in changes(observation(before), observation(now))] == expected
        assert list(changes(observation("running"), observation("running", 1))) == [BackendEvent("box", "oom")]
