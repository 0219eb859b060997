"""Judge a program on hidden inputs: the comparison of outputs, and a script for containers without agentkit.

    judge PROGRAM CASES REWARD      # the reward is written to the file REWARD

Invariant: every text that a program can write gets a verdict, in time linear in its length. The script needs root in a
container, and the standard library of Python 3.9. It runs the program as a new user without rights, who can neither
read the cases nor change the reward, which is written when only root has processes.
"""

import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

LONGEST_NUMBER = 400
SOURCE_LIMIT = 64 << 10
OUTPUT_LIMIT = 64 << 10
PROCESS_LIMIT = 64
USERS = range(20_000, 60_000)
"""Numbers of which the program's user gets one: a limit of processes counts those of all containers."""
PATIENCE = 8
"""Seconds of real time per second of processor time, because the machine may be busy."""


def accepts(output, expected, compare, tolerance):
    """Return whether ``output`` is correct for a test with the output ``expected``.

    Args:
        output: what the program wrote.
        expected: what it should write.
        compare: ``tokens``: the same words with any separators. ``exact``: the same lines, except for blanks at their
            ends and empty lines at the end. ``float``: like ``tokens``, but two numbers are equal within ``tolerance``.
        tolerance: the largest absolute or relative difference from the expected number.
    """
    if compare == "exact":
        return lines_of(output) == lines_of(expected)
    words, wanted = output.split(), expected.split()
    if compare == "tokens":
        return words == wanted
    return len(words) == len(wanted) and all(
        word == want or is_close(word, want, tolerance)
        for word, want in zip(words, wanted)  # noqa: B905
    )


def is_close(word, want, tolerance):
    if len(word) > LONGEST_NUMBER:
        return False
    try:
        value, target = float(word), float(want)
    except ValueError:
        return False
    if not (math.isfinite(value) and math.isfinite(target)):
        return False
    return abs(value - target) <= tolerance * max(1.0, abs(target))


def lines_of(text):
    return [line.rstrip() for line in text.rstrip().splitlines()]


def program_of(path):
    """Return the program, or None if there is no file of 1 to ``SOURCE_LIMIT`` bytes."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            source = file.read(SOURCE_LIMIT + 1) or b""
    except OSError:
        return None
    return source if 0 < len(source) <= SOURCE_LIMIT else None


def run(folder, text, seconds, memory, user):
    """Return what the program in ``folder`` writes as ``user``; None if it fails or exceeds its limits."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESS_LIMIT, PROCESS_LIMIT))
        resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_LIMIT, OUTPUT_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    environment = {"PATH": os.defpath, "HOME": "/tmp", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace"}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
        given.write(text.encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-s", "main.py"],
            cwd=folder,
            env=environment,
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            user=user,
            group=user,
            extra_groups=[],
            preexec_fn=limit,
        )
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(PATIENCE * seconds + 1)
        end_processes()
        process.wait()
        size = written.seek(0, os.SEEK_END)
        written.seek(0)
        return written.read().decode("utf-8", "replace") if status == 0 and size < OUTPUT_LIMIT else None


def end_processes():
    """Kill all processes in this container that are not root's, until there are none."""
    while users := {user for name in os.listdir("/proc") if name.isdigit() and (user := user_of(name))}:
        for user in users:
            killer = os.fork()
            if killer == 0:
                try:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                    os.kill(-1, signal.SIGKILL)  # all at once: none can start another one meanwhile
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
        time.sleep(0.01)


def user_of(name):
    """Return the number of the user of a process; 0, as for root, if it has ended."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            ended = file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        with open(f"/proc/{name}/status", "rb") as file:
            return 0 if ended else next(int(line.split()[1]) for line in file if line.startswith(b"Uid:"))
    except OSError:
        return 0


def judge(source, cases):
    """Return the share of the cases that the program passes if ``cases["partial"]``, otherwise 1 if all, else 0."""
    passed, user = 0, random.SystemRandom().choice(USERS)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with open(os.path.join(folder, "main.py"), "wb") as file:
            file.write(source)
        os.chmod(file.name, 0o644)
        for given, expected in cases["cases"]:
            output = run(folder, given, cases["seconds"], cases["memory"], user)
            if output is not None and accepts(output, expected, cases["compare"], cases["tolerance"]):
                passed += 1
            elif not cases["partial"]:
                return 0
    return passed / len(cases["cases"])


def main(program, cases, reward):
    os.chmod(os.path.dirname(cases), 0o700)  # the program must not read the expected outputs
    end_processes()
    source = program_of(program)
    with open(cases, encoding="utf-8") as file:
        result = 0 if source is None else judge(source, json.load(file))
    for name in ("reward.txt", "reward.json"):  # the program may write there if everyone may
        path = os.path.join(os.path.dirname(reward), name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
    with open(reward, "x", encoding="utf-8") as file:
        file.write(f"{result}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
