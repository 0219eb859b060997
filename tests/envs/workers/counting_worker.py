"""A worker module for tests: counts, and fails on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from agentkit.envs.workers.fork_server import Handler


def make_handler() -> Handler:
    count = 0

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        nonlocal count
        if name == "hang":
            time.sleep(3600)
        if name == "die":
            os._exit(9)
        if name == "raise":
            raise KeyError(arguments[0])
        if name == "echo":
            return "ok", arguments[0] * arguments[1]
        if name == "grandchild":
            return "ok", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid
        count += 1
        return "ok", count

    return handle
