"""A chat-completions server for the tests of other systems: it plays FrozenLake at random, by the conversation.

The same conversation has the same answer. The model ``broken`` always fails.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACTIONS = ("Down", "Right", "Down", "Right", "Left", "Up")


def answer(messages: list[dict[str, Any]]) -> str:
    """Return the next answer: an action, or after the first one sometimes no valid answer."""
    texts = [text_of(message) for message in messages]
    chosen = random.Random(json.dumps(texts))
    if len(texts) > 2 and chosen.random() < 0.3:
        return "I do not know."
    return f"<answer>{chosen.choice(ACTIONS)}</answer>"


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, which is a text or a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Handler(BaseHTTPRequestHandler):
    """Answers in one piece, or as a stream of one piece."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] == "broken":
            return self._send(400, "application/json", json.dumps({"error": {"message": "the model is broken"}}))
        stream = bool(request.get("stream"))
        text = {"role": "assistant", "content": answer(request["messages"])}
        reply = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "delta" if stream else "message": text}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if stream:
            return self._send(200, "text/event-stream", f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n")
        return self._send(200, "application/json", json.dumps(reply))

    def do_GET(self) -> None:
        self._send(404, "application/json", "{}")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def served() -> Iterator[str]:
    """Serve in a thread; yield the address, which ends with ``/v1``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
