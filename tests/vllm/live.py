"""A vLLM server on this machine, for the tests that need one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.servers import free_port

ROOT = Path(__file__).parents[2]
STARTS_WITHIN = 900.0
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # beside other work, bound threads wait for one another
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Answer:
    """What came back: a body, or the data of the events of a stream."""

    status: int
    headers: dict[str, str]
    body: Any
    events: list[Any]


@dataclass
class VLLMServer:
    """A server that runs.

    Attributes
    ----------
    process : leads the session that all its processes are in.
    log : what it prints.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: object, **headers: str) -> Answer:
        """Ask, and wait for all of the answer."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                **{name.replace("_", "-"): text for name, text in headers.items()},
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=280) as response:
                raw, status, head = response.read(), response.status, response.headers
        except urllib.error.HTTPError as error:
            raw, status, head = error.read(), error.code, error.headers
        names = {name.lower(): value for name, value in head.items()}
        if names.get("content-type", "").startswith("text/event-stream"):
            data = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
            return Answer(status, names, None, [json.loads(each) for each in data if each != "[DONE]"])
        return Answer(status, names, json.loads(raw) if raw else None, [])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def engine_pid(self) -> int:
        """Return the process in which vLLM's scheduler runs."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = os.getsid(int(folder.name)) == self.process.pid
                if is_ours and b"EngineCore" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except (OSError, ProcessLookupError):
                continue
        raise AssertionError("no process of the server is called EngineCore")


@contextmanager
def serving(
    folder: Path,
    model: str,
    flags: Sequence[str] = (),
    *,
    onbeat: Sequence[str] | None = None,
    **environment: str,
) -> Iterator[VLLMServer]:
    """Run `vllm serve`, or `onbeat vllm serve` with flags of its own.

    Parameters
    ----------
    folder : where its log goes.
    environment : more variables.
    """
    port = free_port()
    own = ["--served-model-name", "default", "--host", "127.0.0.1", "--port", str(port)]
    own += ["--max-model-len", "2048", "--enforce-eager", *flags]
    if onbeat is None:
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model, *own]
    else:
        command = [sys.executable, "-m", "onbeat", "vllm", "serve", model, *onbeat, "--", *own]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT | environment,
            start_new_session=True,
        )
    server = VLLMServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def _wait_until_ready(server: VLLMServer) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        try:
            server.get("/health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"vLLM was not ready in {STARTS_WITHIN:g} s: {server.log.read_text()[-3000:]}")
