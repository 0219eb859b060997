"""Commands through a real agent: input, environment, output, exit codes, timeouts and kills."""

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest
from agent_harness import eventually, local_agent, request, sh

from agentkit.errors import CommandNotFound, SandboxError, UnsupportedFeature


@pytest.fixture
async def agent(tmp_path):
    async with local_agent(tmp_path) as agent:
        yield agent


async def test_output_and_exit_code(agent):
    result = await agent.channel.exec(sh("echo out; echo err >&2; exit 7"))
    assert (result.exit_code, result.stdout, result.stderr, result.signal) == (7, "out\n", "err\n", None)
    assert (result.timed_out, result.truncated, result.oom_killed, result.tainted) == (False,) * 4
    assert result.duration > 0


async def test_a_signal_is_the_exit_code_and_named(agent):
    result = await agent.channel.exec(sh("kill -TERM $$"))
    assert (result.exit_code, result.signal) == (128 + 15, 15)


async def test_bytes_come_as_they_were_written(agent, tmp_path):
    data = bytes(range(256)) * 300 + b"\0\xff\x1b[31m" + b"x" * 100_000
    (tmp_path / "data").write_bytes(data)
    result = await agent.channel.exec(request("cat", str(tmp_path / "data")))
    assert result.stdout_bytes == data


async def test_environment_directory_and_input(agent, tmp_path):
    environment = {"GREETING": "hé", "EMPTY": ""}
    result = await agent.channel.exec(
        sh('echo "$GREETING|$EMPTY|$PWD"; cat', env=environment, cwd=str(tmp_path), stdin=b"in\0put")
    )
    assert result.stdout_bytes == f"hé||{tmp_path}\n".encode() + b"in\0put"


async def test_without_input_there_is_an_end_of_file(agent):
    assert (await agent.channel.exec(request("cat"))).stdout_bytes == b""


async def test_input_larger_than_every_buffer(agent):
    data = os.urandom(3_000_000)
    result = await agent.channel.exec(request("sh", "-c", "sleep 0.2; sha256sum; echo done", stdin=data))
    assert result.stdout.endswith("done\n")
    result = await agent.channel.exec(request("wc", "-c", stdin=data))
    assert result.stdout.strip() == "3000000"


async def test_unread_input_is_not_an_error(agent):
    assert (await agent.channel.exec(request("true", stdin=b"x" * 5_000_000))).exit_code == 0


async def test_arguments_are_passed_as_they_are(agent):
    words = ("", " ", "a\nb", "'\"$(id)", "é", "-n", "\udcff")
    result = await agent.channel.exec(request("printf", "[%s]", *words))
    assert result.stdout_bytes == b"".join(b"[" + os.fsencode(word) + b"]" for word in words)


@pytest.mark.parametrize(
    "bad",
    [
        request("no-such-program-here"),
        request("/no/such/file"),
        request("true", cwd="/no/such/directory"),
        request("/etc/passwd"),
        request("/tmp"),
        request("echo", "x" * 900_000),
        request("echo", "x" * 2_000_000),
    ],
)
async def test_commands_that_cannot_start_raise_command_not_found(agent, bad):
    with pytest.raises(CommandNotFound):
        await agent.channel.exec(bad)
    with pytest.raises(CommandNotFound):
        await agent.channel.spawn(bad)
    assert (await agent.channel.exec(request("true"))).ok


async def test_nul_bytes_are_refused_here(agent):
    with pytest.raises(ValueError, match="NUL"):
        await agent.channel.exec(request("echo", "a\0b"))


async def test_signals_and_descriptors_of_the_agent_are_not_inherited(agent):
    result = await agent.channel.exec(
        sh("ls /proc/self/fd | wc -l; grep -E 'SigIgn|SigBlk' /proc/self/status; cat /proc/self/oom_score_adj")
    )
    lines = result.stdout.split("\n")
    assert int(lines[0]) <= 4  # 0, 1, 2 and the directory that ls reads.
    # glibc ignores its own two signals, 32 and 33, in everything that it starts.
    assert all(int(line.split()[1], 16) & 0x7FFF_FFFF == 0 for line in lines[1:3])
    assert int(lines[3]) >= 500


async def test_output_beyond_the_limit_keeps_beginning_and_end(agent):
    result = await agent.channel.exec(sh("seq 1 200000", limit=10_000))
    whole = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    assert result.truncated
    assert result.stdout_bytes == whole[:5000] + whole[-5000:]
    exact = await agent.channel.exec(sh("head -c 10000 /dev/zero", limit=10_000))
    assert len(exact.stdout_bytes) == 10_000
    assert not exact.truncated
    none = await agent.channel.exec(sh("echo hello", limit=0))
    assert none.stdout_bytes == b""


async def test_a_flood_stays_within_bounds(agent):
    own, before = psutil.Process(), agent.memory()
    start = own.memory_info().rss
    result = await agent.channel.exec(sh("yes | head -c 400000000; echo; echo end", limit=1 << 20, timeout=100))
    assert result.truncated
    assert len(result.stdout_bytes) == 1 << 20
    assert result.stdout.endswith("end\n")
    assert agent.memory() - before < 4 << 20
    assert own.memory_info().rss - start < 16 << 20


async def test_a_timeout_keeps_what_was_written_and_kills(agent):
    start = time.monotonic()
    result = await agent.channel.exec(sh("echo before; sleep 1000", timeout=0.5))
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == "before\n"
    assert not result.tainted
    assert time.monotonic() - start < 0.5 + 2 + 5  # The last is for busy machines.
    assert agent.descendants() == []
    assert (await agent.channel.exec(request("true"))).ok


_ESCAPES = {
    "ignores": "trap '' TERM INT HUP; sleep 1000 & sleep 1000",
    "setsid": "setsid sleep 1000 & sleep 1000",
    "double fork": "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; sleep 1000",
    "hidden": "(env -i setsid sleep 1000 &) ; (setsid env -i sleep 1000 &) ; sleep 1000",
    "many": "for i in $(seq 40); do (setsid sleep 1000 &); done; sleep 1000",
    "generations": "while :; do (setsid sleep 1000 &); sleep 0.01; done",
}


@pytest.mark.parametrize("escape", _ESCAPES, ids=str)
async def test_a_timeout_kills_the_whole_tree(agent, escape):
    result = await agent.channel.exec(sh(_ESCAPES[escape], timeout=1.0))
    assert result.timed_out
    assert not result.tainted
    await eventually(lambda: agent.descendants() == [], 5)


async def test_a_chain_of_forks_is_caught(agent):
    # Each generation starts the next one and ends: killing only the visible processes is always too late.
    script = (
        "import os,time\nend = time.time() + 60\n"  # it ends by itself where a test was killed in the middle
        "while time.time() < end:\n    if os.fork():\n        time.sleep(0.001); os._exit(0)\n    os.setsid()\n"
    )
    result = await agent.channel.exec(sh(f"python3 -c '{script}' & sleep 1000", timeout=1.0))
    assert result.timed_out
    assert not result.tainted
    await eventually(lambda: agent.descendants() == [], 5)


async def test_a_timeout_spares_others(agent):
    await agent.channel.exec(sh("setsid sleep 1001 >/dev/null 2>&1 &"))
    other = asyncio.ensure_future(agent.channel.exec(sh("(setsid sleep 1002 &) ; sleep 3; echo alive")))
    await asyncio.sleep(0.5)
    result = await agent.channel.exec(sh("(setsid sleep 1003 &) ; sleep 1000", timeout=0.5))
    assert result.timed_out
    left = {" ".join(process.cmdline()) for process in agent.descendants()}
    assert {"sleep 1001", "sleep 1002", "sleep 3"} <= left
    assert "sleep 1003" not in left
    assert (await other).stdout == "alive\n"


async def test_a_background_child_delays_nothing_and_lives_on(agent):
    start = time.monotonic()
    result = await agent.channel.exec(
        sh("(sleep 1000; echo late) & (while :; do echo chatter; sleep 0.1; done) & echo hi")
    )
    assert time.monotonic() - start < 5
    assert result.exit_code == 0
    assert "hi\n" in result.stdout
    assert (await agent.channel.exec(request("true"))).ok
    await asyncio.sleep(0.5)
    assert len(agent.descendants()) >= 3  # A pipe without a reader did not end it.


async def test_cancelling_kills_the_tree(agent):
    task = asyncio.ensure_future(agent.channel.exec(sh("(setsid sleep 1000 &) ; sleep 1000")))
    await eventually(lambda: len(agent.descendants()) >= 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert agent.descendants() == []
    assert (await agent.channel.exec(request("true"))).ok


async def test_many_at_once(agent):
    async def one(number: int) -> None:
        result = await agent.channel.exec(sh(f"echo {number}; exit {number % 256}"))
        assert (result.stdout, result.exit_code) == (f"{number}\n", number % 256)

    await asyncio.gather(*[one(number) for number in range(200)])
    assert len(os.listdir(f"/proc/{agent.pid}/fd")) < 12


async def test_a_key_runs_once(agent, tmp_path):
    script = f"echo ran >> {tmp_path}/ran; sleep 0.3; echo $RANDOM$$"
    results = await asyncio.gather(*[agent.channel.exec(sh(script, key="one")) for _ in range(5)])
    results.append(await agent.channel.exec(sh("echo something else", key="one")))
    assert len({result.stdout_bytes for result in results}) == 1
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert (await agent.channel.exec(sh("echo other", key="two"))).stdout == "other\n"


async def test_a_key_outlives_the_memory_of_its_result(agent, tmp_path):
    await agent.channel.exec(sh(f"echo ran >> {tmp_path}/ran", key="first"))
    await asyncio.gather(*[agent.channel.exec(request("true", key=str(number))) for number in range(300)])
    with pytest.raises(SandboxError, match="already ran") as caught:
        await agent.channel.exec(sh(f"echo ran >> {tmp_path}/ran", key="first"))
    assert caught.value.side_effects == "done"
    assert (tmp_path / "ran").read_text() == "ran\n"


async def test_a_repeated_call_may_have_a_smaller_output_limit(agent):
    whole = await agent.channel.exec(sh("seq 1 1000", key="k"))
    less = await agent.channel.exec(sh("seq 1 1000", key="k", limit=10))
    assert whole.stdout.startswith("1\n2\n3")
    assert less.stdout_bytes == whole.stdout_bytes[:5] + whole.stdout_bytes[-5:]
    assert less.truncated


async def test_a_failed_start_does_not_use_up_a_key(agent):
    with pytest.raises(CommandNotFound):
        await agent.channel.exec(request("no-such-program", key="k"))
    assert (await agent.channel.exec(request("true", key="k"))).ok


async def test_spawn_streams_both_ways(agent):
    process = await agent.channel.spawn(sh("while read line; do echo got $line; echo e >&2; done; exit 4"))
    output = {"stdout": b"", "stderr": b""}

    async def read() -> None:
        async for stream, data in process:
            output[stream] += data

    reader = asyncio.ensure_future(read())
    for number in range(3):
        await process.write(b"%d\n" % number)
        await eventually(lambda number=number: output["stdout"].count(b"\n") > number)
    await process.close_stdin()
    result = await process.wait()
    await reader
    assert result.exit_code == 4
    assert output == {"stdout": b"got 0\ngot 1\ngot 2\n", "stderr": b"e\ne\ne\n"}
    assert result.stdout_bytes == b""


async def test_a_slow_reader_holds_the_program_back(agent, tmp_path):
    script = f"import os\nfor i in range(400):\n os.write(1, b'x' * 65536); open('{tmp_path}/n', 'w').write(str(i))"
    process = await agent.channel.spawn(request("python3", "-c", script, limit=1 << 18))
    await asyncio.sleep(2)
    assert int((tmp_path / "n").read_text()) < 20
    total = 0
    async for _, data in process:
        total += len(data)
    assert total == 400 * 65536
    assert (await process.wait()).exit_code == 0


async def test_wait_collects_unread_output(agent):
    process = await agent.channel.spawn(sh("seq 1 100000; echo e >&2", limit=1000))
    result = await process.wait()
    assert result.truncated
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("100000\n")
    assert result.stderr == "e\n"
    assert (await process.wait()).stdout == result.stdout


async def test_spawn_kill_and_timeout(agent):
    process = await agent.channel.spawn(sh("sleep 1000 & sleep 1000"))
    await process.kill()
    assert (await process.wait()).signal == 9
    await process.kill()
    process = await agent.channel.spawn(sh("echo x; sleep 1000", timeout=0.5))
    result = await process.wait()
    assert result.timed_out
    assert result.stdout == "x\n"


async def test_writing_to_closed_input_raises_broken_pipe(agent):
    process = await agent.channel.spawn(sh("exec <&-; sleep 1000"))
    await asyncio.sleep(0.5)
    with pytest.raises(BrokenPipeError):
        await process.write(b"x" * 1_000_000)
    await process.kill()
    await process.wait()


async def test_spawn_takes_no_key(agent):
    with pytest.raises(UnsupportedFeature):
        await agent.channel.spawn(request("true", key="k"))


async def test_statistics(agent):
    stats = await agent.channel.stats()
    assert stats.workspace_size is None or stats.workspace_size > 0
    assert 0 <= await agent.channel.ping(30) < 30


async def test_the_agent_is_small(agent):
    for _ in range(50):
        await agent.channel.exec(request("true"))
    memory = psutil.Process(agent.pid).memory_info()
    assert memory.rss - memory.shared < 4 << 20
