"""Attribution of evaluation failures to the patch or the environment, with real sandboxes that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator

import pytest
from requiring import require

from agentkit.envs.swebench import evaluation
from agentkit.errors import SandboxError, SandboxLost
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.backends.local import state as local_state


async def die(box: Sandbox, *_: object) -> evaluation.Verdict:
    """Simulate a patch that ends its sandbox."""
    state = local_state.load(box.id)
    assert state is not None
    for process in state.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    while True:
        await box.exec("sleep 1")


async def be_removed(box: Sandbox, *_: object) -> evaluation.Verdict:
    other = await Sandbox.connect(box.id, backend=box.backend)
    await other.close(remove=True)
    while True:
        await box.exec("sleep 1")


async def use_up_memory(box: Sandbox, *_: object) -> evaluation.Verdict:
    raise SandboxLost("the tests ran out of memory", reason="oom")


@pytest.mark.parametrize(
    ("happens", "outcome", "sandboxes"),
    [
        ((die, None), "resolved", 2),
        ((die, die), "sandbox failed", 2),
        ((be_removed, be_removed, None), "resolved", 3),
        ((be_removed, die, be_removed, die), "sandbox failed", 4),
        ((be_removed, be_removed, be_removed), "", 3),
        ((use_up_memory,), "out of memory", 1),
    ],
)
async def test_attribution_of_evaluation_failures(
    happens, outcome: str, sandboxes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    made = 0
    script = iter(happens)

    @contextlib.asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        nonlocal made
        made += 1
        async with Sandbox.create(backend="local") as box:
            yield box

    async def evaluate(box: Sandbox, *arguments: object) -> evaluation.Verdict:
        event = next(script)
        return evaluation.Verdict("resolved") if event is None else await event(box, *arguments)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    if outcome:
        assert (await evaluation.evaluate_twice(fresh, {}, b"patch", 60)).outcome == outcome
    else:
        with pytest.raises(SandboxError):
            await evaluation.evaluate_twice(fresh, {}, b"patch", 60)
    assert made == sandboxes
