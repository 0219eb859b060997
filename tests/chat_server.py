"""A real HTTP server that speaks chat completions, with answers given by a function."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, dict[str, str]]
"""Status, body (JSON, or text as it is), further headers."""


def said(text: str, finish_reason: str = "stop") -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}, {}


def refused(status: int, message: str, **headers: str) -> Answer:
    return status, {"error": {"message": message}}, headers


@dataclass
class ChatServer:
    """``requests``: what was received, bodies and headers, in order."""

    url: str
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def chat_server(answer: Callable[[int, dict[str, Any]], Answer | None]) -> Iterator[ChatServer]:
    """Serve ``answer(number of the request, body)`` on a free port; None closes the connection without a response."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(served.requests)
                served.requests.append((body, {key.lower(): value for key, value in self.headers.items()}))
            result = answer(number, body) if self.path == "/v1/chat/completions" else refused(404, "no such path")
            if result is None:
                self.close_connection = True
                return
            status, content, headers = result
            payload = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(payload))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
