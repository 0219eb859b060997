"""The pretended shell: ``sh -c``, scripts, and lines from standard input, interactive or not.

Invariant: what it runs are processes of its machine with pids, groups and pipes, so that signals, limits and kills
reach them as they reach real ones. An interactive shell survives SIGINT, which abandons the line in progress.
"""

from __future__ import annotations

import asyncio
import operator
import posixpath
import re
import signal as signals
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentkit.sandboxes.backends.fake_machine import CannotFork, Into, Machine, Out, Pipe, Proc, Program, captured
from agentkit.sandboxes.backends.fake_syntax import (
    AndOr,
    For,
    Function,
    Group,
    If,
    Incomplete,
    Node,
    Pipeline,
    Redirect,
    Sequence_,
    ShellSyntaxError,
    Simple,
    While,
    Word,
    parse,
)
from agentkit.sandboxes.capture import Capture

Find = Callable[[Machine, str, str], Program]
_SUBSTITUTED = 1 << 20
"""Bytes that ``$(…)`` keeps."""


class _Exit(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class _Replace(Exception):
    """``exec``: another program takes the place of this shell."""

    def __init__(self, program: Program, argv: list[str], io: _Io) -> None:
        self.program = program
        self.argv = argv
        self.io = io


class _Return(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


@dataclass(frozen=True)
class _Io:
    stdin: Pipe | None
    out: Out
    err: Out


class Shell:
    """One shell in one process."""

    def __init__(self, proc: Proc, find: Find, arguments: Sequence[str] = ()) -> None:
        self.proc = proc
        self.find = find
        self.cwd = proc.cwd
        self.variables = dict(proc.env)
        self.exported = set(proc.env)
        self.functions: dict[str, Node] = {}
        self.arguments = list(arguments)
        self.status = 0
        self.options: set[str] = set()
        self.last_background = 0
        self._io = _Io(proc.stdin, proc.out, proc.err)
        self._children: list[Proc] = []
        self._awaited: set[Proc] = set()
        self._line: asyncio.Future[Any] | None = None

    # Entry points.

    async def script(self, text: str) -> int:
        """Run all of ``text``."""
        try:
            await self._run(parse(text), self._io)
        except ShellSyntaxError as error:
            await self._complain(self._io, f"syntax error: {error}")
            return 2
        except _Exit as end:
            return end.status
        except _Replace as other:
            return await self._become(other)
        return self.status

    async def lines(self, interactive: bool) -> int:
        """Run what standard input brings, line by line."""
        if interactive:
            self.proc.on_signal = self._interrupt
            self.proc.ignored.add(signals.SIGTERM)
        text = ""
        while True:
            await self.proc.machine.breathe()
            line = await self._read_line()
            text += line
            if not line:
                return self.status
            try:
                tree = parse(text)
            except Incomplete:
                continue
            except ShellSyntaxError as error:
                await self._complain(self._io, f"syntax error: {error}")
                self.status, text = 2, ""
                if not interactive:
                    return 2
                continue
            text = ""
            try:
                await self._interruptible(self._run(tree, self._io))
            except _Exit as end:
                return end.status
            except _Replace as other:
                return await self._become(other)

    async def _become(self, other: _Replace) -> int:
        proc, io = self.proc, other.io
        io.out.open()
        io.err.open()
        proc.out.close()
        proc.err.close()
        if proc.stdin is not None and proc.stdin is not io.stdin:
            proc.stdin.leave()
        proc.stdin, proc.out, proc.err, proc.on_signal = io.stdin, io.out, io.err, None
        proc.cwd, proc.env = self.cwd, self._environment()
        return await other.program(proc, other.argv)

    async def _interruptible(self, work: Coroutine[Any, Any, int]) -> None:
        self._line = asyncio.ensure_future(work)
        try:
            await asyncio.wait({self._line})
        finally:
            self._line.cancel()
        if self._line.cancelled():
            self.status = 128 + signals.SIGINT
        else:
            self._line.result()
        self._line = None

    def _interrupt(self, signal: int) -> bool:
        if signal != signals.SIGINT:
            return False
        # Like bash, it waits on for a command in the foreground that does not heed the signal.
        if self._line is not None and not any(signal in child.ignored for child in self._awaited):
            self._line.cancel()
        return True

    async def _read_line(self) -> str:
        pipe = self.proc.stdin
        line = b""
        while pipe is not None and not line.endswith(b"\n"):
            data = await pipe.read()
            if not data:
                break
            end = data.find(b"\n") + 1
            if end and end < len(data):
                pipe.unread(data[end:])
                data = data[:end]
            line += data
        return line.decode("utf-8", "surrogateescape")

    # The tree.

    async def _run(self, node: Node, io: _Io) -> int:
        self.status = await self._dispatch(node, io)
        return self.status

    async def _dispatch(self, node: Node, io: _Io) -> int:
        if isinstance(node, Simple):
            return await self._simple(node, io)
        if isinstance(node, Sequence_):
            return await self._sequence(node, io)
        if isinstance(node, AndOr):
            status = await self._run(node.first, io)
            for joint, following in node.rest:
                if (status == 0) == (joint == "&&"):
                    status = await self._run(following, io)
            return status
        if isinstance(node, Pipeline):
            status = await self._pipeline(node, io)
            return int(status == 0) if node.negated else status
        if isinstance(node, Function):
            self.functions[node.name] = node.body
            return 0
        try:
            io = self._redirected(io, await self._targets(node.redirects, io))
        except OSError as error:
            await self._complain(io, f"{error.filename}: {error.strerror}")
            return 1
        return await self._compound(node, io)

    async def _compound(self, node: Group | While | If | For, io: _Io) -> int:
        if isinstance(node, Group):
            if node.subshell:
                return await self._wait(self._fork(node.body, io))
            return await self._run(node.body, io)
        if isinstance(node, If):
            for condition, body in node.branches:
                if await self._run(condition, io) == 0:
                    return await self._run(body, io)
            return 0 if node.otherwise is None else await self._run(node.otherwise, io)
        status = 0
        if isinstance(node, For):
            for word in node.words:
                for value in await self._expand(word, io):
                    self.variables[node.name] = value
                    status = await self._run(node.body, io)
            return status
        while (await self._run(node.condition, io) == 0) != node.until:
            status = await self._run(node.body, io)
            await self.proc.machine.breathe(0.001)
        return status

    async def _sequence(self, node: Sequence_, io: _Io) -> int:
        status = 0
        for item, background in node.items:
            if background:
                child = self._fork(item, replace(io, stdin=None), ignored={signals.SIGINT})
                self._children.append(child)
                self.last_background = child.pid
                status = self.status = 0
                continue
            status = await self._run(item, io)
            if status and "e" in self.options and not isinstance(item, AndOr | If | While):
                raise _Exit(status)
        return status

    async def _pipeline(self, node: Pipeline, io: _Io) -> int:
        if len(node.commands) == 1:
            return await self._run(node.commands[0], io)
        children, stdin = [], io.stdin
        for index, command in enumerate(node.commands):
            if index == len(node.commands) - 1:
                children.append(self._fork(command, replace(io, stdin=stdin)))
                break
            pipe = Pipe()
            pipe.open()
            try:
                children.append(self._fork(command, _Io(stdin, pipe, io.err)))
            finally:
                pipe.close()
            stdin = pipe
        for child in children:
            await self._wait(child)
        return children[-1].status or 0

    def _fork(self, node: Node, io: _Io, ignored: set[int] | None = None) -> Proc:
        """Run a tree in a process of its own with a copy of this shell."""

        async def program(proc: Proc, argv: list[str]) -> int:
            shell = Shell(proc, self.find, self.arguments)
            shell.variables, shell.exported = dict(variables), set(exported)
            shell.functions, shell.options = dict(self.functions), set(self.options)
            shell.cwd = cwd
            try:
                return await shell._run(node, shell._io)
            except _Exit as end:
                return end.status
            except _Replace as other:
                return await shell._become(other)

        variables, exported, cwd = dict(self.variables), set(self.exported), self.cwd
        child = self._start(program, ["sh"], io)
        child.ignored |= ignored or set()
        return child

    def _start(self, program: Program, argv: list[str], io: _Io, extra: Mapping[str, str] | None = None) -> Proc:
        env = {**self._environment(), **(extra or {})}
        return self.proc.machine.start(
            program, argv, parent=self.proc, stdin=io.stdin, out=io.out, err=io.err, cwd=self.cwd, env=env
        )

    def _environment(self) -> dict[str, str]:
        return {name: self.variables[name] for name in self.exported if name in self.variables}

    async def _wait(self, child: Proc) -> int:
        self._awaited.add(child)
        try:
            await child.ended.wait()
        finally:
            self._awaited.discard(child)
        return child.status or 0

    # Simple commands.

    async def _simple(self, node: Simple, io: _Io) -> int:
        self._substituted = 0
        values = [(name, "".join(await self._expand(word, io, split=False))) for name, word in node.assignments]
        argv = [value for word in node.words for value in await self._expand(word, io)]
        try:
            io = self._redirected(io, await self._targets(node.redirects, io))
        except OSError as error:
            await self._complain(io, f"{error.filename}: {error.strerror}")
            return 1
        if not argv:
            self.variables.update(values)
            return self._substituted
        return await self._command(argv, io, dict(values))

    async def _command(self, argv: list[str], io: _Io, extra: Mapping[str, str]) -> int:
        if argv[0] in self.functions:
            outer, self.arguments = self.arguments, argv[1:]
            try:
                return await self._run(self.functions[argv[0]], io)
            except _Return as end:
                return end.status
            finally:
                self.arguments = outer
        builtin = _BUILTINS.get(argv[0])
        if builtin is not None:
            self.variables.update(extra)
            return await builtin(self, argv, io)
        try:
            program = self.find(self.proc.machine, argv[0], self.cwd)
            return await self._wait(self._start(program, argv, io, extra))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            await self._complain(io, f"{argv[0]}: {'not found' if missing else error.strerror}")
            return 127 if missing else 126
        except CannotFork:
            await self._complain(io, "Cannot fork")
            return 2

    async def _complain(self, io: _Io, text: str) -> None:
        await io.err.write(f"sh: {text}\n".encode())

    # Words.

    async def _expand(self, word: Word, io: _Io, split: bool = True) -> list[str]:
        fields: list[str | None] = [None]
        for part in word:
            if part.kind == "variable" and part.value in "@*" and part.value:
                fields[-1:] = self.arguments or [None]
                continue
            text = await self._value(part.kind, part.value, io)
            if part.quoted or part.kind == "text" or not split:
                fields[-1] = (fields[-1] or "") + text
                continue
            pieces = text.split()
            if not pieces:
                continue
            fields[-1] = (fields[-1] or "") + pieces[0] if not text[0].isspace() or fields[-1] is None else fields[-1]
            fields += pieces[1:]
        return [value for value in fields if value is not None]

    async def _value(self, kind: str, value: str, io: _Io) -> str:
        if kind == "text":
            return value
        if kind == "sum":
            return str(_calculate(re.sub(r"\$?([A-Za-z_]\w*)", lambda name: self._variable(name[1]) or "0", value)))
        if kind == "command":
            capture = Capture(_SUBSTITUTED)
            child = self._fork(parse(value), _Io(io.stdin, captured(capture), io.err))
            self._substituted = self.status = await self._wait(child)
            return capture.value().decode("utf-8", "surrogateescape").rstrip("\n")
        name, dash, default = value.partition(":-")
        return self._variable(name) or (default if dash else "")

    def _variable(self, name: str) -> str:
        if name.isdigit():
            number = int(name)
            return "sh" if number == 0 else (self.arguments[number - 1] if number <= len(self.arguments) else "")
        special = {
            "?": self.status,
            "$": self.proc.pid,
            "!": self.last_background or "",
            "#": len(self.arguments),
        }
        return str(special[name]) if name in special else self.variables.get(name, "")

    # Redirections.

    async def _targets(self, redirects: Sequence[Redirect], io: _Io) -> list[tuple[Redirect, str]]:
        return [(redirect, "".join(await self._expand(redirect.target, io, split=False))) for redirect in redirects]

    def _redirected(self, io: _Io, targets: Sequence[tuple[Redirect, str]]) -> _Io:
        for redirect, target in targets:
            if redirect.operator == "<":
                io = replace(io, stdin=self.open_input(target))
            elif redirect.operator in (">&", "<&"):
                out = io.out if target == "1" else io.err
                io = replace(io, out=out) if redirect.fd == 1 else replace(io, err=out)
            else:
                out = self._open_output(target, append=redirect.operator == ">>")
                io = replace(io, out=out) if redirect.fd == 1 else replace(io, err=out)
        return io

    def open_input(self, target: str) -> Pipe | None:
        path = posixpath.join(self.cwd, target)
        node = self.proc.machine.files.get(path)
        if node.kind == "other":
            return None
        pipe = Pipe()
        pipe.unread(self.proc.machine.files.read(path))
        return pipe

    def _open_output(self, target: str, append: bool) -> Out:
        files, path = self.proc.machine.files, posixpath.join(self.cwd, target)
        files.write(path, b"", append=append)
        return Into(lambda data: files.write(path, data, append=True))


def _calculate(text: str) -> int:
    """An integer expression with ``+ - * / %``, from left to right after products."""
    if re.fullmatch(r"\s*-?\d+(\s*[-+*/%]\s*-?\d+)*\s*", text) is None:
        raise ShellSyntaxError(f"arithmetic: {text!r}")
    tokens = re.findall(r"(?<![\d\s])-?\d+|(?<=\s)-?\d+|\d+|[-+*/%]", text)
    total = [int(tokens[0])]
    names = {"*": operator.mul, "/": operator.floordiv, "%": operator.mod}
    for sign, number in zip(tokens[1::2], tokens[2::2], strict=True):
        if sign in names:
            total[-1] = names[sign](total[-1], int(number))
        else:
            total.append(int(number) if sign == "+" else -int(number))
    return sum(total)


# Builtins: what must change the shell itself.


async def _cd(shell: Shell, argv: list[str], io: _Io) -> int:
    target = argv[1] if len(argv) > 1 else shell.variables.get("HOME", "/")
    path = posixpath.normpath(posixpath.join(shell.cwd, target))
    node = shell.proc.machine.files.find(path)
    if node is None or node.kind != "directory":
        await shell._complain(io, f"cd: can't cd to {target}")
        return 2
    shell.cwd = path
    return 0


async def _export(shell: Shell, argv: list[str], io: _Io) -> int:
    for argument in argv[1:]:
        name, equals, value = argument.partition("=")
        if equals:
            shell.variables[name] = value
        shell.exported.add(name)
    return 0


async def _unset(shell: Shell, argv: list[str], io: _Io) -> int:
    for name in argv[1:]:
        shell.variables.pop(name, None)
        shell.functions.pop(name, None)
    return 0


async def _eval(shell: Shell, argv: list[str], io: _Io) -> int:
    try:
        return await shell._run(parse(" ".join(argv[1:])), io)
    except ShellSyntaxError as error:
        await shell._complain(io, f"eval: syntax error: {error}")
        return 2


async def _command_builtin(shell: Shell, argv: list[str], io: _Io) -> int:
    if argv[1:2] != ["-v"]:
        return await shell._command(argv[1:], io, {})
    try:
        shell.find(shell.proc.machine, argv[2], shell.cwd)
    except OSError:
        return 127
    await io.out.write(f"/bin/{argv[2]}\n".encode())
    return 0


async def _exec(shell: Shell, argv: list[str], io: _Io) -> int:
    if len(argv) == 1:
        shell._io = io
        return 0
    try:
        raise _Replace(shell.find(shell.proc.machine, argv[1], shell.cwd), argv[1:], io)
    except OSError as error:
        await shell._complain(io, f"exec: {argv[1]}: {error.strerror}")
        raise _Exit(127) from None


async def _exit(shell: Shell, argv: list[str], io: _Io) -> int:
    raise _Exit(int(argv[1]) & 255 if len(argv) > 1 else shell.status)


async def _return(shell: Shell, argv: list[str], io: _Io) -> int:
    raise _Return(int(argv[1]) & 255 if len(argv) > 1 else shell.status)


async def _set(shell: Shell, argv: list[str], io: _Io) -> int:
    for argument in argv[1:]:
        if argument.startswith("-"):
            shell.options |= set(argument[1:])
        elif argument.startswith("+"):
            shell.options -= set(argument[1:])
    return 0


async def _trap(shell: Shell, argv: list[str], io: _Io) -> int:
    if len(argv) < 3 or argv[1] not in ("", "-"):
        await shell._complain(io, "trap: this shell can only ignore signals ('') and heed them again (-)")
        return 2
    numbers = {int(signals.Signals[f"SIG{name.removeprefix('SIG')}"]) for name in argv[2:] if name != "DEBUG"}
    shell.proc.ignored = shell.proc.ignored | numbers if argv[1] == "" else shell.proc.ignored - numbers
    return 0


async def _wait(shell: Shell, argv: list[str], io: _Io) -> int:
    for child in shell._children:
        if len(argv) == 1 or str(child.pid) in argv[1:]:
            await child.ended.wait()
    return 0


async def _nothing(shell: Shell, argv: list[str], io: _Io) -> int:
    return 0


_BUILTINS: Mapping[str, Callable[[Shell, list[str], _Io], Coroutine[Any, Any, int]]] = {
    ":": _nothing,
    "cd": _cd,
    "command": _command_builtin,
    "eval": _eval,
    "exec": _exec,
    "exit": _exit,
    "export": _export,
    "return": _return,
    "set": _set,
    "trap": _trap,
    "unset": _unset,
    "wait": _wait,
}
