"""Play an environment with web pages in a browser.

Invariant: the server listens on this machine only, and accepts requests only from its own pages; actions are executed
one at a time. Each action is answered with a redirect, so reloading a page does not repeat it.

Such an environment has two methods: ``page() -> str`` returns the current page as HTML, and
``action_of(fields) -> str`` returns the action for the fields of a submitted form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentkit import registry
from agentkit.errors import ConfigError

_LIMIT = 1 << 16
"""Maximum size of a form in bytes."""
_AGAIN = '<form method="post"><button class="btn" name="next" value="1">Next task</button></form>'


class Game:
    """The current episode; the next one has the next seed."""

    def __init__(self, env: Any, seed: int) -> None:
        self._env, self._seed, self._over = env, seed, False
        self._lock = threading.Lock()
        env.reset(seed=seed)

    def page(self) -> str:
        with self._lock:
            page: str = self._env.page()
            return page.replace("</main>", f"{_AGAIN}</main>") if self._over else page

    def act(self, fields: dict[str, str]) -> None:
        with self._lock:
            if "next" in fields:
                self._seed, self._over = self._seed + 1, False
                self._env.reset(seed=self._seed)
            elif fields and not self._over:
                _, _, terminated, truncated, _ = self._env.step(self._env.action_of(fields))
                self._over = terminated or truncated


def serve(id: str, arguments: dict[str, Any], *, seed: int, port: int, ready: Callable[[str], Any]) -> None:
    """Serve an environment until interrupted.

    Args:
        id: a registered name.
        arguments: arguments of the environment.
        seed: seed of the first episode.
        port: port on this machine; 0 chooses a free one.
        ready: called with the address.

    Raises:
        ConfigError: the environment has no web pages, or the port is in use.
    """
    env = registry.make(id, **arguments)
    try:
        if not hasattr(env, "page"):
            raise ConfigError(f"{id} has no web pages; play without --web")
        try:
            server = ThreadingHTTPServer(("127.0.0.1", port), _handler(Game(env, seed)))
        except OSError as error:
            raise ConfigError(f"cannot listen on port {port}: {error}; choose another, or 0") from error
        with server:
            ready(f"http://127.0.0.1:{server.server_port}/")
            server.serve_forever()
    finally:
        env.close()


def _handler(game: Game) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60.0

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if address.path != "/":
                self.send_error(404)
            elif fields := dict(parse_qsl(address.query)):
                self._act(fields)
            elif self._trusted():
                self._answer(game.page())

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > _LIMIT:
                self.send_error(413)
            else:
                self._act(dict(parse_qsl(self.rfile.read(int(length)).decode("utf-8", "replace"))))

        def _act(self, fields: dict[str, str]) -> None:
            if self._trusted():
                game.act(fields)
                self.send_response(303)
                self.send_header("Location", "/")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _trusted(self) -> bool:
            """Return whether host and origin of the request are this server, according to the browser."""
            host = (self.headers.get("Host") or "").partition(":")[0]
            site = self.headers.get("Sec-Fetch-Site", "none")
            if host in ("127.0.0.1", "localhost") and site in ("none", "same-origin"):
                return True
            self.send_error(403)
            return False

        def _answer(self, page: str) -> None:
            data = page.encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
