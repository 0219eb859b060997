"""The hardening, seen from inside a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from docker_boxes import SMALL, WatchedDocker, make, request, sh, spec

from agentkit.errors import (
    UnsupportedFeature,
)
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.spec import Mount, Network

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


async def test_the_hardening_is_visible_from_inside(docker_box: tuple[str, Channel]) -> None:
    _, channel = docker_box
    status = (await sh(channel, "cat /proc/self/status")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == fields["Gid"].split() == ["65534"] * 4
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    # No program lends rights.
    assert (await sh(channel, "find / -xdev -perm /6000 -type f")).stdout == ""
    limits = (await sh(channel, "ulimit -n; ulimit -c")).stdout.split()
    assert limits == ["4096", "0"]


async def test_only_the_tmpfs_are_writable(docker_box: tuple[str, Channel]) -> None:
    _, channel = docker_box
    script = (
        "for d in / /etc /usr /root /run /run/agentkit /var/tmp /dev /opt; do touch $d/x 2>/dev/null && echo $d; done"
    )
    assert (await sh(channel, script)).stdout == ""
    assert (await sh(channel, "cd /workspace && touch x /tmp/x /dev/shm/x && echo fine")).stdout == "fine\n"
    mounts = [line.split() for line in (await sh(channel, "cat /proc/mounts")).stdout.splitlines()]
    writable = {where for _, where, kind, options, *_ in mounts if "rw" in options.split(",") and kind != "proc"}
    assert {"/workspace", "/tmp", "/dev/shm"} <= writable
    for _, where, _, options, *_ in mounts:
        if where in ("/workspace", "/tmp", "/dev/shm"):
            assert {"nosuid", "nodev"} <= set(options.split(","))
    full = await sh(channel, "head -c 30000000 /dev/zero > /workspace/big")
    assert "No space left" in full.stderr
    assert (await sh(channel, "mknod /tmp/n c 1 3 || mount -t tmpfs x /tmp")).exit_code != 0


async def test_the_network_is_unreachable(docker_box: tuple[str, Channel]) -> None:
    _, channel = docker_box
    interfaces = (await sh(channel, "cat /proc/net/dev | tail -n +3 | cut -d: -f1")).stdout.split()
    assert interfaces == ["lo"]
    probe = "import socket; socket.create_connection(('1.1.1.1', 53), 5)"
    assert "unreachable" in (await channel.exec(request("python3", "-c", probe))).stderr


async def test_the_sandbox_sees_no_other_process_and_no_host(docker_box: tuple[str, Channel]) -> None:
    _, channel = docker_box
    names = (await sh(channel, "cat /proc/[0-9]*/comm")).stdout.split()
    assert len(names) <= 4
    assert (await sh(channel, "hostname")).stdout == "sandbox\n"
    assert not set(await _environment(channel)) & {"AGENTKIT_RUNTIME_DIR", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST"}


async def _environment(channel: Channel) -> list[str]:
    return [line.partition("=")[0] for line in (await sh(channel, "env")).stdout.splitlines()]


async def test_the_limits_hold(docker_box: tuple[str, Channel], docker_backend: WatchedDocker) -> None:
    id, channel = docker_box
    found = await docker_backend.engine.call("inspect", lambda client: client.inspect_container(id))
    assert found["HostConfig"]["MemorySwap"] == found["HostConfig"]["Memory"] == SMALL.resources.memory
    stats = await channel.stats()
    assert stats.memory_limit == SMALL.resources.memory
    assert stats.workspace_size == SMALL.resources.workspace
    bomb = await sh(channel, "i=0; while [ $i -lt 200 ]; do sleep 5 & i=$((i+1)); done; wait", timeout=60)
    assert not bomb.ok
    assert (await sh(channel, "echo alive")).stdout == "alive\n"


async def test_running_out_of_memory_in_a_command(
    docker_box: tuple[str, Channel], docker_backend: WatchedDocker
) -> None:
    id, channel = docker_box
    result = await channel.exec(request("python3", "-c", "x = bytearray(300_000_000)"))
    assert (result.exit_code, result.signal, result.oom_killed) == (137, 9, True)
    assert (await docker_backend.inspect(id)).state == "running"
    result = await sh(channel, "echo fine")
    assert (result.stdout, result.oom_killed) == ("fine\n", False)


async def test_loosened_fields_take_effect(docker_backend: WatchedDocker, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("host")
    os.chmod(tmp_path, 0o755)
    loose = spec(
        user="0:0",
        readonly_root=False,
        network=Network.bridge(),
        cap_add=("CAP_CHOWN",),
        mounts=(Mount(source=str(tmp_path), target="/data"),),
        env={"GREETING": "hé"},
        workdir="/work/here",
    )
    _, channel = await make(docker_backend, loose)
    assert (
        await sh(channel, "touch /etc/x && echo $GREETING; id -u; pwd", cwd="/work/here")
    ).stdout == "hé\n0\n/work/here\n"
    assert (await sh(channel, "ls /sys/class/net")).stdout.split() == ["eth0", "lo"]
    assert (await sh(channel, "touch /tmp/c && chown 5 /tmp/c && stat -c %u /tmp/c")).stdout == "5\n"
    assert (await sh(channel, "cat /data/data; touch /data/x")).stdout == "host"
    assert not (tmp_path / "x").exists()
    await docker_backend.clear()


async def test_mounts_of_the_engine_are_refused(docker_backend: WatchedDocker, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(docker_backend.engine.socket)
    for source in (docker_backend.engine.socket, str(tmp_path / "link"), "/", str(paths.runtime_root())):
        with pytest.raises(UnsupportedFeature, match="controls the host"):
            await make(docker_backend, spec(mounts=(Mount(source=source, target="/data"),)))
