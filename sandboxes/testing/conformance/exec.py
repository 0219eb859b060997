"""Conformance tests of commands."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentkit.errors import CommandNotFound, ExecFailed, ExecTimeout
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.testing.conformance.fixtures import SLACK, Create, SandboxFixtures, until


class ExecConformance(SandboxFixtures):
    """Tests of ``Sandbox.exec``."""

    async def test_text_is_run_by_a_shell(self, box: Sandbox) -> None:
        result = await box.exec("x=3; echo $x && echo done")
        assert (result.stdout, result.stderr, result.exit_code) == ("3\ndone\n", "", 0)
        assert result.ok
        assert (result.timed_out, result.truncated, result.oom_killed, result.tainted) == (False,) * 4

    async def test_a_list_is_run_without_a_shell(self, box: Sandbox) -> None:
        words = ["$HOME", "a b", "", "'", '"', "*", ";", "\\", "é", "new\nline", "-n"]
        result = await box.exec(["printf", "%s|%s|%s|%s|%s|%s|%s|%s|%s|%s|%s", *words])
        assert result.stdout == "|".join(words)

    @pytest.mark.parametrize("code", [0, 1, 42, 255])
    async def test_exit_codes_are_the_real_ones(self, box: Sandbox, code: int) -> None:
        assert (await box.exec(f"exit {code}")).exit_code == code

    async def test_streams_are_kept_apart(self, box: Sandbox) -> None:
        result = await box.exec("echo out; echo err >&2; echo out; echo err >&2")
        assert (result.stdout, result.stderr) == ("out\nout\n", "err\nerr\n")

    async def test_output_without_newline_and_none_at_all(self, box: Sandbox) -> None:
        assert (await box.exec("printf abc")).stdout == "abc"
        assert (await box.exec("true")).stdout == ""

    async def test_output_is_bytes_as_written(self, box: Sandbox) -> None:
        result = await box.exec(["printf", "\\000\\001\\377\\376\\033[31m\\303\\050\\n"])
        assert result.stdout_bytes == b"\x00\x01\xff\xfe\x1b[31m\xc3(\n"
        assert "�" in result.stdout

    async def test_stdin_reaches_the_command(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 16
        assert (await box.exec(["cat"], stdin=data)).stdout_bytes == data
        assert (await box.exec("cat", stdin="grüße")).stdout == "grüße"

    async def test_without_stdin_the_input_ends_at_once(self, box: Sandbox) -> None:
        assert (await box.exec("cat; echo end", timeout=20)).stdout == "end\n"

    async def test_large_stdin(self, box: Sandbox) -> None:
        data = b"0123456789abcde\n" * (1 << 16)
        assert (await box.exec("wc -c", stdin=data)).stdout.strip() == str(len(data))

    async def test_unread_stdin_does_not_delay_the_command(self, box: Sandbox) -> None:
        assert (await box.exec("echo hi", stdin=b"x" * (1 << 20), timeout=20)).stdout == "hi\n"

    async def test_a_long_argument(self, box: Sandbox) -> None:
        word = "y" * 100_000
        assert (await box.exec(["echo", word])).stdout == f"{word}\n"

    async def test_environment(self, create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AGENTKIT_HOST_SECRET", "secret")
        box = await create(env={"A": "of the spec", "B": "of the spec"})
        result = await box.exec('echo "$A/$B/$C"', env={"B": "of the call", "C": "two words"})
        assert result.stdout == "of the spec/of the call/two words\n"
        assert "secret" not in (await box.exec("env")).stdout
        assert (await box.exec("echo $B")).stdout == "of the spec\n"

    async def test_working_directory(self, box: Sandbox) -> None:
        assert (await box.exec("pwd")).stdout == f"{box.spec.workdir}\n"
        assert (await box.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        await box.files.mkdir("deep/er")
        assert (await box.exec("pwd", cwd="deep/er")).stdout == f"{box.spec.workdir}/deep/er\n"

    async def test_a_missing_working_directory(self, box: Sandbox) -> None:
        with pytest.raises(CommandNotFound):
            await box.exec("pwd", cwd="/nowhere")

    @pytest.mark.parametrize("argv", [["no-such-program"], ["/no/such/program"], ["/etc"], ["./missing"]])
    async def test_a_missing_program(self, box: Sandbox, argv: list[str]) -> None:
        with pytest.raises(CommandNotFound) as caught:
            await box.exec(argv)
        assert caught.value.side_effects == "none"
        assert (await box.exec("echo still here")).ok

    async def test_a_program_that_a_shell_does_not_find(self, box: Sandbox) -> None:
        result = await box.exec("no-such-program")
        assert result.exit_code == 127
        assert "not found" in result.stderr

    async def test_invalid_commands_are_refused(self, box: Sandbox) -> None:
        for command in ("a\0b", [], [""], ["echo", "a\0b"]):
            with pytest.raises(CommandNotFound):
                await box.exec(command)

    async def test_commands_run_as_an_unprivileged_user(self, box: Sandbox) -> None:
        assert (await box.exec("id -u")).stdout == "65534\n"

    # Timeouts and cancellation.

    async def test_a_timeout_keeps_what_was_written(self, box: Sandbox) -> None:
        start = time.monotonic()
        result = await box.exec("echo early; echo err >&2; sleep 1000; echo late", timeout=1)
        assert time.monotonic() - start < 3 + SLACK
        assert (result.timed_out, result.exit_code) == (True, None)
        assert (result.stdout, result.stderr) == ("early\n", "err\n")
        assert not result.tainted
        assert (await box.exec("echo usable")).stdout == "usable\n"

    @pytest.mark.parametrize(
        "command",
        [
            "(sleep 2; touch late) & sleep 1000",
            "setsid sh -c 'sleep 2; touch late' & sleep 1000",
            "setsid sh -c 'setsid sh -c \"sleep 2; touch late\" & sleep 1000' & sleep 1000",
            "trap '' TERM INT HUP; sleep 2; touch late; sleep 1000",
            "while :; do [ ! -f never ] || exit 1; done",
        ],
        ids=["child", "own session", "twice removed", "ignores signals", "busy"],
    )
    async def test_a_timeout_ends_the_whole_tree(self, box: Sandbox, command: str) -> None:
        result = await box.exec(command, timeout=0.5)
        assert result.timed_out
        assert not result.tainted
        await asyncio.sleep(2.5)
        assert not await box.files.exists("late")

    async def test_a_command_ended_by_a_signal_is_not_a_timeout(self, box: Sandbox) -> None:
        result = await box.exec("kill -9 $$", timeout=20)
        assert (result.exit_code, result.signal, result.timed_out) == (137, 9, False)
        result = await box.exec("kill -TERM $$; sleep 10", timeout=20)
        assert (result.exit_code, result.signal, result.timed_out) == (143, 15, False)

    async def test_a_background_process_does_not_delay_the_result(self, box: Sandbox) -> None:
        start = time.monotonic()
        result = await box.exec("sleep 1000 & echo hi", timeout=60)
        assert result.stdout == "hi\n"
        assert (await box.exec("echo next")).stdout == "next\n"
        assert time.monotonic() - start < 1 + SLACK

    async def test_a_background_process_lives_on(self, box: Sandbox) -> None:
        await box.exec("(sleep 0.5; touch done) > /dev/null 2>&1 &")
        await until(lambda: box.files.exists("done"))

    async def test_cancelling_ends_the_tree(self, box: Sandbox) -> None:
        task = asyncio.ensure_future(box.exec("touch begun; (sleep 2; touch late) & sleep 2; touch late"))
        await until(lambda: box.files.exists("begun"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(2.5)
        assert not await box.files.exists("late")

    async def test_many_at_once(self, box: Sandbox) -> None:
        start = time.monotonic()
        results = await asyncio.gather(*[box.exec(f"sleep 1; echo {number}") for number in range(10)])
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(10)]
        assert time.monotonic() - start < 5 + SLACK / 2
        assert box.state == "ready"

    # Amounts of output, memory and processes.

    async def test_large_output_is_truncated_in_the_middle(self, box: Sandbox) -> None:
        result = await box.exec("echo first; yes | head -c 3000000; echo; echo last", output_limit=10_000)
        assert result.truncated
        assert len(result.stdout_bytes) <= 10_000
        assert result.stdout.startswith("first\ny\ny\n")
        assert result.stdout.endswith("\nlast\n")

    async def test_endless_output_is_bounded(self, box: Sandbox) -> None:
        result = await box.exec("yes", timeout=1, output_limit=100_000)
        assert (result.timed_out, result.truncated) == (True, True)
        assert 0 < len(result.stdout_bytes) <= 100_000
        assert (await box.exec("echo usable")).ok

    async def test_output_of_exactly_the_limit_is_complete(self, box: Sandbox) -> None:
        for limit in (0, 1, 1000, 1001):
            result = await box.exec(f"head -c {limit} /dev/zero", output_limit=limit)
            assert (len(result.stdout_bytes), result.truncated) == (limit, False)
            result = await box.exec(f"head -c {limit + 1} /dev/zero", output_limit=limit)
            assert (len(result.stdout_bytes), result.truncated) == (limit, True)

    async def test_a_megabyte_of_output_is_complete(self, box: Sandbox) -> None:
        result = await box.exec("seq 1 150000")
        assert result.stdout == "".join(f"{number}\n" for number in range(1, 150_001))

    async def test_too_much_memory(self, box: Sandbox) -> None:
        if (await box.stats()).memory_limit is None:
            pytest.skip("this back end has no memory limit for the whole sandbox, and says so in its statistics")
        result = await box.exec(["sh", "-c", "head -c 150000000 /dev/zero | tail -c 100000000 | wc -c"], timeout=60)
        assert result.oom_killed
        assert (await box.exec("echo usable")).stdout == "usable\n"
        assert not (await box.exec("true")).oom_killed

    async def test_too_many_processes(self, box: Sandbox) -> None:
        script = "i=0; while [ $i -lt 100 ]; do i=$((i+1)); sleep 20 & done; wait"
        result = await box.exec(script, timeout=2)
        assert result.timed_out or result.exit_code != 0
        await until(lambda: _works(box))

    # Results.

    async def test_check_raises_for_failures(self, box: Sandbox) -> None:
        with pytest.raises(ExecFailed, match="no luck") as caught:
            await box.exec("echo no luck >&2; exit 3", check=True)
        assert caught.value.details["result"].exit_code == 3
        with pytest.raises(ExecTimeout) as late:
            await box.exec("echo part; sleep 1000", timeout=0.5, check=True)
        assert late.value.details["result"].stdout == "part\n"
        assert (await box.exec("true", check=True)).ok

    async def test_one_key_runs_once(self, box: Sandbox) -> None:
        first = await box.exec("echo x >> log; echo out; exit 5", idempotency_key="k")
        second = await box.exec("echo x >> log; echo out; exit 5", idempotency_key="k")
        assert (first.stdout, first.exit_code) == (second.stdout, second.exit_code) == ("out\n", 5)
        await box.exec("echo x >> log", idempotency_key="another")
        assert await box.files.read_text("log") == "x\nx\n"

    async def test_one_key_at_the_same_time(self, box: Sandbox) -> None:
        command = "echo x >> log; sleep 0.5; echo out"
        results = await asyncio.gather(*[box.exec(command, idempotency_key="k") for _ in range(4)])
        assert {result.stdout for result in results} == {"out\n"}
        assert await box.files.read_text("log") == "x\n"

    async def test_duration_is_that_of_the_command(self, box: Sandbox) -> None:
        assert 0.4 <= (await box.exec("sleep 0.5")).duration < 1 + SLACK


async def _works(box: Sandbox) -> bool:
    try:
        return (await box.exec(["true"])).ok
    except CommandNotFound:
        return False
