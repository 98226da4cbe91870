"""Stage V: vLLM and onbeat on one GPU: equal shapes and KV memory, one client, in turns A B B A.

`python -m benchmarks.gpu_check.versus vllm onbeat`; with one name that server answers one request.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.models import model_folder
from benchmarks.gpu_check.record import IS_REHEARSAL, OUT, expect, note, seconds_left
from benchmarks.gpu_check.serve import load, one_request, serve_command, start_server, wait_until_ready
from benchmarks.harness.servers import free_port

MODEL = "8b"
USERS = (1, 2) if IS_REHEARSAL else (1, 8, 32, 64)
REQUESTS = 3
"""Of each user in a turn: 9 to 15 s on an H100, so that all 16 turns take less than five minutes."""
TURNS = ("vllm", "onbeat", "onbeat", "vllm")
"""What drifts with time meets both alike."""
KV_BYTES = 12 * 2**30
"""Of each server; told to both, since each may count what the other one holds."""
SHARE = 0.45
"""Of the GPU's memory, which vLLM must find free."""
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of captured decode steps: onbeat's sizes, fewer than vLLM's own, which take longer to capture."""
SHORTEST = 20.0
"""Seconds; a round that would have less does not start."""

Rounds = dict[tuple[int, str], list[dict[str, Any]]]
"""What the client measured, by number of users and server."""


@dataclass
class Server:
    """A server that was started."""

    name: str
    port: int
    log: Path
    process: subprocess.Popen[bytes]


def main() -> int:
    names = sys.argv[1:]
    servers: list[Server] = []
    rounds: Rounds = {}
    missing: list[str] = []
    try:
        for name in names:  # one after the other: onbeat times its products at start
            servers.append(start(name))
            if not is_well(servers[-1]):
                missing = [f"{name} did not start, or did not answer"]
                break
        else:
            missing = take_turns(servers, rounds) if len(names) > 1 else []
    finally:
        for server in servers:
            server.process.kill()
    lines = [*(table(rounds) if rounds else ()), *(f"missing: {each}" for each in missing)]
    for server in servers:
        if any(server.name in each for each in missing):
            log = server.log.read_text(errors="replace")
            lines += [f"--- last lines of {server.log.name}", *log[-2500:].splitlines()]
    (OUT / "versus.txt").write_text("\n".join(lines or [f"{names[0]} started and answered"]) + "\n")
    return 1 if missing else 0


def start(name: str) -> Server:
    """Start a server of that name; when rehearsing both are onbeat."""
    port, log, variables = free_port(), OUT / f"serve-{name}.log", {}
    kv_bytes = () if IS_REHEARSAL else ("--kv-cache-memory-bytes", str(KV_BYTES))
    command = serve_command(MODEL, port, *kv_bytes, "--no-enable-prefix-caching")
    if name == "vllm" and not IS_REHEARSAL:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_folder(MODEL))]
        command += ["--load-format", "dummy", "--port", str(port), "--max-model-len", "2048"]
        command += [*kv_bytes, "--gpu-memory-utilization", str(SHARE), "--no-enable-prefix-caching"]
        command += ["--max-num-seqs", str(GRAPHS[-1]), "--cudagraph-capture-sizes", *map(str, GRAPHS)]
        variables = {"PYTHONPATH": os.environ["GPU_VLLM_SITE"], "VLLM_NO_USAGE_STATS": "1"}
        variables["DO_NOT_TRACK"] = "1"
    return Server(name, port, log, start_server(command, log, variables))


def is_well(server: Server) -> bool:
    """Wait until a server is ready and has answered one request."""
    began = time.monotonic()
    is_up = wait_until_ready(server.process, server.port)
    note(f"serve {server.name}: ready after", time.monotonic() - began, "s", shown=True)
    expect(f"serve {server.name}: starts", is_up)
    try:
        return is_up and one_request(server.port, server.name, MODEL)
    except (OSError, HTTPException) as error:
        expect(f"serve {server.name}: answers", passed=False, text=repr(error))
        return False


def take_turns(servers: list[Server], rounds: Rounds) -> list[str]:
    """Run all rounds that there is time for, and return those that gave no numbers."""
    missing = []
    by_name = {server.name: server for server in servers}
    for users in USERS:
        for turn, name in enumerate(TURNS):
            result = None
            if seconds_left() > SHORTEST:
                wait_until_idle()
                result = load(by_name[name].port, name, users, MODEL, REQUESTS)
            if result is None:
                missing.append(f"{name}, {users} users, turn {turn + 1}")
            else:
                rounds.setdefault((users, name), []).append(result)
    return missing


def wait_until_idle() -> None:
    """Wait for a GPU on which nothing runs, for five seconds at most, and note it if something still does."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader"]
    seen = "0 %" if IS_REHEARSAL else ""
    for _ in range(10):
        if seen == "0 %":
            return
        time.sleep(0.5)
        seen = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    note("the GPU before a round", seen)


def table(rounds: Rounds) -> list[str]:
    """Return tokens a second of both in each of their rounds, the ratio of the means, and first tokens."""
    lines = [
        f"{'users':>5} {'vLLM tok/s':>17} {'onbeat tok/s':>17} {'onbeat/vLLM':>11}  median first token, ms"
    ]
    for users in USERS:
        speeds, firsts = (
            [[each[key] for each in rounds.get((users, name), ())] for name in ("vllm", "onbeat")]
            for key in ("output_throughput", "median_ttft_ms")
        )
        means = [sum(each) / len(each) if each else float("nan") for each in speeds]
        cells = [f"{' '.join(f'{value:.1f}' for value in each) or '-':>17}" for each in speeds]
        waits = [" ".join(f"{value:.0f}" for value in each) or "-" for each in firsts]
        ratio = f"{means[1] / means[0]:.3f}" if all(speeds) else "-"
        lines.append(f"{users:>5} {cells[0]} {cells[1]} {ratio:>11}  {waits[0]} against {waits[1]}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
