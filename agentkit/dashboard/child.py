"""The page of one run, in a process of its own.

Reading an episode loads models, and drawing one replays its environment; neither may disturb the run's own process.
Invariant: the process ends with its parent, whose end closes its standard input.

    python -m agentkit.dashboard.child DIRECTORY
"""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from agentkit.errors import ConfigError

_START_S = 60.0
_END_S = 5.0


@contextlib.contextmanager
def run_page(directory: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Serve the page of a run while the block runs, and tell its address. The run does not depend on the page."""
    command = [sys.executable, "-m", __name__, str(directory.absolute())]
    # In a session of its own, it outlives the Ctrl-C that asks the run to end.
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with child:
        assert child.stdin
        assert child.stdout
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                url = child.stdout.readline().strip() if selector.select(_START_S) else ""
            tell(f"dashboard: {url}" if url else f"no dashboard; see `agentkit dashboard {directory}`")
            yield
        finally:
            child.stdin.close()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:  # it reads an episode
                child.kill()


def main(directory: str) -> None:
    from agentkit.dashboard.server import PORT, Dashboard

    try:
        server = Dashboard([Path(directory)], port=PORT)
    except ConfigError:  # another run's page has this port
        server = Dashboard([Path(directory)], port=0)
    with server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
