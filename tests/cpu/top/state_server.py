"""A server that shows a given state, and can go away and come back on the same port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StateServer:
    """Answers every path alike, until stopped.

    Attributes
    ----------
    text, status : of the state.
    paths, keys : what was asked for, and with which Authorization header.
    """

    def __init__(self, text: str, *, status: int = 200) -> None:
        self.text = text
        self.status = status
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        shown = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown.paths.append(self.path)
                shown.keys.append(self.headers["Authorization"])
                body = shown.text.encode()
                self.send_response(shown.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening; connections are refused from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def showing(text: str, *, status: int = 200) -> Iterator[StateServer]:
    """Run a server until the block ends."""
    server = StateServer(text, status=status)
    server.start()
    try:
        yield server
    finally:
        server.stop()
