"""Conformance tests of spawned processes and of shells."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentkit.errors import ExecFailed, SandboxLost
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.testing.conformance.fixtures import SLACK, SandboxFixtures, until


class SessionsConformance(SandboxFixtures):
    """Tests of ``Sandbox.spawn`` and ``Sandbox.shell``."""

    # Processes.

    async def test_a_conversation(self, box: Sandbox) -> None:
        process = await box.spawn(["cat"], stdin="begin\n")
        output = aiter(process)
        assert await _next(output) == ("stdout", b"begin\n")
        await process.write(b"ping\n")
        assert await _next(output) == ("stdout", b"ping\n")
        await process.close_stdin()
        assert [item async for item in output] == []
        assert (await process.wait()).exit_code == 0

    async def test_output_comes_while_the_command_runs(self, box: Sandbox) -> None:
        process = await box.spawn("echo one; sleep 1000")
        assert await _next(aiter(process)) == ("stdout", b"one\n")
        await process.kill()
        result = await asyncio.wait_for(process.wait(), SLACK)
        assert (result.exit_code, result.signal, result.stdout) == (137, 9, "")

    async def test_wait_returns_unread_output(self, box: Sandbox) -> None:
        process = await box.spawn("echo out; echo err >&2; exit 3")
        result = await process.wait()
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert result.timed_out is False

    async def test_unread_output_beyond_the_limit_is_not_lost(self, box: Sandbox) -> None:
        process = await box.spawn("yes | head -c 1000000", output_limit=10_000)
        await asyncio.sleep(0.3)
        assert sum([len(data) async for _, data in process]) == 1_000_000
        assert (await process.wait()).exit_code == 0

    async def test_a_spawned_process_has_its_timeout(self, box: Sandbox) -> None:
        start = time.monotonic()
        process = await box.spawn("echo one; sleep 1000", timeout=1)
        result = await process.wait()
        assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "one\n")
        assert time.monotonic() - start < 3 + SLACK

    async def test_a_signal_reaches_the_group(self, box: Sandbox) -> None:
        process = await box.spawn("sleep 1000 & sleep 1000; echo never")
        await asyncio.sleep(0.3)
        await process.kill(15)
        result = await asyncio.wait_for(process.wait(), SLACK)
        assert (result.signal, result.stdout) == (15, "")
        await process.kill()

    async def test_writing_to_an_ended_process(self, box: Sandbox) -> None:
        process = await box.spawn("exit 0")
        await process.wait()

        async def insist() -> None:
            for _ in range(100):
                await process.write(b"x" * 100_000)
                await asyncio.sleep(0.02)

        with pytest.raises(BrokenPipeError):
            await insist()

    async def test_two_at_once_do_not_mix(self, box: Sandbox) -> None:
        processes = [await box.spawn(f"sleep 0.2; echo {number}; sleep 0.2; echo {number}") for number in range(4)]
        results = await asyncio.gather(*[process.wait() for process in processes])
        assert [result.stdout for result in results] == [f"{number}\n{number}\n" for number in range(4)]

    # Shells.

    async def test_a_shell_remembers(self, box: Sandbox) -> None:
        async with box.shell(env={"GIVEN": "yes"}) as shell:
            await shell.run("cd /tmp; x=1; export y=2; greet() { echo hello $1; }")
            result = await shell.run('pwd; echo "$x $y $GIVEN"; greet you; sh -c \'echo "[$x$y]"\'')
            assert result.stdout == "/tmp\n1 2 yes\nhello you\n[2]\n"
            assert not result.session_restarted

    async def test_status_and_streams_of_a_shell(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            result = await shell.run("printf out; printf err >&2; (exit 7)")
            assert (result.stdout, result.stderr, result.exit_code) == ("out", "err", 7)
            assert (await shell.run("true")).exit_code == 0
            with pytest.raises(ExecFailed):
                await shell.run("false", check=True)

    async def test_a_command_cannot_read_the_next_one(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            assert (await shell.run("cat; echo end")).stdout == "end\n"
            assert (await shell.run("echo 'single' \"double\" \\$x $((1+2)); echo second line")).stdout == (
                "single double $x 3\nsecond line\n"
            )
            assert (await shell.run("for i in 1 2\ndo\n  echo $i\ndone\n")).stdout == "1\n2\n"

    async def test_invalid_input_does_not_end_the_shell(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            await shell.run("x=kept")
            for text in ("if", "echo 'open", ") (", "cd /nowhere", "no-such-program", "${"):
                result = await shell.run(text, timeout=20)
                assert result.exit_code not in (0, None)
                assert not result.session_restarted
            assert (await shell.run("")).exit_code == 0
            assert (await shell.run("echo $x")).stdout == "kept\n"

    async def test_a_timeout_interrupts_the_command_and_keeps_the_shell(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            await shell.run("x=kept; cd /tmp")
            start = time.monotonic()
            result = await shell.run("echo early; sleep 1000; touch late", timeout=1)
            assert time.monotonic() - start < 3 + SLACK
            assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "early\n")
            assert not result.session_restarted
            assert (await shell.run("echo $x; pwd; ls")).stdout == "kept\n/tmp\n"

    async def test_a_busy_loop_is_interrupted(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            assert (await shell.run("while :; do :; done", timeout=0.5)).timed_out
            assert (await shell.run("echo on")).stdout == "on\n"

    async def test_a_shell_that_does_not_answer_is_replaced(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            await shell.run("x=lost")
            result = await shell.run("echo early; exec sleep 1000", timeout=1)
            assert (result.timed_out, result.session_restarted, result.stdout) == (True, True, "early\n")
            assert (await shell.run('echo "[$x]"')).stdout == "[]\n"

    async def test_a_shell_that_ends_is_replaced(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            result = await shell.run("echo bye; exit 3")
            assert (result.exit_code, result.stdout, result.session_restarted) == (3, "bye\n", True)
            assert (await shell.run("echo back")).stdout == "back\n"

    async def test_output_that_looks_like_an_end_marker_is_output(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            mark = "\\036" + "0" * 32 + ":0\\036"
            result = await shell.run(f"printf '{mark}'; printf '{mark}' >&2; echo more; (exit 4)")
            assert result.stdout == "\x1e" + "0" * 32 + ":0\x1emore\n"
            assert result.exit_code == 4

    async def test_large_output_of_a_shell_is_bounded(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            result = await shell.run("echo first; yes | head -c 2000000; echo; echo last", output_limit=5000)
            assert result.truncated
            assert len(result.stdout_bytes) <= 5000
            assert result.stdout.startswith("first\n")
            assert result.stdout.endswith("\nlast\n")
            assert (await shell.run("yes", timeout=0.5, output_limit=1000)).truncated
            assert (await shell.run("echo on")).stdout == "on\n"

    async def test_cancelling_a_command_of_a_shell(self, box: Sandbox) -> None:
        async with box.shell() as shell:
            await shell.run("x=kept")
            task = asyncio.ensure_future(shell.run("touch begun; sleep 1000"))
            await until(lambda: box.files.exists("begun"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await shell.run("echo $x")).stdout == "kept\n"

    async def test_shells_are_independent_and_run_one_command_at_a_time(self, box: Sandbox) -> None:
        async with box.shell() as one, box.shell(cwd="/tmp") as two:
            await asyncio.gather(one.run("x=1"), two.run("x=2"))
            results = await asyncio.gather(*[shell.run("sleep 0.1; echo $x") for shell in (one, one, two, two)])
            assert [result.stdout for result in results] == ["1\n", "1\n", "2\n", "2\n"]
            assert (await two.run("pwd")).stdout == "/tmp\n"

    async def test_a_closed_shell(self, box: Sandbox) -> None:
        shell = await box.shell()
        await shell.close()
        await shell.close()
        with pytest.raises(SandboxLost):
            await shell.run("true")


async def _next(output: object) -> tuple[str, bytes]:
    return await asyncio.wait_for(anext(output), SLACK)  # pyright: ignore[reportArgumentType]
