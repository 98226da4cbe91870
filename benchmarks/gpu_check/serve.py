"""Stages T and H: `onbeat serve` in a process of its own, asked and loaded over HTTP.

The argument is the model's name.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.models import model_folder
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, OUT, PIECES, WORK, expect, note, seconds_left
from benchmarks.harness.servers import free_port

INPUT_TOKENS, OUTPUT_TOKENS = (40, 16) if IS_REHEARSAL else (306, 500)
ROUNDS = 4
"""Requests of each user."""
USERS = {"small": (1, 8), "8b": (1, 8, 30)}
ARGUMENTS = {"small": ("--backend", "torch"), "8b": PIECES}
"""What runs: the reference engine, and what the server takes by itself."""
LEAST_PER_USER = {30: 130.0}
"""Tokens a second of each of so many users, of the 8B shapes."""
METRICS = ("onbeat_step_time_error", "vllm:kv_cache_usage_perc", "onbeat_mbu", "onbeat_mfu")


def main() -> int:
    name = sys.argv[1]
    with server(name) as port:
        if port is None:
            return 1
        ok = one_request(port, name, name)
        for users in USERS[name]:
            if seconds_left() < 15:
                expect(f"serve {name}: load of {users} users", passed=False, text="no time left")
                continue
            load(port, name, users, name)
        _metrics(port)
    return 0 if ok else 1


@contextmanager
def server(name: str, *arguments: str) -> Iterator[int | None]:
    """Run a server until the block ends; yields its port, or None where it does not start.

    Parameters
    ----------
    arguments : of the server, which win over those that every server has.
    """
    port = free_port()
    log = WORK / f"serve-{name}.log"
    start = time.monotonic()
    process = start_server([*serve_command(name, port, *arguments), *extra_arguments()], log)
    try:
        is_up = wait_until_ready(process, port)
        note(f"serve {name}: ready after", time.monotonic() - start, "s", shown=True)
        expect(f"serve {name}: starts", is_up)
        yield port if is_up else None
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            expect(
                f"serve {name}: stops when told to",
                process.wait(timeout=min(max(seconds_left() - 3, 1), 15)) == 0,
                f"exit {process.returncode}",
            )
        except subprocess.TimeoutExpired:
            expect(f"serve {name}: stops when told to", passed=False, text="still there")
            process.kill()
        print(f"--- log of the server\n{log.read_text(errors='replace')[-6000:]}\n---", flush=True)


def serve_command(name: str, port: int, *arguments: str) -> list[str]:
    """Return the command of onbeat's server; `arguments` win over those that every server has."""
    command = [sys.executable, "-m", "onbeat", "serve", str(model_folder(name)), "--load-format", "dummy"]
    command += ["--device", DEVICE, "--port", str(port), "--max-model-len", "2048"]
    kv_bytes = "64M" if IS_REHEARSAL else "16G"
    return [*command, "--kv-cache-memory-bytes", kv_bytes, *ARGUMENTS[name], *arguments]


def start_server(
    command: list[str], log: Path, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server that writes to its log; `variables` are added to the environment."""
    print(" ".join(command), flush=True)
    with log.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )


def extra_arguments() -> list[str]:
    """Return options of the server that whoever starts the check gives beside the stage's own."""
    return os.environ.get("GPU_CHECK_SERVE", "").split()


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether the server answers before it ends or the stage has no time left."""
    while process.poll() is None and seconds_left() > 8:
        try:
            if _get(port, "/health")[0] == 200:
                return True
        except OSError:
            pass
        time.sleep(0.25)
    return False


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode(errors="replace")


def one_request(port: int, name: str, model: str) -> bool:
    """Ask for a streamed completion; returns whether all of it came."""
    body = {
        "model": str(model_folder(model)),
        "prompt": "It is a truth universally acknowledged, that a single man in possession",
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    start = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        expect(f"serve {name}: answers", passed=False, text=response.read().decode(errors="replace")[:300])
        return False
    times, usage = [], None
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        if event.get("choices"):
            times.append(time.monotonic())
    got = (usage or {}).get("completion_tokens")
    expect(
        f"serve {name}: a streamed answer of 64 tokens",
        got == 64,
        f"{got} tokens, {len(times)} events",
        shown=True,
    )
    if len(times) > 2:
        gaps = [second - first for first, second in pairwise(times)]
        note(f"serve {name}: first token", (times[0] - start) * 1e3, "ms", shown=True)
        note(f"serve {name}: median gap", statistics.median(gaps) * 1e3, "ms", shown=True)
    return bool(got == 64)


def load(port: int, name: str, users: int, model: str, requests: int = ROUNDS) -> dict[str, Any] | None:
    """Load a server by so many users, each of whom asks as soon as the last answer is there.

    Returns what the client measured, or None where requests failed.
    """
    result = WORK / f"bench-{name}-{users}.json"
    watched = threading.Thread(target=_watch_memory, daemon=True)
    watched.start()
    run = ["--max-concurrency", str(users), "--num-prompts", str(users * requests), "--num-warmups", "1"]
    run += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    run += ["--send-slo", "none"]
    if not bench(port, name, f"load of {users} users", run, result, model):
        return None
    measured = _read_result(result, name, users)
    return None if measured["failed"] else measured


def bench(
    port: int, name: str, what: str, arguments: Sequence[str], result: Path, model: str | None = None
) -> bool:
    """Run `onbeat bench serve` with random prompts; returns whether its result is there.

    Parameters
    ----------
    model : the server's, if that is not its name.
    """
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "onbeat", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--tokenizer", str(model_folder(model or name)), "--dataset-name", "random", "--ignore-eos"]
    command += ["--temperature", "0", "--disable-tqdm", "--json", str(result), *arguments]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=max(seconds_left() - 8, 5),
        )
    except subprocess.TimeoutExpired:
        expect(f"serve {name}: {what}", passed=False, text="no time left")
        return False
    print(done.stdout[-2500:], flush=True)
    expect(f"serve {name}: {what}", done.returncode == 0, f"exit code {done.returncode}")
    return result.exists()


def _read_result(path: Path, name: str, users: int) -> dict[str, Any]:
    result = last_run(path)
    with (OUT / "served.json").open("a") as file:
        file.write(json.dumps({"model": name, "users": users, "result": result}) + "\n")
    for key in ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"):
        if key in result:
            unit = "tok/s" if key == "output_throughput" else "ms"
            note(
                f"serve {name}, {users} users: {key}",
                float(result[key]),
                unit,
                shown=key == "output_throughput",
            )
    tpot = result.get("mean_tpot_ms") or result.get("median_tpot_ms")
    if tpot:
        least = LEAST_PER_USER.get(users) if name == "8b" else None
        note(f"serve {name}, {users} users: each", 1e3 / float(tpot), "tok/s", at_least=least, shown=True)
    return result


def last_run(path: Path) -> dict[str, Any]:
    """Return the sums of a file's last run, without its requests."""
    loaded = json.loads(path.read_text())
    result = loaded[-1] if isinstance(loaded, list) else loaded
    return {key: value for key, value in result.items() if not isinstance(value, list)}


def _watch_memory() -> None:
    if IS_REHEARSAL:
        return
    time.sleep(4)
    query = [
        "nvidia-smi",
        "--query-gpu=memory.used,utilization.gpu,power.draw,clocks.sm",
        "--format=csv,noheader",
    ]
    seen = subprocess.run(query, capture_output=True, text=True, check=False)
    note("nvidia-smi under load", seen.stdout.strip())


def _metrics(port: int) -> None:
    status, text = _get(port, "/metrics")
    expect("/metrics answers", status == 200)
    for line in text.splitlines():
        if line.startswith(METRICS) and "bucket" not in line:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
