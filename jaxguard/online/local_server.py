"""A chat-completions server on this machine's loopback address, answered by a Python function."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Respond = Callable[[Mapping[str, str], dict[str, Any]], Reply]
"""From a request's headers and JSON body to the answer."""


def completion(text: str | None = None, calls: list[dict[str, Any]] | None = None, **usage: int) -> Reply:
    """A chat completion with a text, or with calls (``id``, ``name`` and ``arguments`` as a text)."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    value = {"object": "chat.completion", "choices": [choice]} | ({"usage": usage} if usage else {})
    return Reply(json.dumps(value))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up, as one does after its timeout, is no error of the server."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LocalServer:
    """Answers ``POST /v1/chat/completions`` on a free port while the ``with`` block lasts.

    Attributes:
        url: What an endpoint's ``url`` is set to.
    """

    def __init__(self, respond: Respond):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes; 40 ms pass between them otherwise

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = self.path == "/v1/chat/completions"
                reply = respond(dict(self.headers), request) if known else Reply("unknown path", 404)
                body = reply.body.encode("utf-8", "replace")
                self.send_response(reply.status)
                headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **reply.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not printed."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> LocalServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
