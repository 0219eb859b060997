"""Requests that create containers: the hardening, and the fields that weaken it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes.backends.docker import options
from agentkit.sandboxes.spec import Mount, Network, Resources, SandboxSpec


def body(spec: SandboxSpec | None = None, volumes: tuple[str, ...] = ()) -> dict[str, Any]:
    return options.container(spec or SandboxSpec(), "sha256:1", "/run/x/ak-1", {"a": "b"}, "bundle", volumes)


def test_everything_is_hardened_by_default() -> None:
    made = body()
    host = made["HostConfig"]
    assert made["User"] == "65534:65534"
    assert made["WorkingDir"] == "/"
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["NetworkMode"], host["IpcMode"]) == ("none", "private")
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert (host["PidsLimit"], host["NanoCpus"], host["Init"]) == (256, 10**9, False)
    assert host["OomScoreAdj"] > 0
    assert {"Name": "core", "Soft": 0, "Hard": 0} in host["Ulimits"]
    assert host["LogConfig"]["Config"] == {"max-size": "1m", "max-file": "2"}
    assert host["Mounts"] == [
        {"Type": "bind", "Source": "/run/x/ak-1", "Target": "/run/agentkit", "ReadOnly": True},
        {
            "Type": "volume", "Source": "bundle", "Target": "/agentkit", "ReadOnly": True,
            "VolumeOptions": {"NoCopy": True},
        },
    ]  # fmt: skip
    assert not {"PidMode", "Binds", "Devices", "PortBindings", "Runtime"} & host.keys()
    json.dumps(made)


def test_writable_directories_are_bounded() -> None:
    made = body()["HostConfig"]["Tmpfs"]
    assert made.keys() == {"/tmp", "/workspace"}
    for text in made.values():
        assert {"nosuid", "nodev", "uid=65534", "gid=65534"} <= set(text.split(","))
    assert f"size={128 << 20}" in made["/tmp"]
    assert f"size={256 << 20}" in made["/workspace"]


def test_a_size_of_zero_is_not_unlimited() -> None:
    spec = SandboxSpec(resources=Resources(tmp=0, workspace=0, shm=0))
    host = body(spec)["HostConfig"]
    assert host["ShmSize"] > 0
    assert all("size=4096" in text.split(",") for text in host["Tmpfs"].values())


def test_each_field_loosens_what_it_names() -> None:
    spec = SandboxSpec(
        user="0:0",
        network=Network.bridge(),
        readonly_root=False,
        cap_add=("CAP_CHOWN", "setuid"),
        mounts=(Mount(source="/srv/data", target="/data"),),
        runtime="runsc",
        resources=Resources(gpus=2, cpus=0.5),
    )
    host = body(spec)["HostConfig"]
    assert host["NetworkMode"] == "bridge"
    assert host["ReadonlyRootfs"] is False
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], ["CHOWN", "SETUID"])
    assert host["Runtime"] == "runsc"
    assert host["DeviceRequests"] == [{"Count": 2, "Capabilities": [["gpu"]]}]
    assert host["NanoCpus"] == 5 * 10**8
    assert host["Mounts"][2] == {"Type": "bind", "Source": "/srv/data", "Target": "/data", "ReadOnly": True}
    assert host["SecurityOpt"] == ["no-new-privileges"]


def test_an_allow_list_uses_no_network_of_the_engine() -> None:
    assert body(SandboxSpec(network=Network.allow(domains=("pypi.org",))))["HostConfig"]["NetworkMode"] == "none"


def test_volumes_of_an_image_are_read_only_unless_the_root_is_not() -> None:
    mounts = body(volumes=("/data/", "/tmp", "/workspace"))["HostConfig"]["Mounts"]
    assert [(mount["Type"], mount["Target"], mount["ReadOnly"]) for mount in mounts[2:]] == [("tmpfs", "/data", True)]
    assert mounts[2]["TmpfsOptions"]["SizeBytes"] > 0
    assert len(body(SandboxSpec(readonly_root=False), ("/data",))["HostConfig"]["Mounts"]) == 2


def test_loader_variables_of_an_image_do_not_reach_the_agent() -> None:
    environment = ("PATH=/bin", "LD_PRELOAD=/x=y.so", "GLIBC_TUNABLES=a", "LD_BROKEN", "OLD_PATH=1")
    made = options.container(SandboxSpec(), "sha256:1", "/run/x/ak-1", {}, "bundle", (), environment)
    assert made["Env"] == ["HOME=/tmp", "LD_PRELOAD=", "GLIBC_TUNABLES="]
    assert options.loader_variables(environment) == {"LD_PRELOAD": "/x=y.so", "GLIBC_TUNABLES": "a"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"runtime": "runsc"}, "runc"),
        ({"resources": Resources(cpus=64)}, "cpus"),
        ({"workdir": "/proc/self/fd/7"}, "workdir"),
        ({"workdir": "/work/../etc"}, "workdir"),
        ({"workdir": "/run/agentkit/x"}, "workdir"),
        ({"workdir": "/agentkit"}, "workdir"),
        ({"mounts": (Mount(source="/srv", target="/dev/x"),)}, "mounts"),
        ({"mounts": (Mount(source="/srv", target="/"),)}, "mounts"),
    ],
)
def test_unsupported_fields_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedFeature, match=told):
        options.check(SandboxSpec(**fields), ["runc"], 4)


def test_supported_fields_are_accepted() -> None:
    options.check(SandboxSpec(mounts=(Mount(source="/srv", target="/data"),), runtime="runc"), ["runc"], 4)


@pytest.mark.parametrize("source", ["engine/docker.sock", "engine", ".", "engine/docker.sock/x", "link"])
def test_mounts_that_show_the_engine_are_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("engine")
    secrets = {str(tmp_path / "engine/docker.sock"): "the engine's socket"}

    def mounting(source: Path) -> SandboxSpec:
        return SandboxSpec(mounts=(Mount(source=str(source), target="/data"),))

    with pytest.raises(UnsupportedFeature, match="controls the host"):
        options.check_mounts(mounting(tmp_path / source), secrets)
    options.check_mounts(mounting(tmp_path / "other"), secrets)


def test_labels_contain_the_complete_specification() -> None:
    spec = SandboxSpec(labels={"task": "7"}, env={"A": "ü\n"}, ready=("true",))
    marks = options.labels("ak-1", spec, 12.5, {"agentkit.owner": "me", "agentkit.managed": "0"})
    assert marks["agentkit.managed"] == "1"
    assert marks["agentkit.id"] == "ak-1"
    assert marks["agentkit.owner"] == "me"
    assert marks["agentkit.user.task"] == "7"
    assert options.definition(marks) == spec
    for broken in ({}, {options.DEFINITION: "{"}, {options.DEFINITION: '{"image": 3}'}, {options.DEFINITION: "null"}):
        with pytest.raises(ValueError):  # noqa: PT011  (its message is pydantic's, or json's)
            options.definition(broken)
