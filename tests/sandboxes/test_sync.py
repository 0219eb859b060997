"""The blocking interface equals the asynchronous one."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from local_harness import runtime_directory

from agentkit.errors import ExecFailed, SandboxLost
from agentkit.portal import portal
from agentkit.sandboxes import Process, Sandbox, Shell, SyncSandbox
from agentkit.sandboxes.files import Files
from agentkit.sandboxes.sync import SyncFiles, SyncProcess, SyncShell

__all__ = ["runtime_directory"]

pytestmark = pytest.mark.usefixtures("runtime_directory")

INTERNAL = {
    "busy", "call", "mark_lost", "mark_slow", "note_result", "probe", "start", "was_paused", "watch", "watched",
    "why_lost",
}  # fmt: skip
"""For other modules of the package only."""
PAIRS = [(Sandbox, SyncSandbox), (Files, SyncFiles), (Shell, SyncShell), (Process, SyncProcess)]


def surface(cls: type) -> dict[str, Any]:
    return {
        name: inspect.getattr_static(cls, name)
        for name in dir(cls)
        if not name.startswith("_") and name not in INTERNAL
    }


def parameters(member: Any) -> list[tuple[str, Any, Any, str]]:
    function = getattr(member, "__func__", member)
    return [
        (item.name, item.kind, item.default, str(item.annotation))
        for item in list(inspect.signature(function).parameters.values())[1:]
    ]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda cls: cls.__name__)
def test_both_interfaces_have_the_same_names_and_parameters(one: type, other: type) -> None:
    first, second = surface(one), surface(other)
    # Attributes of asynchronous instances may be properties here.
    extra = {"id", "spec", "backend"} if one is Sandbox else set()
    assert set(first) == set(second) - extra
    for name, member in first.items():
        assert isinstance(member, property) == isinstance(second[name], property), name
        assert isinstance(member, classmethod) == isinstance(second[name], classmethod), name
        if not isinstance(member, property):
            assert parameters(member) == parameters(second[name]), name


def test_blocking_calls() -> None:
    with SyncSandbox.create(backend="local", labels={"a": "b"}) as box:
        assert box.exec("echo hi").stdout == "hi\n"
        with pytest.raises(ExecFailed):
            box.exec("exit 3", check=True)
        box.files.write("x", "1")
        assert (box.files.read_text("x"), box.files.exists("y")) == ("1", False)
        with box.shell() as shell:
            shell.run("cd /tmp")
            assert shell.run("pwd").stdout == "/tmp\n"
        process = box.spawn("echo one; cat")
        output = iter(process)
        assert next(output) == ("stdout", b"one\n")
        process.write(b"two\n")
        process.close_stdin()
        assert list(output) == [("stdout", b"two\n")]
        assert process.wait().exit_code == 0
        with box.fork() as child:
            assert child.files.read("x") == b"1"
        assert [seen.id for seen in SyncSandbox.list(labels={"a": "b"}, backend=box.backend)] == [box.id]
        assert box.info.state == box.state == "ready"
        assert box.stats().oom_kills in (0, None)
        assert box.history[-1].after == "ready"
        assert box.id in repr(box)
    assert box.state == "removed"
    with pytest.raises(SandboxLost):
        box.exec("true")


async def test_inside_a_running_loop() -> None:
    """As in a notebook or an asynchronous actor."""
    with SyncSandbox.create(backend="local") as box:
        assert box.exec("echo hi").stdout == "hi\n"
    assert await asyncio.sleep(0, "still running") == "still running"


def test_from_many_threads() -> None:
    with SyncSandbox.create(backend="local") as box:
        found: list[str] = []
        threads = [threading.Thread(target=lambda n=n: found.append(box.exec(f"echo {n}").stdout)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == [f"{n}\n" for n in range(8)]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("agentkit-portal") == 1


def test_an_interrupt_cancels_and_cleans_up() -> None:
    # Background jobs of a shell without job control, and their children, ignore interrupts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SyncSandbox.create(backend="local") as box:
            before = box.stats().processes
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                box.exec("sleep 1000", timeout=2000)
            timer.join()
            assert box.state == "ready"
            assert box.stats().processes == before
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_forked_child_has_its_own_event_loop() -> None:
    script = (
        "import os\n"
        "from agentkit.sandboxes import SyncSandbox\n"
        "def use():\n"
        "    with SyncSandbox.create(backend='local') as box:\n"
        "        assert box.exec('echo hi').stdout == 'hi\\n'\n"
        "use()\n"
        "pid = os.fork()\n"
        "use()\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=110)


def test_a_forked_child_neither_uses_nor_closes_the_sandboxes_of_its_parent() -> None:
    script = (
        "import os, sys\n"
        "from agentkit.sandboxes import SyncSandbox\n"
        "with SyncSandbox.create(backend='local') as box, box.shell() as shell:\n"
        "    pid = os.fork()\n"
        "    if pid:\n"
        "        assert os.waitpid(pid, 0)[1] == 0\n"
        "        assert shell.run('echo hi').stdout == box.exec('echo hi').stdout == 'hi\\n'\n"
        "    else:\n"
        "        for use in (lambda: box.exec('true'), lambda: shell.run('true'), lambda: box.info):\n"
        "            try:\n"
        "                use()\n"
        "                sys.exit(1)\n"
        "            except RuntimeError as error:\n"
        "                assert 'belongs to the parent' in str(error)\n"
        "        box.close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_open_sandboxes_are_closed_at_exit() -> None:
    script = (
        "import atexit\n"
        "from agentkit.sandboxes import SyncSandbox\n"
        "atexit.register(lambda: print(box.state))\n"
        "box = SyncSandbox.create(backend='local')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, timeout=110, capture_output=True, text=True)
    assert ended.stdout == "removed\n"


def test_a_blocking_call_in_the_background_loop_is_an_error() -> None:
    async def block() -> None:
        SyncSandbox.list(backend="local")

    with pytest.raises(RuntimeError, match="await there"):
        portal().run(block())


def test_importing_loads_no_back_end() -> None:
    script = (
        "import sys, agentkit.sandboxes as s\n"
        "assert not {'docker', 'fastapi', 'torch', 'asyncio', 'pydantic'} & set(sys.modules)\n"
        "s.SyncSandbox, s.Sandbox\n"
        "assert not {'docker', 'fastapi', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=110)
