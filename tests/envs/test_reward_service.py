"""The recipe of docs/integrations/reward_service.md: threads, event loops, forked and spawned processes, Ray."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from requiring import require

from agentkit.errors import EngineUnavailable
from agentkit.sandboxes.backends.local.backend import LocalBackend

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))

from reward_service import Programs, sandboxes  # noqa: E402  # pyright: ignore[reportMissingImports]

SQUARE, NINE, ENDLESS = "print(int(input()) ** 2)", "print(9)", "while True: pass"
CASES = (("3", "9"), ("5", "25"))
SERVICE = Programs(backend="local")


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def _local_sandboxes() -> None:
    try:
        asyncio.run(LocalBackend().start())
    except EngineUnavailable as error:
        require(False, str(error))


class Completions:
    """Scores programs in the workers of a ``DataLoader``."""

    def __init__(self, programs: list[str]) -> None:
        self._programs = programs

    def __len__(self) -> int:
        return len(self._programs)

    def __getitem__(self, index: int) -> tuple[int, float | None]:
        (score,) = SERVICE([self._programs[index]], CASES)
        return os.getpid(), score


def score_one(program: str) -> float | None:
    return SERVICE([program], CASES)[0]


def test_threads_and_event_loops_share_a_pool() -> None:
    assert SERVICE([SQUARE, NINE, ENDLESS, "raise SystemExit(3)"], CASES) == [1.0, 0.5, 0.0, 0.0]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(score_one, [SQUARE, NINE, SQUARE])) == [1.0, 0.5, 1.0]
    for _ in range(2):  # each in a loop of its own
        assert asyncio.run(SERVICE.scores([NINE, SQUARE], CASES)) == [0.5, 1.0]
    assert sandboxes.cache_info().currsize == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_have_pools_of_their_own(method: str) -> None:
    assert score_one(SQUARE) == 1.0  # a pool that the child must not use
    score = functools.partial(SERVICE, cases=CASES)  # nothing of this module, which a spawned process would import
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(score, [[NINE], [SQUARE], [NINE]], chunksize=1) == [[0.5], [1.0], [0.5]]
    assert score_one(SQUARE) == 1.0


def test_workers_of_a_data_loader() -> None:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Completions([SQUARE, NINE] * 2), num_workers=2, batch_size=None)  # pyright: ignore[reportArgumentType]
    found = list(loader)
    assert [score for _, score in found] == [1.0, 0.5] * 2
    assert len({process for process, _ in found} | {os.getpid()}) == 3


def test_a_failed_engine_is_no_score() -> None:
    code = "from reward_service import Programs; print(Programs('remote')(['print(9)'], [('3', '9')]))"
    env = {"AGENTKIT_SANDBOX_URL": "http://127.0.0.1:9", "AGENTKIT_SANDBOX_TOKEN": "a-token-of-this-test-alone"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "[None]\n"


def test_the_settings_are_all_that_is_copied() -> None:
    assert pickle.loads(pickle.dumps(SERVICE)) == SERVICE


def test_the_block_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "integrations" / "reward_service.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"test_reward_service\.py: blocks -->\n```python\n(.*?)```", page, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block, {})
    assert out.getvalue() == "[1.0, 0.5, 0.0]\n"


@pytest.mark.slow
def test_ray_actors() -> None:
    from agentkit.trainers.cluster.ray_cluster import local_cluster, ray

    class Blocking:
        def __init__(self, service: Programs) -> None:
            self._service = service

        def score(self, programs: list[str]) -> list[float | None]:
            return self._service(programs, CASES)

    class Asynchronous:
        def __init__(self, service: Programs) -> None:
            self._service = service

        async def score(self, programs: list[str]) -> list[float | None]:
            return await self._service.scores(programs, CASES)

    with local_cluster(2):
        for kind in (Blocking, Asynchronous):
            environment = {"env_vars": {"PYTHONPATH": str(ROOT / "examples")}}
            actor: Any = ray.remote(kind).options(runtime_env=environment).remote(SERVICE)
            assert ray.get(actor.score.remote([SQUARE, NINE])) == [1.0, 0.5]
            ray.kill(actor)
