"""SWE-ReX beside us: installed from the package index into an environment of its own, measured by its own client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from agentkit.sandboxes.spec import DEFAULT_IMAGE
from benchmarks.sandbox.figures import Figure, p

DRIVER = Path(__file__).with_name("swe_rex_driver.py")
PACKAGES = ("swe-rex==1.4.0", "aiohttp")  # it imports the second without asking for it


def measure(venv: Path, calls: int) -> list[Figure]:
    """Raises ``RuntimeError`` if it cannot be installed, or does not run in the image."""
    python = venv.absolute() / "bin" / "python"
    installed = venv / "installed"
    if not installed.exists():
        _run([sys.executable, "-m", "venv", str(venv)])
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES])
        installed.touch()
    site = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    launcher = venv.absolute() / "swerex-remote"
    launcher.write_text('#!/bin/sh\nexec python3 -m swerex "$@"\n')
    launcher.chmod(0o755)
    found = json.loads(_run([str(python), str(DRIVER), DEFAULT_IMAGE, site, str(launcher), str(calls)]))
    return [
        Figure("SWE-ReX `execute` of `true`, p50", p(found["execute"], 50), "ms"),
        Figure("SWE-ReX `execute`/s, 16 at once", found["per_s"], "/s"),
        Figure("SWE-ReX `run_in_session` of `true`, p50", p(found["session"], 50), "ms"),
        Figure("SWE-ReX deployment until ready to work", found["start"], "ms"),
    ]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
