"""Serve the page about runs on this machine.

Invariant: the server listens on the loopback address only, reads and never writes, and answers only requests that carry
the token and come from its own page. Pages load nothing from elsewhere and run no script that a text contains. The only
request that starts something is a replay of an episode, which ends with the server.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentkit.dashboard.answers import Answers
from agentkit.dashboard.queries import to_json
from agentkit.dashboard.replay_process import ReplayError, Replays
from agentkit.errors import AgentkitError, ConfigError

HOST, PORT = "127.0.0.1", 8686
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

DRAWN = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"
"""Policy of pages that environments draw. Their frame also has no origin, and runs no script."""


class Dashboard:
    """A server for the page, for ``with``; it works in threads of its own. ``url`` is the address with the token.

    Args:
        places: run directories, or folders that contain some.
        port: port on this machine; 0 chooses a free one.
        token: whether requests need a token, which is new each time.

    Raises:
        ConfigError: the port is in use.
        RunDirectoryError: a place is not a folder.
    """

    def __init__(self, places: Sequence[Path], *, port: int = PORT, token: bool = True) -> None:
        answers = Answers(places)
        self._token = secrets.token_urlsafe(24) if token else ""
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            advice = "; choose another, or 0" if port else ""
            raise ConfigError(f"cannot listen on port {port}: {error.strerror}{advice}") from error
        self.port = self._server.server_port
        self._server.answers, self._server.token, self._server.pages = answers, self._token, static_files()
        self._server.cookie, self._server.replays = f"agentkit_{self.port}", Replays()
        self.url = f"http://{HOST}:{self.port}/" + (f"?token={self._token}" if token else "")
        self._thread = threading.Thread(target=self._server.serve_forever, name="agentkit-dashboard", daemon=True)

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.replays.close()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the server ends, or for an exception such as ``KeyboardInterrupt``."""
        while self._thread.is_alive():
            self._thread.join(1.0)


def static_files() -> dict[str, bytes]:
    """Return the files of the page by their path, such as ``vendor/uplot/LICENSE``."""
    folder = Path(__file__).with_name("static")
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    answers: Answers
    token: str
    cookie: str
    pages: Mapping[str, bytes]
    replays: Replays

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the browser has gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 60.0
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = dict(parse_qsl(address.query))
        if (problem := self._refusal(asked if address.path == "/" else {})) is not None:
            self._send(problem[0], problem[1].encode(), "")
        elif address.path.startswith("/api/"):
            self._answer(address.path.removeprefix("/api/"), asked)
        elif address.path == "/page":
            self._page(asked)
        elif (page := self.server.pages.get(address.path.lstrip("/") or "index.html")) is not None:
            headers = {}
            if self.server.token:
                headers["Set-Cookie"] = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            self._send(200, page, Path(address.path if address.path != "/" else "index.html").suffix, headers)
        else:
            self._send(404, b"there is no such page", "")

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        problem = self._refusal({})
        if problem is None and not self.server.token:
            problem = 403, "a replay starts a process, which needs a token: start the dashboard without --no-token"
        if problem is not None:
            self._send(problem[0], problem[1].encode(), "")
        elif address.path == "/api/replay":
            self._replay(dict(parse_qsl(address.query)))
        else:
            self._send(404, b"nothing can be sent to this address", "")

    def _refusal(self, asked: Mapping[str, str]) -> tuple[int, str] | None:
        """Return status and text for a request that is not allowed; None if it is.

        Other pages of this user's browser can send requests here, and names can be made to point here, so the host must
        be the loopback one, and the origin, according to the browser, this server. The link with the token may be
        anywhere: a page that knows it needs no browser.
        """
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (HOST, "localhost"):
            return 403, f"the address {host!r} is not this server's; use http://{HOST}:{self.server.server_port}/"
        if self.server.token and _same(asked.get("token"), self.server.token):
            return None
        site, origin = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Origin")
        if site not in ("none", "same-origin") or origin not in (None, f"http://{self.headers.get('Host')}"):
            return 403, "requests from other pages are refused"
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        given = bearer if scheme == "Bearer" else self._cookie()
        if self.server.token and not _same(given, self.server.token):
            return 401, "open the link with the token that `agentkit dashboard` printed"
        return None

    def _cookie(self) -> str:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    def _answer(self, question: str, asked: Mapping[str, str]) -> None:
        try:
            status, text = 200, self.server.answers.answer(question, asked)
        except AgentkitError as error:
            status, text = 404, to_json({"error": str(error)})
        except Exception as error:  # a run can contain anything; the page shows it, and the terminal stays clean
            status, text = 500, to_json({"error": f"{type(error).__name__}: {error}"})
        self._send(status, text.encode(), "application/json")

    def _replay(self, asked: Mapping[str, str]) -> None:
        try:
            path, number = self.server.answers.place(asked)
            status, text = 200, to_json(self.server.replays.replay(path, number))
        except ReplayError as error:
            status, text = 409, to_json({"error": str(error)})
        except AgentkitError as error:
            status, text = 404, to_json({"error": str(error)})
        self._send(status, text.encode(), "application/json")

    def _page(self, asked: Mapping[str, str]) -> None:
        try:
            text = self.server.answers.page(asked)
        except Exception as error:  # as in `_answer`
            status = 404 if isinstance(error, AgentkitError) else 500
            self._send(status, str(error).encode("utf-8", "replace"), "")
            return
        policy = {"Content-Security-Policy": f"{DRAWN}; sandbox; frame-ancestors 'self'"}
        self._send(200, text.encode("utf-8", "replace"), ".html", policy)

    def _send(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", _TYPES.get(kind, kind))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _same(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), token.encode())
