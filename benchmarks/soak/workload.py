"""Users of sandboxes, which run ordinary and hostile programs and check every answer.

Invariant: each operation is counted once, by its outcome: ``ok``, an unsuccessful result (``timed out``, ``exit 137``),
a typed error, or ``cancelled``. Anything else, such as a wrong answer, is a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agentkit.errors import BreakerOpen, PoolExhausted, SandboxError
from agentkit.sandboxes import ExecResult, Sandbox
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.recovery.supervisor import SandboxRecovery, SupervisedSandbox, Supervisor

T = TypeVar("T")

BOUND = 120.0
"""Seconds within which every operation must end, under all faults."""
ENV = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
BOMB = "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.1)"


class Tally:
    """Counts of begun operations, their outcomes, and violations."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: list[float] = []
        """Of each command that was answered in order."""
        self.violations: list[str] = []
        self.recoveries = 0

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    async def of(self, name: str, work: Awaitable[T]) -> T:
        """Await the operation and count it. Its exceptions propagate."""
        clock = asyncio.get_running_loop().time
        self.begun[name] += 1
        start, outcome = clock(), "ok"
        try:
            result = await work
            ended: Any = result
            if isinstance(ended, ExecResult) and not ended.ok:
                outcome = "timed out" if ended.timed_out else f"exit {ended.exit_code}"
            elif name == "exec":
                self.seconds.append(clock() - start)
            return result
        except SandboxError as error:
            reason = error.details.get("reason")
            outcome = f"{type(error).__name__}{f' ({reason})' if isinstance(reason, str) else ''}"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BrokenPipeError:
            outcome = "BrokenPipeError"  # what the documentation promises to who writes to what has ended
            raise
        except BaseException as error:
            outcome = "untyped"
            self.violations.append(f"{name} raised {type(error).__name__}: {error}")
            raise
        finally:
            self.ended[name][outcome] += 1
            self.check(clock() - start < BOUND, f"{name} took {clock() - start:.0f} s and ended as {outcome}")


class User:
    """A user that acquires one sandbox after another."""

    def __init__(self, pool: SandboxPool, tally: Tally, rng: random.Random) -> None:
        self._pool, self._tally, self._rng = pool, tally, rng

    async def use(self) -> None:
        """Acquire a sandbox, use it until it breaks or enough operations ran, release it."""
        supervised = self._rng.random() < 0.4
        try:
            await (self._under_supervision() if supervised else self._directly())
        except (PoolExhausted, BreakerOpen):
            await asyncio.sleep(0.5)
        except (SandboxError, BrokenPipeError):
            pass  # counted where it was raised

    async def _directly(self) -> None:
        jobs: list[Callable[[Sandbox], Awaitable[None]]] = [
            self._command, self._command, self._files, self._shell, self._environment, self._hostile,
        ]  # fmt: skip
        async with contextlib.AsyncExitStack() as stack:
            box = await self._tally.of("acquire", stack.enter_async_context(self._pool.acquire()))
            for _ in range(self._rng.randint(1, 10)):
                await self._rng.choice(jobs)(box)

    async def _under_supervision(self) -> None:
        recovery: SandboxRecovery = self._rng.choice(["restart", "replay", "replay", "fail"])
        supervisor = Supervisor(
            self._pool, recovery=recovery, replicas=int(recovery == "replay" and self._rng.random() < 0.3)
        )
        async with contextlib.AsyncExitStack() as stack:
            box = await self._tally.of("acquire", stack.enter_async_context(supervisor.run()))
            try:
                await self._log(box, recovery)
            finally:
                self._tally.recoveries += box.recoveries

    async def _log(self, box: SupervisedSandbox, recovery: str) -> None:
        """Write lines one by one; after a recovery by replay the file holds those of the commands that succeeded."""
        done: list[int] = []
        for number in range(self._rng.randint(1, 15)):
            try:
                if (await self._tally.of("supervised exec", box.exec(f"echo {number} >> log", timeout=10))).ok:
                    done.append(number)
            except SandboxError:
                await asyncio.sleep(0)  # the news of its end reaches the supervisor
                if box.status.observed == "failed":
                    raise
            await asyncio.sleep(self._rng.uniform(0, 0.5))
        if recovery == "replay" and done:
            said = await self._tally.of("supervised read", box.read("log"))
            self._tally.check(said.decode().split() == [str(one) for one in done], f"replayed {said!r}, not {done}")

    async def _command(self, box: Sandbox) -> None:
        token = f"{self._rng.getrandbits(64):x}"
        result = await self._tally.of("exec", box.exec(["cat"], stdin=token, timeout=10))
        self._tally.check(not result.ok or result.stdout == token, f"{token} came back as {result.stdout!r}")

    async def _files(self, box: Sandbox) -> None:
        data = self._rng.randbytes(self._rng.randint(0, 100_000))
        await self._tally.of("write", box.files.write("data", data))
        said = await self._tally.of("read", box.files.read("data"))
        self._tally.check(said == data, f"{len(data)} bytes came back as {len(said)} others")
        await self._tally.of("remove", box.files.remove("data"))

    async def _shell(self, box: Sandbox) -> None:
        async with await self._tally.of("shell", box.shell()) as shell:
            token = f"{self._rng.getrandbits(64):x}"
            first = await self._tally.of("shell run", shell.run(f"x={token}", timeout=10))
            if self._rng.random() < 0.3:
                await self._tally.of("shell run", shell.run("yes", timeout=0.3, output_limit=10_000))
            last = await self._tally.of("shell run", shell.run("echo $x", timeout=10))
            if first.ok and last.ok:
                self._tally.check(last.stdout in (f"{token}\n", "\n"), f"the shell said {last.stdout!r}, not {token}")

    async def _environment(self, box: Sandbox) -> None:
        """Step an environment that runs in the sandbox."""
        process = await self._tally.of("spawn", box.spawn(["python3", "-c", ENV], timeout=60))
        try:
            said = aiter(process)
            for number in range(self._rng.randint(1, 20)):
                answer = await self._tally.of("step", self._step(process, said, f"{number}-ab"))
                self._tally.check(answer == f"ba-{str(number)[::-1]}\n", f"step {number} was answered by {answer!r}")
        finally:
            with contextlib.suppress(SandboxError):
                await process.kill()

    async def _step(self, process: Any, said: Any, action: str) -> str:
        await process.write(f"{action}\n".encode())
        answer = b""
        try:
            while not answer.endswith(b"\n"):
                answer += (await asyncio.wait_for(anext(said), 30))[1]
            return answer.decode()
        except (asyncio.TimeoutError, StopAsyncIteration):
            # Starved, or killed for its memory or time; its result says which.
            result = await asyncio.wait_for(process.kill(), 30) or await process.wait()
            raise SandboxError(f"the environment ended: {result.exit_code}", reason="ended") from None

    async def _hostile(self, box: Sandbox) -> None:
        name, command, timeout = self._rng.choice(
            [
                ("memory hog", "head -c 400000000 /dev/zero | tail -c 300000000 | wc -c", 10.0),
                ("fork bomb", f"python3 -c '{BOMB}'", 1.0),
                ("disk fill", "head -c 99999999 /dev/zero > fill; rm fill; exit 1", 10.0),
                ("output flood", "yes", 0.5),
                ("runaway", "setsid sleep 1000 & sleep 1000", 0.5),
            ]
        )
        result = await self._tally.of(name, box.exec(command, timeout=timeout, output_limit=10_000))
        self._tally.check(len(result.stdout_bytes) <= 10_000, f"{name}: {len(result.stdout_bytes)} bytes of output")
        self._tally.check(name != "runaway" or result.timed_out, f"a runaway ended with {result.exit_code}")
