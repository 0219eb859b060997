"""Files through a real agent: writes are atomic, only regular files are read, and no operation hangs."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess

import pytest
from agent_harness import eventually, local_agent, sh

from agentkit.errors import DiskFull, FileTooLarge, PathError, SandboxError


@pytest.fixture
async def agent(tmp_path_factory):
    async with local_agent(tmp_path_factory.mktemp("agent")) as agent:
        yield agent


async def test_write_and_read(agent, tmp_path):
    path = str(tmp_path / "new" / "deep" / "né\nme")
    for data in (b"", b"x", os.urandom(3_000_000)):
        await agent.channel.write(path, data, 0o640)
        assert await agent.channel.read(path, 3_000_000) == data
    assert os.stat(path).st_mode & 0o7777 == 0o640
    assert os.listdir(tmp_path / "new" / "deep") == ["né\nme"]


async def test_the_limit_of_a_read(agent, tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(FileTooLarge):
        await agent.channel.read(str(path), 1000)
    path.write_bytes(b"x" * 1000)
    assert await agent.channel.read(str(path), 1000) == b"x" * 1000
    with pytest.raises(FileTooLarge):
        await agent.channel.read(str(path), 999)
    # Files of /proc say that they are empty.
    with pytest.raises(FileTooLarge):
        await agent.channel.read("/proc/cpuinfo", 10)


async def test_only_regular_files(agent, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("fifo", "link", "directory", "socket", "missing"):
            with pytest.raises(PathError):
                await asyncio.wait_for(agent.channel.read(str(tmp_path / name), 1000), 30)
        for name in ("fifo", "link", "directory", "socket"):
            with pytest.raises(PathError):
                await asyncio.wait_for(agent.channel.write(str(tmp_path / name), b"x", 0o644), 30)
    for path in ("/dev/zero", "/dev/null"):
        with pytest.raises(PathError):
            await agent.channel.read(path, 1000)
    with pytest.raises(PathError):
        await agent.channel.write("/proc/nothing/file", b"", 0o644)


async def test_list_and_stat(agent, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "file").chmod(0o751)
    os.utime(tmp_path / "file", (1, 1_700_000_000.25))
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "odd\nname \udcff").touch()
    entries = await agent.channel.list(str(tmp_path))
    assert [entry.path for entry in entries] == sorted(str(tmp_path / name) for name in os.listdir(tmp_path))
    kinds = {os.path.basename(entry.path): entry.kind for entry in entries}
    assert [kinds[name] for name in ("file", "directory", "link", "fifo")] == ["file", "directory", "symlink", "other"]
    file = await agent.channel.stat(str(tmp_path / "file"))
    assert file is not None
    assert (file.path, file.kind, file.size, file.mode, file.modified) == (
        str(tmp_path / "file"), "file", 5, 0o751, pytest.approx(1_700_000_000.25),
    )  # fmt: skip
    assert await agent.channel.stat(str(tmp_path / "missing")) is None
    assert await agent.channel.stat(str(tmp_path / "file" / "below")) is None
    with pytest.raises(PathError):
        await agent.channel.list(str(tmp_path / "missing"))
    with pytest.raises(PathError):
        await agent.channel.list(str(tmp_path / "file"))


async def test_a_large_directory(agent, tmp_path):
    for number in range(2000):
        (tmp_path / f"{number:04d}{'x' * 200}").touch()
    assert len(await agent.channel.list(str(tmp_path))) == 2000


async def test_make_and_remove(agent, tmp_path):
    await agent.channel.mkdir(str(tmp_path / "a" / "b"))
    await agent.channel.mkdir(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "file").touch()
    with pytest.raises(PathError):
        await agent.channel.mkdir(str(tmp_path / "a" / "file"))
    with pytest.raises(PathError):
        await agent.channel.mkdir(str(tmp_path / "a" / "file" / "below"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    (tmp_path / "a" / "link").symlink_to(outside)
    (tmp_path / "a" / "closed").mkdir()
    (tmp_path / "a" / "closed" / "in").touch()
    (tmp_path / "a" / "closed").chmod(0)
    await agent.channel.remove(str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    assert (outside / "keep").exists()
    await agent.channel.remove(str(tmp_path / "a"))
    await agent.channel.remove(str(tmp_path / "no" / "such"))


async def test_a_directory_deeper_than_any_path(agent, tmp_path):
    script = "import os\nfor i in range(60):\n os.mkdir('d' * 100); os.chdir('d' * 100)"
    assert (await agent.channel.exec(sh(f'python3 -c "{script}"', cwd=str(tmp_path)))).ok
    await agent.channel.remove(str(tmp_path / ("d" * 100)))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield place
    subprocess.run(["umount", place], check=True)


async def test_a_full_disk(agent, small_disk):
    path = str(small_disk / "file")
    await agent.channel.write(path, b"before", 0o644)
    with pytest.raises(DiskFull):
        await agent.channel.write(path, b"x" * (2 << 20), 0o644)
    assert await agent.channel.read(path, 100) == b"before"
    assert os.listdir(small_disk) == ["file"]


async def test_a_cancelled_write_leaves_nothing(agent, tmp_path):
    path = tmp_path / "fifo-like"
    task = asyncio.ensure_future(agent.channel.write(str(path), b"x" * (200 << 20), 0o644))
    await eventually(lambda: os.listdir(tmp_path))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(tmp_path) in ([], ["fifo-like"])
    assert (await agent.channel.exec(sh("true"))).ok


def _tree(*roots):
    """Return every path below, with its kind, permissions, size and target."""
    return sorted(subprocess.check_output(["find", *roots, "-printf", "%p %y %m %s %l\n"]).split(b"\n"))


async def test_pack_and_unpack(agent, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "sub").mkdir(parents=True)
    second.mkdir()
    (first / "sub" / "file é").write_bytes(os.urandom(1_000_000))
    (first / "sub" / "file é").chmod(0o600)
    (first / "link").symlink_to("/etc/passwd")
    (first / "closed").mkdir(mode=0o500)
    os.mkfifo(first / "fifo")
    (second / "x").write_text("x")
    before = _tree(first, second)
    content = (first / "sub" / "file é").read_bytes()
    pieces = [piece async for piece in agent.channel.pack([str(first), str(second)])]
    (first / "sub" / "file é").write_text("changed")
    (first / "more").mkdir()
    shutil.rmtree(second)
    second.mkdir()

    async def archive():
        for piece in pieces:
            yield piece

    await agent.channel.unpack([str(first), str(second)], archive())
    assert _tree(first, second) == before
    assert (first / "sub" / "file é").read_bytes() == content

    with pytest.raises(SandboxError):
        await agent.channel.unpack([str(second)], archive())
    with pytest.raises(PathError):
        [piece async for piece in agent.channel.pack([str(tmp_path / "missing")])]
