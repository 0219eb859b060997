"""Conformance tests of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agentkit.errors import DiskFull, FileTooLarge, PathError
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.files import DEPTH_LIMIT
from agentkit.sandboxes.testing.conformance.fixtures import SandboxFixtures


class FilesConformance(SandboxFixtures):
    """Tests of ``Sandbox.files``."""

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 3, "grüße\n".encode(), b"z" * (4 << 20)])
    async def test_written_data_is_read_back(self, box: Sandbox, data: bytes) -> None:
        await box.files.write("a.bin", data)
        assert await box.files.read("a.bin") == data
        assert (await box.exec("wc -c < a.bin")).stdout.strip() == str(len(data))

    async def test_text(self, box: Sandbox) -> None:
        await box.files.write("a.txt", "grüße")
        assert await box.files.read_text("a.txt") == "grüße"
        await box.files.write("a.txt", b"\xff!")
        assert await box.files.read_text("a.txt") == "�!"

    @pytest.mark.parametrize("name", ["two words", "new\nline", "ünï", "-dash", "a'b\"c", "$HOME", "*"])
    async def test_strange_names(self, box: Sandbox, name: str) -> None:
        await box.files.write(name, "x")
        assert [info.path for info in await box.files.list()] == [f"{box.spec.workdir}/{name}"]
        assert await box.files.read(name) == b"x"
        await box.files.remove(name)
        assert not await box.files.exists(name)

    async def test_commands_and_calls_see_the_same_files(self, box: Sandbox) -> None:
        await box.exec("mkdir d; echo from inside > d/f")
        assert await box.files.read_text("d/f") == "from inside\n"
        await box.files.write("d/g", "from outside")
        assert (await box.exec("cat d/g")).stdout == "from outside"

    async def test_relative_paths_begin_at_the_working_directory(self, box: Sandbox) -> None:
        await box.files.write("x", "1")
        assert await box.files.read(f"{box.spec.workdir}/x") == b"1"
        await box.files.write("../tmp/y", "2")
        assert await box.files.read("/tmp/y") == b"2"

    async def test_parents_are_made_and_content_is_replaced(self, box: Sandbox) -> None:
        await box.files.write("a/b/c", "long content")
        await box.files.write("a/b/c", "short")
        assert await box.files.read("a/b/c") == b"short"

    async def test_a_mode_makes_a_program(self, box: Sandbox) -> None:
        await box.files.write("run", "#!/bin/sh\necho ran $1\n", mode=0o755)
        assert (await box.exec(["./run", "it"])).stdout == "ran it\n"
        info = await box.files.stat("run")
        assert info is not None
        assert info.mode & 0o777 == 0o755

    @pytest.mark.parametrize("path", ["missing", "missing/deeper", "/etc/passwd/x"])
    async def test_missing_paths(self, box: Sandbox, path: str) -> None:
        with pytest.raises(PathError):
            await box.files.read(path)
        with pytest.raises(PathError):
            await box.files.list(path)
        assert await box.files.stat(path) is None
        await box.files.remove("missing")

    @pytest.mark.parametrize("path", ["", "a\0b"])
    async def test_invalid_paths_are_refused(self, box: Sandbox, path: str) -> None:
        with pytest.raises(PathError):
            await box.files.read(path)

    async def test_only_regular_files_are_read(self, box: Sandbox) -> None:
        await box.exec("mkfifo pipe; mkdir directory", check=True)
        for path in ("pipe", "directory", "/dev/zero", "/dev/null"):
            with pytest.raises(PathError):
                await box.files.read(path)
        with pytest.raises(PathError):
            await box.files.write("directory", "x")
        with pytest.raises(PathError):
            await box.files.list("/etc/passwd")

    async def test_a_limit_is_kept(self, box: Sandbox) -> None:
        await box.files.write("big", b"x" * 1001)
        with pytest.raises(FileTooLarge):
            await box.files.read("big", limit=1000)
        assert len(await box.files.read("big", limit=1001)) == 1001

    async def test_a_directory_is_listed_by_name(self, box: Sandbox) -> None:
        await box.exec("mkdir d d/sub; printf abc > d/file; ln -s /etc/passwd d/link; mkfifo d/pipe", check=True)
        found = {info.path.rpartition("/")[2]: info for info in await box.files.list("d")}
        assert list(found) == ["file", "link", "pipe", "sub"]
        assert [info.kind for info in found.values()] == ["file", "symlink", "other", "directory"]
        assert found["file"].size == 3
        assert await box.files.list("d/sub") == []

    async def test_links_are_seen_not_followed(self, box: Sandbox) -> None:
        await box.exec("ln -s nowhere broken; ln -s . here", check=True)
        broken = await box.files.stat("broken")
        assert broken is not None
        assert broken.kind == "symlink"
        await box.files.remove("here")
        assert await box.files.exists(box.spec.workdir)
        assert not await box.files.exists("here")

    async def test_removing(self, box: Sandbox) -> None:
        await box.exec("mkdir -p d/e; touch d/f d/e/g", check=True)
        await box.files.remove("d/f")
        assert [info.path for info in await box.files.list("d")] == [f"{box.spec.workdir}/d/e"]
        await box.files.remove("d")
        assert not await box.files.exists("d")
        await box.files.remove("d")

    async def test_making_directories(self, box: Sandbox) -> None:
        await box.files.mkdir("a/b/c")
        await box.files.mkdir("a/b/c")
        info = await box.files.stat("a/b/c")
        assert info is not None
        assert info.kind == "directory"
        await box.files.write("file", "")
        with pytest.raises(PathError):
            await box.files.mkdir("file")

    async def test_the_root_is_read_only(self, box: Sandbox) -> None:
        with pytest.raises(PathError):
            await box.files.write("/etc/new", "x")
        with pytest.raises(PathError):
            await box.files.mkdir("/usr/new")
        assert (await box.exec("touch /etc/new")).exit_code not in (0, None)

    async def test_a_full_disk(self, box: Sandbox) -> None:
        size = box.spec.resources.workspace
        await box.files.write("keep", "before")
        with pytest.raises(DiskFull):
            await box.files.write("keep", b"x" * (size + 1))
        assert await box.files.read("keep") == b"before"
        result = await box.exec(f"head -c {2 * size} /dev/zero > fill")
        assert not result.ok
        assert (await box.exec("echo usable")).stdout == "usable\n"
        await box.files.remove("fill")
        await box.files.write("after", "x")

    async def test_directories_go_in_and_out(self, box: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "empty").mkdir(parents=True)
        (source / "sub" / "deep").mkdir(parents=True)
        (source / "sub" / "deep" / "b.bin").write_bytes(bytes(range(256)))
        (source / "run.sh").write_text("#!/bin/sh\necho hi\n")
        (source / "run.sh").chmod(0o755)
        await box.files.upload(source, "copy")
        assert (await box.exec(["./copy/run.sh"])).stdout == "hi\n"
        assert await box.files.download("copy", tmp_path / "back") == []
        found = {path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*")}
        assert found == {"empty", "sub", "sub/deep", "sub/deep/b.bin", "run.sh"}
        assert (tmp_path / "back/sub/deep/b.bin").read_bytes() == bytes(range(256))
        assert (tmp_path / "back/run.sh").stat().st_mode & stat.S_IXUSR

    async def test_a_file_goes_in_and_out(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "in").write_bytes(b"\0\1")
        await box.files.upload(tmp_path / "in", "deep/copy")
        (tmp_path / "target").write_text("in the host's own file")
        (tmp_path / "out").symlink_to(tmp_path / "target")
        await box.files.download("deep/copy", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == b"\0\1"
        assert (tmp_path / "target").read_text() == "in the host's own file"
        assert sorted(os.listdir(tmp_path)) == ["in", "out", "target"]

    async def test_downloads_skip_links_and_pipes(self, box: Sandbox, tmp_path: Path) -> None:
        await box.exec("mkdir d; ln -s /etc/passwd d/link; mkfifo d/pipe; echo x > d/file", check=True)
        left_out = await box.files.download("d", tmp_path / "out")
        assert [path.rpartition("/")[2] for path in left_out] == ["link", "pipe"]
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
        with pytest.raises(PathError):
            await box.files.download("d/pipe", tmp_path / "pipe")
        with pytest.raises(FileTooLarge):
            await box.files.download("d", tmp_path / "small", limit=1)

    async def test_trees_that_are_too_deep_are_refused_at_once(self, box: Sandbox, tmp_path: Path) -> None:
        deep = "/".join(["d"] * (DEPTH_LIMIT + 5))
        await box.files.write(f"tree/{deep}/file", "x")
        with pytest.raises(FileTooLarge, match="deep"):
            await box.files.download("tree", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        (tmp_path / "in" / deep).mkdir(parents=True)
        with pytest.raises(FileTooLarge, match="deep"):
            await box.files.upload(tmp_path / "in", "copy")
        assert not await box.files.exists("copy")
        # A tree of exactly the allowed depth goes both ways.
        inner = "/".join(["d"] * (DEPTH_LIMIT - 2))
        await box.files.write(f"fits/{inner}/file", "x")
        await box.files.download("fits", tmp_path / "fits")
        assert (tmp_path / "fits" / inner / "file").read_text() == "x"
        await box.files.upload(tmp_path / "fits", "again")
        assert await box.files.read(f"again/{inner}/file") == b"x"
