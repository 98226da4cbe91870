"""A stand-in for the API server of Kubernetes: Leases alone, with the versions that it goes by."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMESPACES = ("chat",)


class LeaseServer(ThreadingHTTPServer):
    """Keeps Leases by namespace and name.

    Attributes
    ----------
    leases : as they were written last.
    refuses : a status that all calls get; 0 lets them pass.
    """

    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.refuses = 0
        self.lock = threading.Lock()
        self._num_writes = 0
        super().__init__((host, 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def keep(self, key: str, lease: dict[str, Any]) -> dict[str, Any]:
        self._num_writes += 1
        lease["metadata"]["resourceVersion"] = str(self._num_writes)
        self.leases[key] = lease
        return lease


class _Handler(BaseHTTPRequestHandler):
    server: LeaseServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        with self.server.lock:
            status, found = self._look(body)
        told = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def _look(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        parts = self.path.strip("/").split("/")
        if parts[:4] != ["apis", "coordination.k8s.io", "v1", "namespaces"] or parts[5] != "leases":
            return 404, {"kind": "Status", "reason": "no such resource"}
        if self.server.refuses:
            return self.server.refuses, {"kind": "Status"}
        namespace = parts[4]
        name = parts[6] if len(parts) > 6 else body["metadata"]["name"]
        key = f"{namespace}/{name}"
        lease = self.server.leases.get(key)
        if self.command == "POST":
            if namespace not in NAMESPACES:
                return 404, {"kind": "Status", "reason": "no such namespace"}
            return (409, {"kind": "Status"}) if lease else (201, self.server.keep(key, body))
        if lease is None:
            return 404, {"kind": "Status"}
        if self.command == "GET":
            return 200, lease
        if body["metadata"].get("resourceVersion") != lease["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "reason": "the object has been modified"}
        return 200, self.server.keep(key, body)


@contextmanager
def lease_server(folder: Path, host: str = "127.0.0.1") -> Iterator[tuple[LeaseServer, Path]]:
    """Run one until the block ends; yield it and a file for $KUBECONFIG."""
    server = LeaseServer(host)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "stand-in", "cluster": {"server": server.url}}],
                "users": [{"name": "onbeat", "user": {"token": "of the tests"}}],
                "contexts": [{"name": "c", "context": {"cluster": "stand-in", "user": "onbeat"}}],
                "current-context": "c",
            }
        )
    )
    try:
        yield server, config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
