"""Programming tasks: reference programs compared with other implementations, and hostile programs."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import uuid
from collections import Counter
from typing import Any

import docker.errors
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from requiring import require

import agentkit
from agentkit.envs import shared_resources as shared
from agentkit.envs.base import expert_actions
from agentkit.envs.code_contest import CodeContest
from agentkit.envs.code_contest.env import program_in
from agentkit.envs.code_contest.task import Case, Task
from agentkit.envs.code_contest.task_families import FAMILIES, draw
from agentkit.envs.code_runner.runner import SOURCE_LIMIT, Limits, runner
from agentkit.envs.math import Math
from agentkit.envs.sync import SyncTextEnv
from agentkit.envs.task_files import part_of
from agentkit.errors import ConfigError, EnvCrashed, RegistryError
from agentkit.portal import portal
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.backends.local import state as local_state

BACKENDS = ["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]
MEMORY = 128 << 20
LIMITS = Limits(seconds=1, memory=MEMORY)
ECHO = Task(statement="Print the input.", tests=(Case(input="one", output="one\n"), Case(input="two", output="two\n")))


@pytest.fixture(scope="module", params=BACKENDS)
def sandboxes(request):
    """A share in the sandboxes of a back end; fails if sandboxes are left at the end."""
    backend = request.param
    if backend == "local":
        require(shutil.which("bwrap") is not None, "install bubblewrap")
    else:
        require("docker", "pip install 'agentkit-rl[docker]'")
    share = runner(backend, MEMORY)
    try:
        portal().run(share._use(lambda shared: shared.run("print(1)", [""], LIMITS)))
    except EnvCrashed as error:
        require(False, f"run `.ci/docker` ({error})")
    labels = pool_labels(backend)
    yield backend, share
    portal().run(share._release())
    assert not shared._open
    assert portal().run(Sandbox.list(labels=labels, backend=backend)) == []


def pool_labels(backend):
    entry: Any = shared._open["programs", backend, MEMORY, None]
    return entry.resource._pool.labels


async def run(sandboxes, source, *inputs, limits=LIMITS):
    return await sandboxes[1].use(lambda shared: shared.run(source, inputs or [""], limits))


# Tasks.


def numbers_of(text):
    return [int(word) for word in text.split()[1:]]


def longest_run(text):
    """Compute it by regular expressions."""
    best = max((match.group() for match in re.finditer(r"(.)\1*", text.strip())), key=len)
    return best[0], len(best)


def first_wrong_bracket(text):
    """Delete adjacent pairs; return the end of the shortest invalid prefix, or the balance."""
    text = text.strip()

    def reduced(part):
        while (shorter := part.replace("()", "").replace("[]", "").replace("{}", "")) != part:
            part = shorter
        return part

    for end in range(1, len(text) + 1):
        if any(bracket in reduced(text[:end]) for bracket in ")]}"):
            return end - 1
    return "open" if reduced(text) else None


def ways(amount, *coins):
    """Count the multiples of the two larger coins."""
    first, second = coins
    return sum((amount - second * k) // first + 1 for k in range(amount // second + 1))


def reference(statement, text):
    """Return the expected output of a task, computed by another algorithm than its own program."""
    a = [int(number) for number in re.findall(r"\d+", statement)]
    if "sum of those" in statement:
        return str(sum(x for x in numbers_of(text) if not x % a[0] and x > a[1]))
    if "th largest" in statement:
        values = np.unique(numbers_of(text))[::-1]
        return str(values[a[0] - 1]) if len(values) >= a[0] else f"-{a[2]}"
    if "consecutive" in statement:
        sums = np.concatenate([[0], np.cumsum(numbers_of(text))])
        found = [sums[j] - sums[i] for i, j in itertools.combinations(range(len(sums)), 2) if j - i >= a[0]]
        return str(max(found)) if found else "NONE"
    if "mean" in statement:
        return a[0] * statistics.fmean(numbers_of(text)) + a[1]
    if "common multiple" in statement:
        multiple = 1
        for x in numbers_of(text):
            multiple = multiple * x // math.gcd(multiple, x)
        return str(multiple % a[0])
    if "alphabet (after" in statement:
        table = {97 + k: 97 + (k + a[0]) % 26 for k in range(26)}
        letters = list(text.strip().translate(table))
        del letters[a[1] - 1 :: a[1]]
        return "".join(letters)
    if "longest run" in statement:
        letter, length = longest_run(text)
        return f"{letter} {length + a[0]}"
    if "brackets" in statement:
        place = first_wrong_bracket(text)
        return "OPEN" if place == "open" else str(len(text.strip()) // 2 * a[0] if place is None else place + a[1])
    if "holds words" in statement:
        often = sorted({word for word in text.split() if text.split().count(word) >= a[0]})
        return "\n".join(often) or str(len(text.split()) + a[1])
    if "matrix" in statement:
        matrix = np.array([line.split() for line in text.splitlines()[1:]], int)
        return str(matrix.sum(1).max() + a[0] * matrix.sum(0).min())
    if "coins" in statement:
        return str(ways(int(text), a[1], a[2]))
    assert "digits whose sum" in statement
    sums = sum(sum(map(int, f"{k}")) % a[1] == 0 for k in range(1, int(text) + 1) if not f"{k}".endswith(f"{a[2]}"))
    return str(sums)


def test_outputs_of_every_kind_of_task_match_its_statement():
    seen = Counter()
    for seed in range(150):
        task = draw(np.random.default_rng(seed), None)
        seen[re.sub(r"\d+", "#", task.statement)] += 1
        for case in task.tests + task.examples:
            wanted = reference(task.statement, case.input)
            if isinstance(wanted, float):
                assert float(case.output) == pytest.approx(wanted, abs=1e-9)
            else:
                assert case.output == f"{wanted}\n", (task.statement, case)
    assert len(seen) == len(FAMILIES)


def test_the_parts_share_no_task_and_a_seed_gives_one_task():
    train = {draw(np.random.default_rng(seed), "train").statement for seed in range(60)}
    test = {draw(np.random.default_rng(seed), "test").statement for seed in range(60)}
    assert not train & test
    assert {part_of(statement) for statement in test} == {"test"}
    assert draw(np.random.default_rng(5), "train") == draw(np.random.default_rng(5), "train")


@pytest.mark.parametrize(
    ("compare", "output", "expected", "same"),
    [
        ("tokens", "1  2\n3", "1 2 3\n", True),
        ("tokens", "1 2", "12", False),
        ("tokens", "1.0", "1", False),
        ("tokens", "", "\n", True),
        ("exact", "a \nb\n\n", "a\nb", True),
        ("exact", " a", "a", False),
        ("exact", "a\n\nb", "a\nb", False),
        ("exact", "a b", "a  b", False),
        ("float", "0.3333333", "0.333333333", True),
        ("float", "0.3334", "0.333333333", False),
        ("float", "1e6", "1000000.5", True),
        ("float", "1000002", "1000000.5", False),
        ("float", "nan", "1", False),
        ("float", "inf", "1e308", False),
        ("float", "1 2", "1", False),
        ("float", "yes 1.0000001", "yes 1", True),
        ("float", "1" * 10_000, "1", False),
        ("float", "\x00", "1", False),
    ],
)
def test_outputs_are_compared_as_the_task_says(compare, output, expected, same):
    assert Task(statement="x", tests=ECHO.tests, compare=compare).accepts(output, expected) is same


def test_a_program_is_the_last_fenced_block_or_everything():
    assert program_in("print(1)") == "print(1)"
    assert program_in("First\n```\nold\n```\nthen\n```python\nprint(2)\n```\ndone") == "print(2)\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2"),
        ('{"statement": "x"}', "line 2: tests: Field required"),
        ('{"statement": "x", "tests": []}', "line 2: tests"),
        ('{"statement": "x", "tests": [{"input": "", "output": ""}], "compare": "near"}', "line 2: compare"),
        ('{"statement": "x", "tests": [{"input": "", "output": ""}], "teste": 1}', "line 2: teste"),
    ],
)
def test_malformed_file_is_reported_by_line(tmp_path, line, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{ECHO.model_dump_json()}\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(words)):
        CodeContest(path=str(path))


def test_wrong_arguments_are_named(tmp_path):
    wrong: list[dict[str, Any]] = [
        {"max_turns": 0},
        {"time_limit": 0},
        {"time_limit": 1.5},
        {"time_limit": True},
        {"split": "dev"},
    ]
    for kwargs in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
            CodeContest(**kwargs)
    with pytest.raises(ConfigError, match="memory="):
        CodeContest(memory="much")
    with pytest.raises(ConfigError, match="cannot be read"):
        CodeContest(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(RegistryError, match="backend"):
        agentkit.make("CodeContest-v0", backends="local")


# Episodes.


@contextlib.asynccontextmanager
async def episode(backend, task=ECHO, **kwargs):
    env = CodeContest(backend=backend, memory=MEMORY, time_limit=1, **kwargs)
    await env.reset(seed=0)
    env.task = task
    yield env
    await env.close()


async def test_expert_solves_drawn_tasks(sandboxes):
    env = CodeContest(backend=sandboxes[0], memory=MEMORY, split="train")
    for seed in range(4):
        observation, _ = await env.reset(seed=seed)
        assert env.task is not None
        assert env.task.statement in observation
        assert all(case.input.strip() not in observation for case in env.task.tests if len(case.input) > 40)
        (program,) = env.expert()
        _, reward, terminated, _, info = await env.step(program)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
        with pytest.raises(ResetNeeded):
            await env.step(program)
    await env.close()


def test_gymnasium_makes_it(sandboxes):
    env: Any = gymnasium.make("agentkit:agentkit/CodeContest-v0", backend=sandboxes[0], memory=MEMORY, split="train")
    check_env(env.unwrapped, skip_render_check=True)
    env.reset(seed=0)
    (program,) = env.unwrapped.expert()
    _, reward, terminated, _, info = env.step(program)
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.close()


@pytest.mark.parametrize(
    ("program", "partial", "reward"),
    [
        ("print(input())", False, 1.0),
        ("print('one')", False, 0.0),
        ("print('one')", True, 0.5),
        ("print('two')", True, 0.5),
        ("print('two')", False, 0.0),
        ("print(input()); raise SystemExit(3)", True, 0.0),
        ("this is no program", True, 0.0),
    ],
)
async def test_the_reward_is_for_passed_tests(sandboxes, program, partial, reward):
    async with episode(sandboxes[0], partial_credit=partial) as env:
        _, earned, terminated, truncated, info = await env.step(program)
    assert (earned, terminated, truncated, info["success"]) == (reward, True, False, reward == 1.0)
    assert info.get("metrics") == ({"tests_passed": reward} if partial else None)


@pytest.mark.parametrize("program", ["", " \n", "#" * (SOURCE_LIMIT + 1)])
async def test_invalid_program_needs_no_sandbox(program):
    async with episode("there is no such back end") as env:
        _, reward, terminated, _, info = await env.step(program)
    assert (reward, terminated, info) == (0.0, True, {"success": False, "action_valid": False})


async def test_with_several_turns_the_examples_give_feedback(sandboxes):
    task = Task(statement="Print n + 1.", examples=(Case(input="1", output="2"),), tests=(Case(input="5", output="6"),))
    async with episode(sandboxes[0], task, max_turns=4) as env:
        said, reward, terminated, _, _ = await env.step("print(int(input()) * 3)")
        assert (reward, terminated) == (0.0, False)
        assert "Expected:\n2" in said
        assert "wrote:\n3" in said
        said = (await env.step("print(1 / 0)"))[0]
        assert "ZeroDivisionError" in said
        said = (await env.step("print(2)"))[0]
        assert said == "Right on the examples, but not on all hidden tests."
        said, reward, terminated, _, info = await env.step("print(int(input()) + 1)")
        assert (said, reward, terminated, info["success"]) == ("Correct.", 1.0, True, True)
    assert CodeContest.max_turns_for(max_turns=4) == 4
    assert "up to 4 programs" in CodeContest.instructions_for(max_turns=4)


async def test_a_users_tasks_are_read(sandboxes, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        json.dumps({"statement": "Say hi.", "tests": [{"input": "", "output": "hi"}], "solution": "print('hi')"})
    )
    env = SyncTextEnv(CodeContest(path=str(path), backend=sandboxes[0], memory=MEMORY))
    try:
        assert (await asyncio.to_thread(env.reset, seed=3))[0] == "Say hi."
        action = next(expert_actions(env))
        assert (await asyncio.to_thread(env.step, action))[1] == 1.0
    finally:
        await asyncio.to_thread(env.close)


# Programs that do their worst. Each runs on two inputs, so that the second run sees what the first left behind.

LEFT = """
import os
print(sorted(os.listdir('/tmp') + os.listdir('/dev/shm')), len(os.listdir('..')), end=' ')
print(len([name for name in os.listdir('/proc') if name.isdigit()]))
"""
"""Files elsewhere, directories of runs, and processes."""

HOSTILE = {
    "busy forever": ("while True: pass", {"time limit"}),
    "asleep forever": ("import time; time.sleep(1000)", {"time limit"}),
    "deaf to its end": (
        "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        {"time limit", "runtime error"},
    ),
    "memory of one": ("x = bytearray(10**9)", {"memory limit"}),
    "memory of many": (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0: break\n"
        "x = bytearray(100 << 20)\nx[:] = b'1' * len(x)\ntime.sleep(3)",
        {"memory limit", "runtime error", "time limit"},
    ),
    "processes": ("import os\nwhile True: os.fork()", {"runtime error", "time limit"}),
    "processes elsewhere": (
        "import os\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"", "runtime error", "time limit"},
    ),
    "output": ("while True: print('x' * 10_000)", {"output limit", "time limit"}),
    "much output": ("print('x' * 10_000_000)", {"output limit"}),
    "disk": ("f = open('/tmp/x', 'wb')\nwhile True: f.write(b'x' * 10**6)", {"runtime error"}),
    "kills all": ("import os; os.kill(-1, 9)", {"runtime error"}),
    "kills each": (
        "import os\nfor p in range(1, 400):\n    try:\n        if p != os.getpid(): os.kill(p, 9)\n"
        "    except OSError: pass\n"
        "os.killpg(os.getpgid(os.getppid()), 9)",
        {"runtime error"},
    ),
    "stack": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        {"runtime error", "memory limit", "time limit"},
    ),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 53), timeout=2)", {"runtime error"}),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_program_fails_and_leaves_nothing(sandboxes, name):
    source, endings = HOSTILE[name]
    (before,) = await run(sandboxes, LEFT)
    first, second = await run(sandboxes, source, "a", "b")
    assert first.failure in endings
    assert second.failure in endings | {"runtime error"}  # what the first left may not let it begin
    assert len(first.stdout) <= LIMITS.output + 100
    (after,) = await run(sandboxes, LEFT)
    assert after.failure == ""
    assert after.stdout == before.stdout
    assert before.stdout.startswith("[] 1 ")


async def test_a_greedy_program_fails(sandboxes):
    """A fast part of the test above."""
    (run_,) = await run(sandboxes, "x = bytearray(10**9)")
    assert run_.failure == "memory limit"
    (run_,) = await run(sandboxes, "import os; os.kill(-1, 9)")
    assert run_.failure == "runtime error"
    assert "PermissionError" in run_.stderr
    (run_,) = await run(sandboxes, "print('x' * 1_000_000)")
    assert run_.failure == "output limit"


BUSY = "import os, signal, time\ndef busy(t):\n    while time.process_time() < t: pass\n"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("busy(0.6)", ""),
        ("time.sleep(3)", ""),
        ("if os.fork() == 0:\n    busy(0.3)\n    os._exit(0)\nos.wait()\nbusy(0.3)", ""),
        ("signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nbusy(1.6)", "time limit"),
        (
            "for _ in range(3):\n    if os.fork() == 0:\n        busy(0.7)\n        os._exit(0)\n    os.wait()",
            "time limit",
        ),
        ("for _ in range(3):\n    busy(0.7)\n    if os.fork():\n        os.wait()\n        os._exit(0)", "time limit"),
        ("if os.fork() == 0:\n    os.setsid()\n    busy(0.9)\n    os._exit(0)\nbusy(0.9)\nos.wait()", "time limit"),
    ],
)
async def test_the_processor_time_of_all_processes_counts(sandboxes, program, failure):
    (counted,) = await run(sandboxes, BUSY + program)
    assert counted.failure == failure, counted


async def test_programs_start_with_the_same_hash_seed(sandboxes):
    program = "import os\nprint(hash('a'), {'b', 'c', 'd'}, 'é✓\\ud800', [n for n in os.environ if 'PYTHON' in n])"
    first, second = await run(sandboxes, program, "", "")
    assert first == second
    assert "é✓? ['PYTHONHASHSEED', 'PYTHONIOENCODING']" in first.stdout


async def test_sandboxes_that_can_start_no_program_void(sandboxes):
    beyond: Any = 1.5
    with pytest.raises(EnvCrashed, match=r"no program can be started: .*ValueError"):
        await run(sandboxes, "print(1)", limits=Limits(seconds=beyond, memory=MEMORY))


async def test_expected_outputs_and_the_host_cannot_be_read(sandboxes):
    secret = uuid.uuid4().hex
    look = """
import os
for root in ('/proc', '/tmp', '/workspace', '/dev/shm', '/run', '/home', '/root', '/work', '/var'):
    for where, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in ('task', 'fdinfo', 'sys', 'map_files', 'ns', 'attr')]
        for name in files:
            path = os.path.join(where, name)
            if 'kmsg' in path or 'kcore' in path or 'pagemap' in path: continue
            try:
                with open(path, 'rb') as f:
                    os.set_blocking(f.fileno(), False)
                    data = f.read(65536) or b''
            except OSError: continue
            if b'WANTED' in data.replace(b'"', b'') or b'expected' in path.encode(): print(path, data[:100])
            os.write(2, data[:20])
print(os.environ)
"""
    task = Task(statement="x", tests=(Case(input="a", output=secret),))
    async with episode(sandboxes[0], task) as env:
        assert (await env.step(f"{look}\nprint(open('/proc/self/environ').read())"))[1] == 0.0
    (found,) = await run(sandboxes, look, limits=Limits(seconds=3, memory=MEMORY, output=4 << 20))
    assert secret not in found.stdout + found.stderr
    assert "AGENTKIT" not in found.stdout


CHANNELS = """
import ctypes, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def shared_memory(size, flags):
    return libc.shmget(0x5EC2E7, size, flags)
def queue(flags):
    return libc.mq_open(b'/secret', flags, 0o666, None)
def keyring():
    return libc.syscall(248, b'user', b'secret', b'x', 1, -4), libc.syscall(250, 10, -4, b'user', b'secret', 0)
"""
LEAVE = (
    CHANNELS
    + """
open('/tmp/note', 'w').write('x')
open('../note', 'w').write('x')
os.mkdir('/dev/shm/d', 0o000)
for path in ('/tmp', '/dev/shm', '/workspace', '/dev/mqueue', '/proc/self/attr/current'):
    for attempt in (lambda: os.setxattr(path, 'user.secret', b'x'), lambda: os.utime(path, (1, 1))):
        try: attempt()
        except OSError: pass
shared_memory(4096, 0o1666)
libc.semget(0x5EC2E7, 1, 0o1666)
libc.msgget(0x5EC2E7, 0o1666)
queue(os.O_CREAT | os.O_RDWR)
keyring()
for n in range(300):
    if os.fork() == 0: os._exit(0)
    os.wait()
server = socket.create_server(('127.0.0.1', 4711))
client = socket.create_connection(('127.0.0.1', 4711))
server.accept()[0].close()
client.close()
hidden = socket.socket(socket.AF_UNIX)
hidden.bind('\\0secret')
if os.fork() == 0:
    os.setsid()
    [os.close(k) for k in range(3)]
    import time; time.sleep(1000)
print('left')
"""
)
"""Leaves something in every place that outlives a process."""
FIND = (
    CHANNELS
    + """
found = []
for path in ('/tmp', '/dev/shm', '/workspace', '/dev/mqueue'):
    try: names = os.listdir(path)
    except OSError: continue
    found += [f'{path}/{name}' for name in names if not name.startswith('run-')]
    if os.stat(path).st_mtime == 1: found.append(f'mtime of {path}')
    try: found += [f'{path}: {name}' for name in os.listxattr(path) if 'secret' in name]
    except OSError: pass
if shared_memory(0, 0) != -1: found.append('shared memory')
if libc.semget(0x5EC2E7, 0, 0) != -1: found.append('semaphores')
if libc.msgget(0x5EC2E7, 0) != -1: found.append('message queue')
if queue(os.O_RDWR) != -1: found.append('posix message queue')
if libc.syscall(250, 10, -4, b'user', b'secret', 0) > 0: found.append('key')
for kind in ('shm', 'sem', 'msg'):
    found += [kind for line in open('/proc/sysvipc/' + kind).readlines()[1:]]
if os.getpid() > 200: found.append('process numbers')
for table in ('tcp', 'unix'):
    lines = open('/proc/net/' + table).read()
    if ':1267' in lines or 'secret' in lines: found.append(table)
server = socket.socket()
try: server.bind(('127.0.0.1', 4711))
except OSError: found.append('port')
found += [name for name in os.listdir('/proc') if name.isdigit() and 'time.sleep(1000)' in
          open(f'/proc/{name}/cmdline').read()]
print(found, len([name for name in os.listdir('/proc') if name.isdigit()]))
"""
)


async def test_nothing_passes_from_one_program_to_the_next(sandboxes):
    (clean,) = await run(sandboxes, FIND)
    assert clean.stdout.startswith("[] "), clean
    for _ in range(4):  # more than there are warm sandboxes
        (left,) = await run(sandboxes, LEAVE)
        assert (left.failure, left.stdout) == ("", "left\n"), left
    for _ in range(4):
        (seen,) = await run(sandboxes, FIND)
        assert (seen.failure, seen.stdout) == ("", clean.stdout), seen


# Programs that want their failure to be the sandbox's. None may void, and none may be solved.

VOIDING = {
    "kills all": "import os\nfor signal in (9, 15, 19): os.kill(-1, signal)",
    "kills each": (
        "import os\nfor signal in (15, 19, 9):\n    for p in range(1, 400):\n        if p != os.getpid():\n"
        "            try: os.kill(p, signal)\n            except OSError: pass"
    ),
    "fills the disk": (
        "for path in ('/tmp/x', '/dev/shm/x', '/workspace/x'):\n    try:\n        with open(path, 'wb', 0) as f:\n"
        "            while True: f.write(bytes(10**6))\n    except OSError: pass"
    ),
    "uses up inodes": "import os\nfor n in range(10**6): os.mkdir(f'/workspace/{n}')",
    "uses up processes": (
        "import os, time\ntry:\n    while os.fork(): pass\n    os.setsid()\n"
        "    [os.close(k) for k in range(3)]\n    time.sleep(1000)\nexcept OSError: pass"
    ),
    "locks its directories": (
        "import os\nfor path in ('.', '/tmp', '/dev/shm', '/workspace'):\n    try: os.chmod(path, 0)\n"
        "    except OSError: pass"
    ),
    "removes its directories": (
        "import os, shutil\nfor name in os.listdir('/workspace'): shutil.rmtree(f'/workspace/{name}', True)\n"
        "os.symlink('/proc/1/root', '/workspace/run')"
    ),
    "floods": "import os\nwhile True: os.write(1, b'x' * 10**6); os.write(2, b'x' * 10**6)",
    "uses up memory": (
        "import os\nfor n in range(20):\n    if os.fork() == 0:\n        x = bytearray(100 << 20)\n"
        "        x[:] = b'1' * len(x)\n        os._exit(0)\nos.wait()"
    ),
    "sleeps": "import time; time.sleep(1000)",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", VOIDING)
async def test_no_program_can_void_its_failure(sandboxes, name):
    async with episode(sandboxes[0], partial_credit=True) as env:
        _, reward, terminated, _, info = await env.step(VOIDING[name])
        assert (reward, terminated, info["success"]) == (0.0, True, False)
        assert env.policy_code_ran
    env = Math(tools=True, backend=sandboxes[0], memory=MEMORY, time_limit=1)
    await env.reset(seed=0)
    for _ in range(2):
        _, reward, terminated, _, _ = await env.step(f"```python\n{VOIDING[name]}\n```")
        assert (reward, terminated) == (0.0, False)
    said = (await env.step("python: print(6 * 7)"))[0]
    assert said == "Output:\n42"
    await env.close()


# Sandboxes that fail.


async def remove(backend, id):
    box = await Sandbox.connect(id, backend=backend)
    await box.close(remove=True)


async def kill(backend, id):
    """Kill a sandbox without a request to the engine, so that its death is unexplained."""
    if backend == "local":
        state = local_state.load(id)
        assert state is not None
        pids = [process.pid for process in state.processes]
    else:
        pids = [docker.APIClient().inspect_container(id)["State"]["Pid"]]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def torment(sandboxes, end, program, times):
    """Return the outcome of a program on two inputs if its sandbox is killed ``times`` times meanwhile."""
    ended, began = 0, asyncio.Event()
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(
        sandboxes[1].use(
            lambda shared: shared.run(program, ["a", "b"], LIMITS, begun=lambda: loop.call_soon_threadsafe(began.set))
        )
    )
    entry: Any = shared._open["programs", sandboxes[0], MEMORY, None]
    while not work.done() and ended < times:
        waiting = asyncio.ensure_future(began.wait())
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not work.done():
            began.clear()
            await asyncio.sleep(0.3)
            (box,) = entry.resource._pool.sandboxes("busy")
            await portal().call(end(sandboxes[0], box.id))
            ended += 1
    return [run.failure for run in await work]


PATIENT = "import time; time.sleep(2); print(input())"


@pytest.mark.slow
async def test_an_external_cause_voids_after_three_tries(sandboxes):
    assert await torment(sandboxes, remove, PATIENT, 2) == ["", ""]
    with pytest.raises(EnvCrashed, match="sandbox for the program failed"):
        await torment(sandboxes, remove, PATIENT, 3)


@pytest.mark.slow
async def test_an_unexplained_death_is_the_programs_failure_the_second_time(sandboxes):
    assert await torment(sandboxes, kill, PATIENT, 1) == ["", ""]
    assert await torment(sandboxes, kill, PATIENT, 2) == ["runtime error", ""]
    assert await torment(sandboxes, kill, PATIENT, 100) == ["runtime error", "runtime error"]


async def test_missing_engine_raises_instead_of_scoring(monkeypatch):
    require("docker", "pip install 'agentkit-rl[docker]'")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    env = CodeContest(backend="docker", memory="65m")
    await env.reset(seed=0)
    with pytest.raises(EnvCrashed, match="sandbox"):
        await env.step("print(1)")
    await env.close()


async def test_a_cancelled_run_gives_its_sandbox_back(sandboxes):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(run(sandboxes, "import time; time.sleep(1000)"), 0.5)
    (after,) = await run(sandboxes, "print('fine')")
    assert after.stdout == "fine\n"
