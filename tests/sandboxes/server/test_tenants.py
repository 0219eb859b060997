"""Tenants of a sandbox server: attacks of one on another, their quotas, and the change of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_harness import runtime_directory

from agentkit.errors import AccessDenied, ConfigError, QuotaExceeded, SandboxError
from agentkit.sandboxes import Network, Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server.app import SandboxApp, SandboxServer
from agentkit.sandboxes.server.config import ServerConfig, TenantConfig, read_config
from agentkit.sandboxes.server.policy import Policy, Quota, TenantQuota, permitted
from agentkit.sandboxes.server.protocol import pack_arguments, pack_json, pack_request, unpack_error
from agentkit.sandboxes.server.shares import fits
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.sandboxes.types import ExecRequest

__all__ = ["runtime_directory"]

OPERATOR = "the-token-of-the-operator"
TOKENS = {"alice": "the-token-of-alice-alone", "mallory": "the-token-of-mallory-alone"}
PATIENCE = 20.0
SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))
INVENTED = "ak-0000000000000000"


def tenant(name: str, **fields: Any) -> TenantConfig:
    return TenantConfig(token_sha256=(hashlib.sha256(TOKENS[name].encode()).hexdigest(),), **fields)


def configured(quota: Quota | None = None, **tenants: TenantConfig) -> ServerConfig:
    return ServerConfig(quota=quota or Quota(), tenants={name: tenant(name) for name in TOKENS} | tenants)


@contextlib.asynccontextmanager
async def served(config: ServerConfig, backend: Backend | None = None) -> AsyncIterator[SandboxServer]:
    fake = FakeBackend(create_seconds=0.01, call_seconds=0.0)
    async with SandboxServer(backend or fake, token=OPERATOR, config=config) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(server: SandboxServer, token: str) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend(server.url, token, patience=1.0)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.02)


# Attacks


def attacks(id: str, key: str, handle: str, call: str, snapshot: str, boot: str) -> list[tuple[str, str, bytes]]:
    """Return requests that use these names, by each route that takes a name."""
    run = pack_request(ExecRequest(argv=("id",), timeout=5.0, cwd="/", output_limit=1000))
    file = pack_arguments("/workspace/f", 1000, b"x")
    spec = SMALL.model_dump(mode="json")
    copy = {"spec": {**spec, "image": f"agentkit-snapshot/{boot}/{snapshot}"}, "labels": {}}
    return [
        ("PUT", f"sandboxes/{INVENTED[:-1]}1", pack_json(copy)),
        ("GET", f"sandboxes/{id}", b""),
        ("GET", f"sandboxes/{id}/logs?tail=5", b""),
        *[("POST", f"sandboxes/{id}/{verb}", b"") for verb in ("attach", "restart", "snapshot", "pause", "resume")],
        ("POST", f"sandboxes/{id}/restore", pack_json(snapshot)),
        ("POST", f"sandboxes/{id}/extend", pack_json(0.01)),
        *[("POST", f"channels/{key}/{verb}", run) for verb in ("exec", "spawn")],
        *[
            ("POST", f"channels/{key}/{verb}", file)
            for verb in ("read", "write", "list", "stat", "remove", "mkdir", "stats", "ping")
        ],
        *[("POST", f"processes/{handle}/{verb}", b"") for verb in ("input", "end", "kill?number=9")],
        ("DELETE", f"calls/{call}", b""),
        ("DELETE", f"snapshots/{snapshot}", b""),
        ("DELETE", f"sandboxes/{id}", b""),
        ("POST", "list", pack_json({"agentkit.id": id})),
    ]


@pytest.mark.usefixtures("runtime_directory")
async def test_no_request_reaches_another_tenant() -> None:
    """A tenant that knows all names gets the same answers as for names that do not exist, and changes nothing."""
    async with (
        served(configured(), LocalBackend()) as server,
        connected(server, TOKENS["alice"]) as alice,
        Sandbox.create(SMALL, backend=alice) as box,
        httpx.AsyncClient(base_url=f"{server.url}/v1/", trust_env=False, timeout=PATIENCE) as http,
    ):
        await box.files.write("f", b"secret")
        snapshot = await box.snapshot()
        echo = await box.spawn("cat", timeout=60)
        sleep = asyncio.ensure_future(box.exec("sleep 3; echo done"))
        victim = server.tenants["alice"]
        assert isinstance(victim.app, SandboxApp)
        await until(lambda: victim.sessions.calls.running)
        names = {
            "id": box.id,
            "key": victim.sessions._sessions[box.id].key,
            "handle": next(iter(victim.app._processes)),
            "call": next(iter(victim.sessions.calls.running)),
            "snapshot": snapshot.id,
            "boot": victim.sessions.boot,
        }
        invented = {name: INVENTED if value.startswith("ak-") else "0" * 32 for name, value in names.items()}

        async def ask(token: str, method: str, path: str, body: bytes) -> httpx.Response:
            return await http.request(method, path, content=body, headers={"authorization": f"Bearer {token}"})

        owned = attacks(**names)
        harmless = [each for each in owned if each[0] == "GET" or each[1].endswith(("exec", "read", "stat"))]
        assert {(await ask(TOKENS["alice"], *each)).status_code for each in harmless} == {200}
        for token in (TOKENS["mallory"], OPERATOR):
            for real, fake in zip(owned, attacks(**invented), strict=True):
                told, expected = await ask(token, *real), await ask(token, *fake)
                text = told.text
                for name, value in names.items():
                    text = text.replace(value, invented[name])
                assert (told.status_code, text) == (expected.status_code, expected.text), real[:2]
                assert b"secret" not in told.content
        with pytest.raises(SandboxError, match="already exists"):
            async with connected(server, TOKENS["mallory"]) as mallory:
                await mallory.create(box.id, SMALL, {})
        assert (await sleep).stdout == "done\n"
        await echo.write(b"on\n")
        await echo.close_stdin()
        assert [data async for _, data in echo] == [b"on\n"]
        assert await box.files.read("f") == b"secret"
        async with Sandbox.create(SMALL, backend=alice, snapshot=snapshot) as copy:
            assert await copy.files.read("f") == b"secret"


async def test_a_tenant_gets_no_events_of_another() -> None:
    async with served(configured()) as server, httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        headers = {"authorization": f"Bearer {TOKENS['mallory']}", "agentkit-client": "mallory"}
        async with connected(server, TOKENS["alice"]) as alice:
            box = await Sandbox.create(SMALL, backend=alice)
            key = server.tenants["alice"].sessions._sessions[box.id].key
            stream = http.stream("POST", f"{server.url}/v1/stream", content=pack_json([key]), headers=headers)
            async with stream as response:
                lines = response.aiter_lines()
                await anext(lines)
                assert await anext(lines) == f'{{"lost":{{"{key}":"engine_down"}}}}'  # as for any unknown key
                server.tenants["alice"].sessions.backend.die(box.id)  # pyright: ignore[reportAttributeAccessIssue]
                await until(lambda: box.loss)
                await box.close()
                server.tenants.drain(True)
                told = ""
                while '"accepting":false' not in told:
                    told += await anext(lines)
                assert box.id not in told
                assert key not in told


async def test_a_client_id_of_another_tenant_keeps_no_sandbox() -> None:
    quota = Quota(disconnected_seconds=0.5)
    async with served(configured(quota)) as server, httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        async with connected(server, TOKENS["alice"]) as alice:
            await Sandbox.create(SMALL, backend=alice)
            sessions = server.tenants["alice"].sessions
            client = next(iter(sessions._streams)).client
        headers = {"authorization": f"Bearer {TOKENS['mallory']}", "agentkit-client": client}
        async with http.stream("POST", f"{server.url}/v1/stream", content=b"[]", headers=headers):
            await until(lambda: not sessions._sessions)


def test_images_of_snapshots_are_not_images() -> None:
    with pytest.raises(AccessDenied, match="image"):
        permitted(Policy(images=("*",)), SandboxSpec(image="agentkit/snapshot:ak-0123456789abcdef"))


async def test_only_the_operator_drains_and_sees_all_tenants() -> None:
    async with served(configured()) as server, httpx.AsyncClient(base_url=f"{server.url}/v1/", trust_env=False) as http:
        mallory = {"authorization": f"Bearer {TOKENS['mallory']}"}
        operator = {"authorization": f"Bearer {OPERATOR}"}
        refused = await http.post("drain", content=b"true", headers=mallory)
        assert isinstance(unpack_error(refused.content), AccessDenied)
        assert server.tenants.host.reason == ""
        assert "alice" not in (await http.get("status", headers=mallory)).text
        assert (await http.post("drain", content=b"true", headers=operator)).status_code == 200
        status = (await http.get("status", headers=operator)).json()
        assert status["host"]["accepting"] is False
        assert status["tenants"]["alice"]["sandboxes"] == 0


# Policies and quotas


async def test_each_tenant_has_its_own_policy() -> None:
    config = configured(alice=tenant("alice", policy={"networks": ["none", "bridge"]}))
    async with (
        served(config) as server,
        connected(server, TOKENS["alice"]) as alice,
        connected(server, TOKENS["mallory"]) as mallory,
    ):
        spec = SMALL.model_copy(update={"network": Network.bridge()})
        async with Sandbox.create(spec, backend=alice):
            pass
        with pytest.raises(AccessDenied, match="network"):
            await Sandbox.create(spec, backend=mallory)


@pytest.mark.parametrize(
    "limit", [{"sandboxes": 1}, {"cpus": 1.5}, {"memory": 200 << 20}], ids=["sandboxes", "cpus", "memory"]
)
async def test_a_tenant_at_its_quota_affects_no_other(limit: dict[str, Any]) -> None:
    config = configured(mallory=tenant("mallory", quota=TenantQuota(**limit)))
    async with (
        served(config) as server,
        connected(server, TOKENS["alice"]) as alice,
        connected(server, TOKENS["mallory"]) as mallory,
    ):
        async with Sandbox.create(SMALL, backend=mallory):
            with pytest.raises(QuotaExceeded, match=next(iter(limit))) as caught:
                await Sandbox.create(SMALL, backend=mallory)
            assert caught.value.retryable
            for _ in range(3):
                await Sandbox.create(SMALL, backend=alice)
        async with Sandbox.create(SMALL, backend=mallory):
            pass


async def test_the_operator_of_tenants_creates_no_sandboxes() -> None:
    async with served(configured()) as server, connected(server, OPERATOR) as operator:
        with pytest.raises(QuotaExceeded):
            await Sandbox.create(SMALL, backend=operator)


async def test_a_greedy_tenant_leaves_room_for_the_others() -> None:
    quota = Quota(requests=30, sandboxes=12)
    async with (
        served(configured(quota)) as server,
        connected(server, TOKENS["alice"]) as alice,
        connected(server, TOKENS["mallory"]) as mallory,
    ):
        boxes = await asyncio.gather(
            *[Sandbox.create(SMALL, backend=mallory) for _ in range(12)], return_exceptions=True
        )
        held = [box for box in boxes if isinstance(box, Sandbox)]
        assert len(held) == 12 - 2  # two are reserved for alice, none for the operator
        box = await Sandbox.create(SMALL, backend=alice)
        calls = [asyncio.ensure_future(held[0].exec("sleep 1000", timeout=2000)) for _ in range(40)]
        await until(lambda: sum(call.done() for call in calls) >= 15)
        assert (await box.exec("echo served")).stdout == "served\n"
        for call in calls:
            call.cancel()
        refusals = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(refusal, QuotaExceeded) for refusal in refusals)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60),
    st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=6, max_size=6),
)
def test_shares_never_exceed_the_limit_and_are_never_used_up(
    requests: list[tuple[int, int]], own: list[int | None]
) -> None:
    used = [0] * 6
    for who, amount in requests:
        others = [(used[each], own[each]) for each in range(6) if each != who]
        if fits(used[who] + amount, own[who], others, 100):
            used[who] += amount
        assert sum(used) <= 100
    for who in range(6):
        others = [(used[each], own[each]) for each in range(6) if each != who]
        assert fits(min(100 / 12, 100 if own[who] is None else own[who] or 0), own[who], others, 100)


# Tokens


def write(file: Path, *tokens: str) -> Path:
    file.write_text("\n".join(tokens))
    file.chmod(0o600)
    return file


async def test_tokens_change_without_a_restart(tmp_path: Path) -> None:
    """Clients move to the new token one after the other; then the old one is refused, and no sandbox is lost."""
    new = "the-new-token-of-alice-alone"
    file = write(tmp_path / "token", TOKENS["alice"])
    config = ServerConfig(tenants={"alice": TenantConfig(token_file=str(file))})
    async with served(config) as server, contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(connected(server, TOKENS["alice"]))
        box = await Sandbox.create(SMALL, backend=old)
        write(file, new, TOKENS["alice"])
        await server.tenants.configure(config, [OPERATOR])
        moved = await stack.enter_async_context(connected(server, new))
        again = await Sandbox.connect(box.id, backend=moved)
        write(file, new)
        await server.tenants.configure(config, [OPERATOR])
        assert (await again.exec("echo on")).stdout == "on\n"
        with pytest.raises(SandboxError):
            await box.exec("echo on")
        with pytest.raises(AccessDenied):
            async with connected(server, TOKENS["alice"]):
                pass
        await until(lambda: len(server.tenants["alice"].sessions._streams) == 1)
        write(file, "short")
        with pytest.raises(ConfigError):
            await server.tenants.configure(config, [OPERATOR])
        assert (await again.exec("echo on")).stdout == "on\n"


async def test_tenants_come_and_go_without_a_restart() -> None:
    quota = Quota(disconnected_seconds=0.5)
    async with served(ServerConfig(quota=quota)) as server, connected(server, OPERATOR) as single:
        kept = await Sandbox.create(SMALL, backend=single)
        await server.tenants.configure(configured(quota), [OPERATOR])
        assert (await kept.exec("echo on")).stdout == "on\n"
        async with connected(server, TOKENS["alice"]) as alice:
            await Sandbox.create(SMALL, backend=alice)
            fake = server.sessions.backend
            await server.tenants.configure(ServerConfig(quota=quota), [OPERATOR])
            await until(lambda: len(fake.boxes) == 1)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(AccessDenied):
            async with connected(server, TOKENS["alice"]):
                pass
        assert (await kept.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tenants: {alice: {}}", "token_file or token_sha256"),
        ("tenants: {alice: {token_sha256: [abc]}}", "token_sha256"),
        ("tenants: {'a/b': {token_file: x}}", "tenants"),
        ("tenants: {operator: {token_file: x}}", "choose another"),
        ("tenants: {alice: {token_file: x, policy: {imagse: []}}}", "imagse"),
    ],
)
def test_mistakes_in_the_configuration(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_config(file)


async def test_two_tenants_with_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="same token"):
        async with served(configured(mallory=tenant("alice"))):
            pass
