"""Back ends by name and their shared instances."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable

import pytest

from agentkit.errors import ConfigError, EngineUnavailable
from agentkit.sandboxes import Sandbox, backends
from agentkit.sandboxes.testing.fake import FakeBackend

Install = Callable[..., None]
HERE = "test_backends:ThirdParty"


class ThirdParty(FakeBackend):
    """A back end of another package."""

    name = "theirs"
    started = 0
    closed = 0
    refuse = False

    async def start(self) -> None:
        type(self).started += 1
        await asyncio.sleep(0.05)
        if self.refuse:
            raise EngineUnavailable("no engine here; start one")
        await super().start()

    async def close(self) -> None:
        type(self).closed += 1
        await super().close()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.setattr(ThirdParty, "started", 0)
    monkeypatch.setattr(ThirdParty, "closed", 0)

    def install(*points: tuple[str, str]) -> None:
        made = importlib.metadata.EntryPoints(
            importlib.metadata.EntryPoint(name, value, backends.GROUP) for name, value in points
        )
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: made.select(**wanted))

    return install


def test_names(install: Install) -> None:
    install(("theirs", HERE))
    assert backends.names() == ["docker", "local", "remote", "theirs"]


async def test_servers_are_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", "a-token-of-the-tests-alone")
    assert backends.backend("remote:http://127.0.0.1:1,http://127.0.0.1:2").name == "remote"
    with pytest.raises(ConfigError, match="'elsewhere' is not the URL of a server"):
        backends.backend("remote:elsewhere")
    with pytest.raises(ConfigError, match="names servers, which only 'remote' has; use 'docker'"):
        backends.backend("docker:http://127.0.0.1:1")


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'docker'"):
        backends.backend("doker")
    with pytest.raises(ConfigError, match="choose one of docker, local"):
        backends.backend("qqq")


async def test_other_values_are_an_error() -> None:
    for wrong in (3, None, FakeBackend):
        for use in (Sandbox.create, Sandbox.list):
            with pytest.raises(ConfigError, match=r"backend=.*must be the name of a back end"):
                await use(backend=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="snapshot='ak-1' must be a Snapshot"):
        await Sandbox.create(snapshot="ak-1")  # pyright: ignore[reportArgumentType]


def test_third_party_back_ends(install: Install) -> None:
    install(
        ("theirs", HERE), ("broken", "no.such.module:X"), ("odd", "builtins:dict"), ("twice", HERE), ("twice", HERE)
    )
    assert isinstance(backends.backend("theirs"), ThirdParty)
    instance = ThirdParty()
    assert backends.backend(instance) is instance
    for name, why in (("broken", "does not load"), ("odd", "is a dict"), ("twice", "claimed by")):
        with pytest.raises(ConfigError, match=why):
            backends.backend(name)


def test_a_built_in_name_cannot_be_taken(install: Install) -> None:
    install(("docker", HERE))
    with pytest.raises(ConfigError, match="built in"):
        backends.backend("docker")


async def test_borrowers_share_one_instance(install: Install) -> None:
    install(("theirs", HERE))
    boxes = await asyncio.gather(*[Sandbox.create(backend="theirs") for _ in range(5)])
    assert len({id(box.backend) for box in boxes}) == 1
    assert (ThirdParty.started, ThirdParty.closed) == (1, 0)
    async with boxes[0].fork() as child:
        assert child.backend is boxes[0].backend
    await asyncio.gather(*[box.close() for box in boxes])
    await boxes[0].close()
    assert (ThirdParty.started, ThirdParty.closed) == (1, 1)


async def test_an_own_instance_stays_open(install: Install) -> None:
    backend = ThirdParty()
    await backend.start()
    async with Sandbox.create(backend=backend):
        pass
    assert ThirdParty.closed == 0
    await backend.close()


async def test_an_engine_that_does_not_start(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(("theirs", HERE))
    monkeypatch.setattr(ThirdParty, "refuse", True)
    found = await asyncio.gather(*[Sandbox.create(backend="theirs") for _ in range(3)], return_exceptions=True)
    assert [type(error) for error in found] == [EngineUnavailable] * 3
    assert (ThirdParty.started, ThirdParty.closed) == (1, 1)
    monkeypatch.setattr(ThirdParty, "refuse", False)
    async with Sandbox.create(backend="theirs"):
        pass
    assert (ThirdParty.started, ThirdParty.closed) == (2, 2)


async def test_a_borrower_is_cancelled_during_the_start(install: Install) -> None:
    install(("theirs", HERE))
    one, two = [asyncio.ensure_future(backends.borrow("theirs")) for _ in range(2)]
    await asyncio.sleep(0.01)
    one.cancel()
    _, release = await two
    assert one.cancelled()
    assert ThirdParty.closed == 0
    await release()
    await release()
    assert (ThirdParty.started, ThirdParty.closed) == (1, 1)
