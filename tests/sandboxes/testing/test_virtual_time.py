"""Virtual time."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.virtual_time import SimulationStuck


def test_waiting_takes_no_time_and_keeps_its_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def at(name: str, when: float) -> None:
            await asyncio.sleep(when)
            seen.append((name, loop.time()))

        await asyncio.gather(at("c", 86400), at("a", 1), at("b", 3600))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1000)
        return [*seen, ("end", loop.time())]

    start = time.monotonic()
    assert virtual_time.run(main()) == [("a", 1), ("b", 3600), ("c", 86400), ("end", 87400)]
    assert time.monotonic() - start < 60


def test_an_endless_program_times_out() -> None:
    with pytest.raises(SimulationStuck, match="every task waits"):
        virtual_time.run(asyncio.Event().wait())

    async def forever() -> None:
        for _ in itertools.count():
            await asyncio.sleep(10)

    with pytest.raises(SimulationStuck, match="after 500 simulated"):
        virtual_time.run(forever(), limit=500)


def test_remaining_tasks_are_cancelled() -> None:
    seen = []

    async def left() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            seen.append("cleaned up")

    async def main() -> str:
        task = asyncio.ensure_future(left())
        await asyncio.sleep(1)
        assert not task.done()
        return "done"

    assert virtual_time.run(main()) == "done"
    assert seen == ["cleaned up"]
