"""The metrics of a sandbox server, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentkit.errors import AccessDenied, ImageError
from agentkit.sandboxes import Sandbox, SandboxSpec
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.pool.health import HostUsage
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.config import ImageConfig, ServerConfig, TenantConfig
from agentkit.sandboxes.server.metrics import route
from agentkit.sandboxes.server.policy import Policy, Quota
from agentkit.sandboxes.testing.fake import FakeBackend

TOKEN, SCRAPER = "a-token-of-the-tests-alone", "a-token-that-only-scrapes"
USAGE = HostUsage(memory=0.25, disk=0.5, cpu=0.125)


async def scrape(server: SandboxServer, token: str = TOKEN) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        return await client.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {token}"})


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples by name and values of labels, in the order of the labels' names."""
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {(one.name, *(one.labels[label] for label in sorted(one.labels))): one.value for one in found}


async def test_what_prometheus_reads(tmp_path: Path) -> None:
    file = tmp_path / "metrics-token"
    file.write_text(SCRAPER)
    file.chmod(0o600)
    config = ServerConfig(quota=Quota(sandboxes=7), metrics_token_file=str(file))
    fake = FakeBackend(create_seconds=0.01)
    async with SandboxServer(fake, token=TOKEN, config=config, measure=lambda: USAGE) as server:
        backend = RemoteBackend(server.url, TOKEN)
        await backend.start()
        try:
            async with Sandbox.create(backend=backend) as box, Sandbox.create(backend=backend):
                await box.exec("true")
                with pytest.raises(AccessDenied):
                    await Sandbox.create(SandboxSpec(image="forbidden"), backend=backend)
                response = await scrape(server, SCRAPER)
        finally:
            await backend.close()
        await server.tenants.configure(ServerConfig(quota=Quota(sandboxes=9)), [TOKEN])
        after = samples((await scrape(server)).text)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "metrics"]
        checked = await asyncio.to_thread(subprocess.run, command, input=response.content, capture_output=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    found = samples(response.text)
    assert found["agentkit_sandboxes", "running", "operator"] == 2
    assert found["agentkit_sandbox_limit",] == 7
    assert found["agentkit_sandbox_creation_seconds_count",] == 2
    assert found["agentkit_sandbox_creation_failures_total", "AccessDenied"] == 1
    assert found["agentkit_exec_seconds_count",] == 1
    assert found["agentkit_requests_total", "sandboxes/create", "200"] == 2
    assert found["agentkit_host_used_ratio", "memory"] == 0.25
    assert found["agentkit_host_used_ratio", "cpu"] == 0.125
    assert found["agentkit_host_accepting",] == found["agentkit_engine_up",] == 1
    assert found["agentkit_host_draining",] == 0
    assert ("agentkit_sandboxes", "running", "operator") not in after
    assert after["agentkit_sandbox_limit",] == 9
    assert after["agentkit_requests_total", "sandboxes/remove", "200"] >= 2


async def test_who_may_read_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics-token"
    file.write_text(SCRAPER)
    file.chmod(0o600)
    config = ServerConfig(metrics_token_file=str(file))
    async with SandboxServer(FakeBackend(), token=TOKEN, config=config) as server:
        refused = await scrape(server, "a-token-of-someone-else")
        assert (refused.status_code, b"agentkit" in refused.content) == (401, False)
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"authorization": f"Bearer {SCRAPER}", "content-type": "application/json"}
            listed = await client.post(f"{server.url}/v1/list", headers=headers, content=b"{}")
        assert listed.status_code == 401  # the token for metrics opens nothing else


async def test_tenants_are_labels_and_read_no_metrics() -> None:
    own = "a-token-of-one-tenant-alone"
    tenants = {"alpha": TenantConfig(token_sha256=(hashlib.sha256(own.encode()).hexdigest(),))}
    async with SandboxServer(FakeBackend(), token=TOKEN, config=ServerConfig(tenants=tenants)) as server:
        backend = RemoteBackend(server.url, own)
        await backend.start()
        async with Sandbox.create(backend=backend):
            found = samples((await scrape(server)).text)
            refused = await scrape(server, own)
        await backend.close()
    assert found["agentkit_sandboxes", "running", "alpha"] == 1
    assert refused.status_code == 401


async def test_images_are_counted() -> None:
    class Engine(FakeBackend):
        async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
            if image == "nowhere":
                raise ImageError("no image 'nowhere'", image=image)
            return await super().pull(image, timeout=timeout, refresh=refresh)

    fake = Engine()
    images = ImageConfig(keep_days=1e-6, interval=0.05)
    config = ServerConfig(policy=Policy(images=("*",)), images=images)
    async with SandboxServer(fake, token=TOKEN, config=config) as server:
        backend = RemoteBackend(server.url, TOKEN)
        await backend.start()
        async with Sandbox.create(SandboxSpec(image="used"), backend=backend):
            with pytest.raises(ImageError):
                await backend.pull("nowhere")
            during = samples((await scrape(server)).text)
        await backend.close()
        end = time.monotonic() + 20
        while "used" in fake.images:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        after = samples((await scrape(server)).text)
    assert during["agentkit_images",] == 1
    assert [during["agentkit_image_fetches_total", result] for result in ("fetched", "failed")] == [1, 1]
    assert (after["agentkit_images",], after["agentkit_images_removed_total",]) == (0, 1)


async def test_requests_of_strangers_make_no_labels() -> None:
    async with SandboxServer(FakeBackend(), token=TOKEN) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            for number in range(20):
                await client.get(f"{server.url}/v1/{number}/x")
                await client.request(f"M{number}", f"{server.url}/v1/sandboxes/{number}")
        found = samples((await scrape(server)).text)
    assert {key[1:] for key in found if key[0] == "agentkit_requests_total"} == {("other", "401")}


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("PUT", "/v1/sandboxes/ak-1", "sandboxes/create"),
        ("GET", "/v1/sandboxes/ak-1/logs", "sandboxes/logs"),
        ("POST", "/v1/channels/secret/exec", "channels/exec"),
        ("POST", "/v1/channels/secret/guess", "other"),
        ("POST", "/v1/stream", "stream"),
        ("GET", "/boot", "other"),
    ],
)
def test_routes(method: str, path: str, name: str) -> None:
    assert route(method, path) == name
