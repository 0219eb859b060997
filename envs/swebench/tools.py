"""The tools of an agent: parse the text of an action into a call, and format the result of a call.

The first line of an action names the tool; arguments follow on that line or below it.

Invariant: parsing an action executes nothing. The result of a call is text of bounded length; an error of the agent is
reported in it, and only a failed sandbox raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentkit.errors import DiskFull, FileTooLarge, PathError
from agentkit.sandboxes.files import Files
from agentkit.sandboxes.shell import ShellResult

USAGE = """\
bash COMMAND
    runs a command, of one or several lines, in a shell that keeps its directory and variables
view PATH [FIRST LAST]
    shows a file with line numbers, from line FIRST to line LAST
create PATH
CONTENT
    writes a file
edit PATH
<<<<<<< SEARCH
lines that occur exactly once in the file
=======
lines that replace them
>>>>>>> REPLACE
submit
    ends your work: the tests are run"""
FILE_LIMIT = 4 << 20
"""Bytes of a file that the editor opens."""
_EDIT = re.compile(r"<{7} SEARCH\n(.*)^>{7} REPLACE\s*\Z", re.DOTALL | re.MULTILINE)
_DIVIDER = "======="
_VIEW = re.compile(r"(.+?)(?:\s+(\d{1,9})\s+(\d{1,9}))?")


@dataclass(frozen=True)
class Bash:
    command: str


@dataclass(frozen=True)
class View:
    path: str
    first: int = 1
    last: int | None = None


@dataclass(frozen=True)
class Create:
    path: str
    content: str


@dataclass(frozen=True)
class Edit:
    path: str
    old: tuple[str, ...]
    """Lines without line ends."""
    new: tuple[str, ...]


@dataclass(frozen=True)
class Submit:
    pass


Call = Bash | View | Create | Edit | Submit


def parse(action: str) -> Call | None:
    """Return the call that ``action`` describes; None if there is none.

    Raises:
        ValueError: a block of ``edit`` is malformed or ambiguous; the message gives the reason.
    """
    if "\0" in action:
        return None
    head, _, body = action.strip().partition("\n")
    tool, _, argument = head.partition(" ")
    argument = argument.strip()
    if tool == "bash":
        command = f"{argument}\n{body}".strip()
        return Bash(command) if command else None
    if tool == "submit":
        return None if argument or body.strip() else Submit()
    if not argument:
        return None
    if tool == "view" and not body.strip():
        match = _VIEW.fullmatch(argument)
        if match is not None:
            return View(match[1], int(match[2] or 1), int(match[3]) if match[3] else None)
    if tool == "create":
        return Create(argument, f"{body}\n" if body else "")
    if tool == "edit" and (match := _EDIT.fullmatch(f"{body}\n".replace("\r\n", "\n"))) is not None:
        lines = match[1].split("\n")[:-1]
        if lines.count(_DIVIDER) != 1:
            raise ValueError(f"{lines.count(_DIVIDER)} lines of the block are {_DIVIDER}, and one must divide it")
        divider = lines.index(_DIVIDER)
        return Edit(argument, tuple(lines[:divider]), tuple(lines[divider + 1 :]))
    return None


def clip(text: str, limit: int) -> str:
    """Return the beginning and the end of ``text``, at most ``limit`` characters, with the number of omitted ones."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[len(text) - half :]}"


def shown(result: ShellResult, limit: int, timeout: float) -> str:
    """Return the output of a command and how it ended."""
    text = clip("".join(part for part in (result.stdout, result.stderr) if part), limit)
    notes = []
    if result.truncated:
        notes.append("the middle of the output was left out")
    if result.timed_out:
        notes.append(f"stopped after {timeout:g} s")
    elif result.exit_code:
        notes.append(f"exit code {result.exit_code}")
    if result.oom_killed:
        notes.append("killed: out of memory")
    if result.session_restarted:
        notes.append("the shell was started anew")
    lines = [text.rstrip("\n")] if text.strip() else []
    return "\n".join([*lines, *(f"[{note}]" for note in notes)]) or "[no output]"


async def use_editor(files: Files, call: View | Create | Edit, limit: int) -> str:
    """Return the observation. ``call.path`` is absolute. Raises ``SandboxError`` if the sandbox failed."""
    try:
        if isinstance(call, View):
            return view((await files.read(call.path, limit=FILE_LIMIT)).decode("utf-8", "replace"), call, limit)
        there = await files.stat(call.path)
        if there is not None and there.kind != "file":
            return f"[{call.path} is a {there.kind}, not a file]"
        mode = 0o644 if there is None else there.mode
        if isinstance(call, Create):
            await files.write(call.path, call.content, mode=mode)
            return f"[wrote {call.path}]"
        text = replaced((await files.read(call.path, limit=FILE_LIMIT)).decode("utf-8"), call.old, call.new)
        if isinstance(text, int):
            return f"[the lines occur {text} times in {call.path}, not exactly once: nothing was changed]"
        await files.write(call.path, text, mode=mode)
    except UnicodeDecodeError:
        return f"[{call.path} is not UTF-8 text: nothing was changed]"
    except (PathError, FileTooLarge, DiskFull) as problem:
        return f"[{problem}]"
    return f"[changed {call.path}]"


def view(text: str, call: View, limit: int) -> str:
    """Return numbered lines of a file."""
    lines = _lines(text)
    last = len(lines) if call.last is None else min(call.last, len(lines))
    if not lines:
        return "[the file is empty]"
    if not 1 <= call.first <= last:
        return f"[the file has {len(lines)} lines; there is nothing from {call.first} to {call.last}]"
    return clip("\n".join(f"{n:6d}  {lines[n - 1]}" for n in range(call.first, last + 1)), limit)


def replaced(text: str, old: Sequence[str], new: Sequence[str]) -> str | int:
    """Return ``text`` with the lines ``old`` replaced by ``new``, or the number of occurrences if it is not one."""
    lines, wanted = _lines(text), list(old)
    starts = [n for n in range(len(lines) - len(wanted) + 1) if lines[n : n + len(wanted)] == wanted] if old else []
    if len(starts) != 1:
        return len(starts)
    end = "\r\n" if "\r\n" in text else "\n"
    whole = text.split("\n")
    whole[starts[0] : starts[0] + len(wanted)] = [line + end[:-1] for line in new]
    return "\n".join(whole)


def _lines(text: str) -> list[str]:
    """Split text into lines as editors and tracebacks number them; a form feed does not end a line."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]
