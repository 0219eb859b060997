"""Runs of a benchmark: each is an `agentkit run` in a separate process, once.

Invariant: a directory that contains ``done`` holds a run that reached its last step; any other is started again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_once(config: Path, directory: Path, seed: int, overrides: list[str]) -> None:
    """Run ``config`` into ``directory``, unless that is done.

    Raises ``SystemExit`` if the run ends before its last step; its output is in ``directory`` + ``.log``.
    """
    if (directory / "done").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentkit", "run", str(config), f"dir={directory}", f"seed={seed}"]
    log = directory.with_suffix(".log")
    with log.open("w") as output:
        code = subprocess.run([*command, *overrides], stdout=output, stderr=subprocess.STDOUT).returncode
    if code or not _finished(directory):  # a run that was asked to stop ends well, and early
        raise SystemExit(f"{' '.join(command)} ended with {code} before its end; see {log}")
    (directory / "done").touch()
    print(f"{directory.name}: {log.read_text().strip().splitlines()[-1]}", flush=True)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, one dict per evaluation or training step."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _finished(directory: Path) -> bool:
    return json.loads((directory / "events.jsonl").read_text().splitlines()[-1]).get("finished", False)
