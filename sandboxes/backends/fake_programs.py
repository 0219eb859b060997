"""The commands that a pretended sandbox has: real in what they read, write and use, small in what they can."""

from __future__ import annotations

import asyncio
import errno
import posixpath
import re
import signal as signals
from collections.abc import AsyncIterator, Callable, Mapping

from agentkit.sandboxes.backends.fake_files import Node, failure
from agentkit.sandboxes.backends.fake_machine import Machine, Pipe, Proc, Program
from agentkit.sandboxes.backends.fake_shell import Shell

_BLOCK = 1 << 20
_BLOCK_SECONDS = 0.001
"""How long a program takes for a block: endless output must take time, or simulated time would stand still."""


def find(machine: Machine, name: str, cwd: str) -> Program:
    """The program called ``name``: one of these, or an executable script. Raises ``OSError``."""
    base = posixpath.basename(name)
    if base in machine.programs and posixpath.dirname(name) in ("", "/bin", "/usr/bin"):
        return machine.programs[base]
    if "/" not in name:
        raise failure(errno.ENOENT, name)
    node = machine.files.get(posixpath.join(cwd, name))
    if node.kind != "file" or not node.mode & 0o111:
        raise failure(errno.EACCES, name)
    text = bytes(node.data).decode("utf-8", "surrogateescape")

    async def script(proc: Proc, argv: list[str]) -> int:
        return await Shell(proc, find, argv[1:]).script(text)

    return script


async def shell(proc: Proc, argv: list[str]) -> int:
    """``sh [-i] [-c TEXT | FILE] [ARGUMENT …]``; the long options of bash change nothing here."""
    rest = [argument for argument in argv[1:] if not argument.startswith("--")]
    interactive = "-i" in rest[:1]
    rest = rest[1:] if interactive else rest
    if rest[:1] == ["-c"]:
        return await Shell(proc, find, rest[3:]).script(rest[1])
    if rest:
        text = proc.machine.files.read(posixpath.join(proc.cwd, rest[0])).decode("utf-8", "surrogateescape")
        return await Shell(proc, find, rest[1:]).script(text)
    return await Shell(proc, find).lines(interactive)


async def true(proc: Proc, argv: list[str]) -> int:
    return 0


async def false(proc: Proc, argv: list[str]) -> int:
    return 1


async def echo(proc: Proc, argv: list[str]) -> int:
    words, end = (argv[2:], "") if argv[1:2] == ["-n"] else (argv[1:], "\n")
    await proc.out.write(_bytes(" ".join(words) + end))
    return 0


async def printf(proc: Proc, argv: list[str]) -> int:
    values = iter(argv[2:])

    def convert(match: re.Match[str]) -> str:
        return "%" if match[0] == "%%" else str(int(next(values, "0") or 0)) if match[0] == "%d" else next(values, "")

    # Escapes belong to the format alone, never to what is put in.
    pieces = re.split(r"(%[sd%])", argv[1])
    converted = [
        re.sub(r"%[sd%]", convert, piece) if index % 2 else _unescape(piece) for index, piece in enumerate(pieces)
    ]
    await proc.out.write(b"".join(item if isinstance(item, bytes) else _bytes(item) for item in converted))
    return 0


async def sleep(proc: Proc, argv: list[str]) -> int:
    await proc.machine.breathe(float("inf") if argv[1] == "infinity" else float(argv[1]))
    return 0


async def yes(proc: Proc, argv: list[str]) -> int:
    block = _bytes(" ".join(argv[1:] or ["y"]) + "\n") * (_BLOCK // 2)
    while True:
        await proc.out.write(block[:_BLOCK])
        await proc.machine.breathe(_BLOCK_SECONDS)


async def cat(proc: Proc, argv: list[str]) -> int:
    for path in argv[1:] or ["-"]:
        async for block in _blocks(proc, path):
            await proc.out.write(block)
    return 0


async def head(proc: Proc, argv: list[str]) -> int:
    """``head -c BYTES`` or ``head -n LINES``."""
    unit, count, path = _counted(argv)
    async for block in _blocks(proc, path):
        part = block[:count] if unit == "-c" else b"".join(block.splitlines(keepends=True)[:count])
        await proc.out.write(part)
        count -= len(part) if unit == "-c" else part.count(b"\n")
        if count <= 0:
            break
    return 0


async def tail(proc: Proc, argv: list[str]) -> int:
    """``tail -c BYTES`` or ``tail -n LINES``; what it keeps counts as memory."""
    unit, count, path = _counted(argv)
    kept = bytearray()

    def trim() -> None:
        lines = kept.splitlines(keepends=True) if unit == "-n" else ()
        size = sum(map(len, lines[-count:])) if unit == "-n" else count
        del kept[: max(len(kept) - size, 0)]

    async for block in _blocks(proc, path):
        kept += block
        if len(kept) > 2 * max(proc.memory, _BLOCK):
            trim()
            proc.grow(len(kept) - proc.memory)
    trim()
    await proc.out.write(bytes(kept))
    return 0


async def wc(proc: Proc, argv: list[str]) -> int:
    """``wc -c`` or ``wc -l``."""
    total = 0
    async for block in _blocks(proc, argv[2] if len(argv) > 2 else "-"):
        total += len(block) if argv[1] == "-c" else block.count(b"\n")
    await proc.out.write(f"{total}\n".encode())
    return 0


async def seq(proc: Proc, argv: list[str]) -> int:
    numbers = [int(argument) for argument in argv[1:]]
    first, last = (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    await proc.out.write("".join(f"{number}\n" for number in range(first, last + 1)).encode())
    return 0


async def env(proc: Proc, argv: list[str]) -> int:
    await proc.out.write(_bytes("".join(f"{name}={value}\n" for name, value in proc.env.items())))
    return 0


async def pwd(proc: Proc, argv: list[str]) -> int:
    await proc.out.write(_bytes(f"{proc.cwd}\n"))
    return 0


async def kill(proc: Proc, argv: list[str]) -> int:
    """``kill [-SIGNAL] PID …``; a negative PID is a group."""
    number, rest = int(signals.SIGTERM), argv[1:]
    if rest[0].startswith("-"):
        name, rest = rest[0][1:], [argument for argument in rest[1:] if argument != "--"]
        number = int(name) if name.isdigit() else int(signals.Signals[f"SIG{name.removeprefix('SIG')}"])
    status = 0
    for argument in rest:
        pid = int(argument)
        victims = [other for other in proc.machine.processes.values() if pid in (other.pid, -other.group)]
        status = status if victims else 1
        for victim in victims:
            if number:
                victim.send(number)
    await asyncio.sleep(0)
    return status


async def setsid(proc: Proc, argv: list[str]) -> int:
    """Leave the group; what is run from here on has a group of its own."""
    proc.group = proc.pid
    return await find(proc.machine, argv[1], proc.cwd)(proc, argv[1:])


async def nohup(proc: Proc, argv: list[str]) -> int:
    proc.ignored.add(signals.SIGHUP)
    return await find(proc.machine, argv[1], proc.cwd)(proc, argv[1:])


async def user(proc: Proc, argv: list[str]) -> int:
    await proc.out.write(f"{proc.machine.user}\n".encode())
    return 0


async def ls(proc: Proc, argv: list[str]) -> int:
    names = proc.machine.files.names(_path(proc, next((word for word in argv[1:] if word[0] != "-"), ".")))
    await proc.out.write(_bytes("".join(f"{name}\n" for name in names)))
    return 0


async def rm(proc: Proc, argv: list[str]) -> int:
    for word in argv[1:]:
        if word.startswith("-"):
            continue
        if "-f" not in argv[1] or proc.machine.files.find(_path(proc, word), follow=False):
            proc.machine.files.remove(_path(proc, word))
    return 0


async def mkdir(proc: Proc, argv: list[str]) -> int:
    for word in argv[1:]:
        if not word.startswith("-"):
            proc.machine.files.mkdir(_path(proc, word))
    return 0


async def touch(proc: Proc, argv: list[str]) -> int:
    for word in argv[1:]:
        proc.machine.files.write(_path(proc, word), b"", append=True)
    return 0


async def link(proc: Proc, argv: list[str]) -> int:
    """``ln -s TARGET NAME``."""
    proc.machine.files.make(_path(proc, argv[3]), Node("symlink", 0o777, target=argv[2]))
    return 0


async def mkfifo(proc: Proc, argv: list[str]) -> int:
    proc.machine.files.make(_path(proc, argv[1]), Node("other"))
    return 0


async def chmod(proc: Proc, argv: list[str]) -> int:
    node = proc.machine.files.get(_path(proc, argv[2]))
    node.mode = node.mode | 0o111 if argv[1] == "+x" else int(argv[1], 8)
    return 0


async def test(proc: Proc, argv: list[str]) -> int:
    """``test`` and ``[``: files, strings, numbers, and ``!``."""
    words = argv[1:-1] if argv[0] == "[" else argv[1:]
    if words[:1] == ["!"]:
        return int(not await test(proc, ["test", *words[1:]]))
    if len(words) == 1:
        return int(not words[0])
    if len(words) == 2:
        node = proc.machine.files.find(_path(proc, words[1]))
        kind = node.kind if node else None
        checks = {"-z": not words[1], "-n": bool(words[1]), "-e": kind, "-f": kind == "file", "-d": kind == "directory"}
        return int(not checks[words[0]])
    left, comparison, right = words
    if comparison in ("=", "!="):
        return int((left == right) != (comparison == "="))
    difference = int(left) - int(right)
    compare: Mapping[str, Callable[[int], bool]] = {
        "-eq": lambda value: value == 0,
        "-ne": lambda value: value != 0,
        "-lt": lambda value: value < 0,
        "-le": lambda value: value <= 0,
        "-gt": lambda value: value > 0,
        "-ge": lambda value: value >= 0,
    }
    return int(not compare[comparison](difference))


PROGRAMS: Mapping[str, Program] = {
    "[": test, "bash": shell, "cat": cat, "chmod": chmod, "echo": echo, "env": env, "false": false, "head": head,
    "id": user, "kill": kill, "ln": link, "ls": ls, "mkdir": mkdir, "mkfifo": mkfifo, "nohup": nohup,
    "printf": printf, "pwd": pwd, "rm": rm, "seq": seq, "setsid": setsid, "sh": shell, "sleep": sleep, "tail": tail,
    "test": test, "touch": touch, "true": true, "wc": wc, "yes": yes,
}  # fmt: skip


async def _blocks(proc: Proc, path: str) -> AsyncIterator[bytes]:
    """What a path, or ``-`` for standard input, brings."""
    if path == "-":
        pipe = proc.stdin
    elif path == "/dev/zero":
        while True:
            yield bytes(_BLOCK)
            await proc.machine.breathe(_BLOCK_SECONDS)
    else:
        node = proc.machine.files.get(_path(proc, path))
        pipe = Pipe()
        if node.kind == "other" and path != "/dev/null":
            pipe.open()  # a FIFO to which nobody writes
        pipe.unread(proc.machine.files.read(_path(proc, path)))
    while pipe is not None and (data := await pipe.read()):
        await proc.machine.breathe()
        yield data


def _counted(argv: list[str]) -> tuple[str, int, str]:
    """Unit, count and path of ``head`` and ``tail``."""
    return argv[1], int(argv[2]), argv[3] if len(argv) > 3 else "-"


def _path(proc: Proc, word: str) -> str:
    return posixpath.join(proc.cwd, word)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _unescape(text: str) -> bytes:
    """The escapes of ``printf``: ``\\n``, ``\\t``, ``\\\\`` and octal ``\\ooo``."""

    def byte(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        named = {b"n": b"\n", b"t": b"\t", b"\\": b"\\"}
        return named[escape] if escape in named else bytes([int(escape, 8) & 255])

    return re.sub(rb"\\([0-7]{1,3}|[nt\\])", byte, _bytes(text))
