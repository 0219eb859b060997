"""The page that sets up sandbox hosts, followed word for word with two servers on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from requiring import require

from agentkit.sandboxes.server.config import read_config

PAGE = Path(__file__).parents[3] / "docs/sandboxes/hosts.md"
HOSTS = ("sandbox1", "sandbox2", "sandbox3", "sandbox4")
TIMEOUT = 120


def block(start: str) -> str:
    """Return the block of the page that starts like this."""
    found = [text for text in re.findall(r"```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL) if text.startswith(start)]
    assert len(found) == 1, f"{len(found)} blocks start with {start!r}"
    return found[0]


def run(text: str, directory: Path, ports: list[int]) -> str:
    """Run a block in which ``localhost`` stands for all hosts."""
    urls = ",".join(f"https://localhost:{port}" for port in ports)
    text = text.replace(",".join(f"https://{host}:8765" for host in HOSTS), urls)
    text = text.replace("https://sandbox2:8765", f"https://localhost:{ports[1]}")
    text = text.replace(" ".join(HOSTS), "localhost").replace("$HOME", "$PWD")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "AGENTKIT_RUNTIME_DIR": str(directory / "trainer")}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@contextlib.contextmanager
def serving(directory: Path, number: int, port: int) -> Iterator[None]:
    """Run a server with the options of the unit."""
    unit = block("[Unit]").replace("\\\n", " ")
    command = re.search(r"ExecStart=\S+agentkit (.*)", unit)
    assert command is not None
    words = command[1].replace("/etc/agentkit", str(directory)).split()
    words = [{"cert.pem": "localhost.pem", "key.pem": "localhost.key"}.get(Path(word).name, word) for word in words]
    environment = {**os.environ, "AGENTKIT_RUNTIME_DIR": str(directory / f"host{number}")}
    environment.pop("AGENTKIT_SANDBOX_TOKEN", None)
    with subprocess.Popen(
        [sys.executable, "-m", "agentkit", *words, "--backend", "local", "--port", str(port), "--keep", "0"],
        cwd=directory, env=environment, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("serving")
            yield
        finally:
            server.terminate()
            server.wait(TIMEOUT)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(shutil.which("openssl") is not None, "install openssl")
    monkeypatch.delenv("AGENTKIT_SANDBOX_TOKEN", raising=False)
    ports = [free_port(), free_port()]
    the_authority, the_certificates, the_tokens = block("openssl req -x509"), block("for host in"), block("umask 077")
    for text in (the_authority, the_certificates, the_tokens):
        run(text, tmp_path, ports)

    config = tmp_path / "server.yaml"
    config.write_text(block("policy:").replace("/etc/agentkit", str(tmp_path)).replace("cert.pem", "localhost.pem"))
    assert set(read_config(config).tenants) == {"search", "coding"}
    config.write_text(re.sub(r"images:\n  pull:.*", "", config.read_text()))  # no registry here

    the_trainer = block("export SSL_CERT_FILE")
    settings = "".join(line for line in the_trainer.splitlines(keepends=True) if line.startswith("export"))
    the_drain = block("export AGENTKIT_SANDBOX_TOKEN_FILE=operator")
    with serving(tmp_path, 1, ports[0]), serving(tmp_path, 2, ports[1]):
        top = run(the_trainer.replace("agentkit run config.yaml", "true"), tmp_path, ports)
        assert all(f"localhost:{port}" in top for port in ports)
        made = run(f"{settings}agentkit sandbox create --backend remote", tmp_path, ports).strip()
        assert "hello" in run(f"{settings}agentkit sandbox exec --backend remote {made} echo hello", tmp_path, ports)
        run(f"{settings}agentkit sandbox rm --backend remote {made}", tmp_path, ports)
        drained = run(settings + the_drain, tmp_path, ports)
        assert "draining" in drained
        assert "accepting" in drained
