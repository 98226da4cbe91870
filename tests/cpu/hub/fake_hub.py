"""A model hub of our own: an HTTP server with the hub's API for one repository, `owner/model`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _record(path: str, files: Mapping[str, bytes]) -> object:
    """Return what the API says of the repository, or of its files."""
    if "/tree/" in path:
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in files.items()
        ]
    siblings = [{"rfilename": name} for name in files]
    return {"_id": "1", "id": "owner/model", "sha": COMMIT, "siblings": siblings}


@contextmanager
def serve_repository(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve files by their paths; yield the hub's address, and the files that were downloaded so far."""
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            name = path.partition("/resolve/main/")[2] or path.partition(f"/resolve/{COMMIT}/")[2]
            if path.startswith("/api/models/owner/model"):
                self._send(json.dumps(_record(path, files)).encode(), "application/json")
            elif name in files:
                if self.command == "GET":
                    downloaded.append(name)
                self._send(files[name], "application/octet-stream")
            else:
                self.send_error(404)

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, args=(0.02,)
        )  # an end that waits no half second
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", downloaded
        server.shutdown()
        thread.join()
