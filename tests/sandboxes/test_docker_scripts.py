"""The shell scripts of the exec transport, run by a real shell, and how their answers are read."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from agentkit.errors import DiskFull, FileTooLarge, PathError, ProtocolError, SandboxError
from agentkit.sandboxes.backends import docker_scripts as scripts
from agentkit.sandboxes.backends.docker_scripts import End, Trailer

NONCE = "0123456789abcdef"


def sh(
    script: str, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", **(env or {})}
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *arguments], input=stdin, capture_output=True, timeout=60, env=environment
    )


def run(*argv: str, cwd: str = "/", env: dict[str, str] | None = None) -> tuple[bytes, bytes, End]:
    done = sh(scripts.RUN, NONCE, cwd, *argv, env=env)
    out, err = Trailer(NONCE), Trailer(NONCE)
    stdout, stderr = out.feed(done.stdout), err.feed(done.stderr)
    assert out.found == ()
    assert err.found is not None
    return stdout, stderr, End.parse(err.found)


def test_a_command_is_run_as_it_is(tmp_path: Path) -> None:
    stdout, stderr, end = run(
        "sh", "-c", 'printf "%s|" "$@"; pwd; echo e >&2; exit 3', "x", "a b", "", "*", cwd=str(tmp_path)
    )
    assert stdout == f"a b||*|{tmp_path}\n".encode()
    assert stderr == b"e\n"
    assert (end.code, end.problem) == (3, "")


def test_a_builtin_is_no_program() -> None:
    assert run("exit", "7")[2].problem == "command"
    assert run("echo", "-n", "x")[0] == b"x"


@pytest.mark.parametrize("name", ["no-such-program", "/no/such", "/", "/etc/passwd"])
def test_what_cannot_be_run_is_told_apart(name: str) -> None:
    assert run(name)[2].problem == "command"


def test_a_directory_that_is_not_there() -> None:
    assert run("true", cwd="/no/such")[2].problem == "cwd"


def test_a_signal_is_not_commented_on() -> None:
    stdout, stderr, end = run("sh", "-c", "kill -9 $$")
    assert (stdout, stderr, end.code) == (b"", b"", 137)


def test_the_path_of_the_command_counts(tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    assert run("mine", env={"PATH": f"/nowhere:{tmp_path}:/usr/bin:/bin"})[0] == b"mine\n"


def test_a_trailer_is_found_however_it_is_cut() -> None:
    whole = b"out\x01agentkit \x01put" + f"\x01agentkit {NONCE} 7 1 2\x01late".encode()
    for size in range(1, len(whole) + 1):
        trailer, seen = Trailer(NONCE), b""
        for start in range(0, len(whole), size):
            seen += trailer.feed(whole[start : start + size])
        assert seen == b"out\x01agentkit \x01put"
        assert trailer.found == ("7", "1", "2")


def test_without_a_trailer_nothing_is_lost() -> None:
    trailer = Trailer(NONCE)
    data = b"abc\x01agentkit 0123"
    assert trailer.feed(data) + trailer.rest() == data
    assert trailer.found is None
    assert trailer.rest() == b""


def test_an_endless_trailer_is_no_endless_buffer() -> None:
    trailer = Trailer(NONCE)
    trailer.feed(f"\x01agentkit {NONCE} ".encode() + b"9" * 500)
    assert trailer.found is not None
    with pytest.raises(ProtocolError):
        End.parse(trailer.found)


def test_ends() -> None:
    assert End.parse(("0", "1", "2")) == End(0, 2, oom=True)
    assert End.parse(("0", "2", "2")) == End(0, 2)
    assert End.parse(("137", "-", "-")) == End(137)
    for hostile in ((), ("0",), ("x", "1", "2"), ("999", "1", "2"), ("-1", "0", "0"), ("²", "1", "1")):
        with pytest.raises(ProtocolError):
            End.parse(hostile)


def test_killing_finds_what_ran_away() -> None:
    mark = f"{scripts.MARK}=kill-{os.getpid()}"
    runaway = f"setsid sh -c 'trap \"\" TERM HUP; env -u {scripts.MARK} sleep 300 & sleep 300' & sleep 300"
    name, _, value = mark.partition("=")
    victim = subprocess.Popen(["sh", "-c", runaway], env={**os.environ, name: value}, start_new_session=True)
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        time.sleep(0.5)
        assert sh(scripts.KILL, mark, "KILL").returncode == 0
        assert victim.wait(10) == -signal.SIGKILL
        ours = subprocess.run(["grep", "-lsF", mark, *Path("/proc").glob("[0-9]*/environ")], capture_output=True)
        assert ours.stdout == b""
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_another_signal_is_sent_once() -> None:
    mark = f"term-{os.getpid()}"
    victim = subprocess.Popen(["sleep", "300"], env={**os.environ, scripts.MARK: mark}, start_new_session=True)
    assert sh(scripts.KILL, f"{scripts.MARK}={mark}", "TERM").returncode == 0
    assert victim.wait(10) == -signal.SIGTERM


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "a file\nof mine"
    path.write_bytes(b"\0x" * 500)
    assert sh(scripts.READ, str(path), "1000").stdout == b"\0x" * 500
    assert sh(scripts.READ, str(path), "999").returncode == scripts.LARGE
    assert sh(scripts.READ, str(tmp_path), "999").returncode == scripts.KIND
    assert sh(scripts.READ, str(tmp_path / "none"), "999").returncode == scripts.MISSING
    os.mkfifo(tmp_path / "fifo")
    assert sh(scripts.READ, str(tmp_path / "fifo"), "999").returncode == scripts.KIND
    with open(tmp_path / "sparse", "wb") as sparse:
        sparse.truncate(10 << 30)
    assert sh(scripts.READ, str(tmp_path / "sparse"), "999").returncode == scripts.LARGE


def test_writing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "-f"
    arguments = (str(path), str(path.parent), str(path.parent / ".hidden"), "640")
    assert sh(scripts.WRITE, *arguments, "3", stdin=b"a\0b").returncode == 0
    assert path.read_bytes() == b"a\0b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    # What does not arrive whole changes nothing.
    assert sh(scripts.WRITE, *arguments, "9", stdin=b"half").returncode == scripts.SHORT
    assert path.read_bytes() == b"a\0b"
    assert os.listdir(path.parent) == ["-f"]
    assert sh(scripts.WRITE, str(tmp_path), "/tmp", str(tmp_path / ".h"), "600", "0").returncode == scripts.KIND


def test_listing(tmp_path: Path) -> None:
    (tmp_path / "b c").write_bytes(b"123")
    (tmp_path / "a\nb").mkdir(mode=0o700)
    (tmp_path / ".hidden").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "-n")
    found = scripts.parse_list(str(tmp_path), sh(scripts.LIST, str(tmp_path)).stdout)
    assert [(Path(info.path).name, info.kind) for info in found] == [
        ("-n", "other"),
        (".hidden", "symlink"),
        ("a\nb", "directory"),
        ("b c", "file"),
    ]
    assert found[3].size == 3
    assert abs(found[3].modified - time.time()) < 3600
    assert sh(scripts.LIST, str(tmp_path / "b c")).returncode == scripts.KIND
    assert sh(scripts.LIST, str(tmp_path / "none")).returncode == scripts.MISSING
    assert scripts.parse_list("/", b"") == []


def test_many_entries(tmp_path: Path) -> None:
    names = [f"{number:04d}" + "x" * 200 for number in range(1500)]
    for name in names:
        (tmp_path / name).touch()
    found = scripts.parse_list(str(tmp_path), sh(scripts.LIST, str(tmp_path)).stdout)
    assert [Path(info.path).name for info in found] == names


@pytest.mark.parametrize(
    "hostile", [b"x", b"1\n", b"-1\n", b"2\na b c\n", b"1\n81a4 1 1\nname", b"9999999999\n", b"0\n"]
)
def test_a_list_that_makes_no_sense(hostile: bytes) -> None:
    with pytest.raises(ProtocolError):
        scripts.parse_list("/", hostile)


def test_other_scripts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert sh(scripts.STAT, str(path)).returncode == scripts.MISSING
    assert sh(scripts.MKDIR, str(path / "y")).returncode == 0
    assert sh(scripts.MKDIR, str(path / "y")).returncode == 0
    assert scripts.parse_stat("x", sh(scripts.STAT, str(path)).stdout.decode()).kind == "directory"
    assert sh(scripts.EMPTY, str(path)).returncode == 0
    assert os.listdir(path) == []
    assert sh(scripts.REMOVE, str(path)).returncode == 0
    assert sh(scripts.REMOVE, str(path)).returncode == 0
    assert not path.exists()
    path.touch()
    assert sh(scripts.MKDIR, str(path)).returncode == scripts.KIND


def test_statistics() -> None:
    stats = scripts.parse_stats(sh(scripts.STATS, "/").stdout.decode())
    assert stats.workspace_size
    assert scripts.parse_stats("memory x\nlimit\noom 3\ncpu_us 1500000\nused_kb 2\n\n").oom_kills == 3
    assert (
        scripts.parse_stats("cpu_ns 1500000000").cpu_seconds == scripts.parse_stats("cpu_us 1500000").cpu_seconds == 1.5
    )


def test_errors_of_files() -> None:
    def kind(code: int, said: str = "") -> type[SandboxError]:
        return type(scripts.file_error("write", "/x", code, said))

    assert kind(scripts.MISSING) is kind(scripts.KIND) is kind(scripts.DENIED) is PathError
    assert kind(scripts.LARGE) is FileTooLarge
    assert kind(scripts.SHORT, "cat: write error: No space left on device") is DiskFull
    assert kind(scripts.SHORT, "sh: stat: not found") is SandboxError
    assert kind(1, "Read-only file system") is PathError
