"""Two or more servers under the same load, in interleaved rounds.

    python benchmarks/compare_servers.py servers.yaml --rounds 3 --json result.json --markdown result.md

`servers.yaml` is a list; the first entry is the one whose ratio to the others is reported:

    - name: onbeat
      command: onbeat serve MODEL --port 8100
      url: http://127.0.0.1:8100
    - name: vllm
      command: vllm serve MODEL --port 8102
      url: http://127.0.0.1:8102
      env: {VLLM_CPU_KVCACHE_SPACE: "4"}

Each round starts one server after another, loads it at every concurrency with `onbeat bench serve` (same
lengths, fresh words, so that no prefix cache helps) and stops it. Client and server share the machine. Ratios
are taken within a round, since a machine's speed drifts between rounds; the median is quoted with minimum and
maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from harness.pages import git_commit

REQUESTS_PER_SLOT = {1: 6, 8: 5, 16: 4, 32: 3}
START_SECONDS = 300


def main() -> None:
    args = parse_args()
    servers = yaml.safe_load(args.servers.read_text(encoding="utf-8"))
    results: list[dict[str, Any]] = []
    limits = [machine_limits()]
    for round_index in range(args.rounds):
        for server in servers:
            results += run_server(server, round_index, args)
        limits.append(machine_limits())
    summary = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": shlex.join(["python", *sys.argv]),
        "servers": servers,
        "machine_limits": limits,
        "results": results,
    }
    text = render(summary, args.concurrency)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=180)
    parser.add_argument("--output-len", type=int, default=150)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def run_server(server: dict[str, Any], round_index: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server, load it at every concurrency, stop it."""
    log = tempfile.NamedTemporaryFile("w+", suffix=f"-{server['name']}.log", delete=False)  # noqa: SIM115
    process = subprocess.Popen(
        shlex.split(server["command"]),
        env=os.environ | {key: str(value) for key, value in server.get("env", {}).items()},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until_ready(server, process, log.name)
        load(server, concurrency=4, num_prompts=8, args=args)  # warms up
        results = []
        for concurrency in args.concurrency:
            num_prompts = concurrency * REQUESTS_PER_SLOT.get(concurrency, 6)
            result = load(server, concurrency=concurrency, num_prompts=num_prompts, args=args)
            result |= {"server": server["name"], "round": round_index, "concurrency": concurrency}
            speed = f"{result['output_throughput']:.1f} tok/s"
            print(f"round {round_index} {server['name']:8} x{concurrency}: {speed}")
            results.append(result)
        return results
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(server: dict[str, Any], process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{server['url']}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{server['name']} did not start; its log: {log}")
            time.sleep(0.5)
        else:
            return


def load(
    server: dict[str, Any], *, concurrency: int, num_prompts: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run one closed loop and return the numbers that matter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "onbeat.cli.main", "bench", "serve", "--base-url", server["url"]]
        command += ["--dataset-name", "conversation", "--input-len", str(args.input_len)]
        command += ["--output-len", str(args.output_len), "--ignore-eos", "--seed", "1"]
        command += ["--max-concurrency", str(concurrency), "--num-prompts", str(num_prompts)]
        command += ["--metric-percentiles", "50,99", "--disable-tqdm", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the load on {server['name']} failed: {done.stderr[-2000:]}")
        data = json.loads(path.read_text(encoding="utf-8"))
    keys = (
        "completed",
        "failed",
        "duration",
        "total_input_tokens",
        "total_output_tokens",
        "output_throughput",
    )
    result = {key: data[key] for key in keys}
    for metric in ("ttft", "itl", "tpot"):
        result |= {f"{q}_{metric}_ms": data[f"{q}_{metric}_ms"] for q in ("mean", "p50", "p99")}
    if result["failed"]:
        sys.exit(f"{result['failed']} requests to {server['name']} failed; nothing to compare")
    return result


def render(summary: dict[str, Any], concurrencies: list[int]) -> str:
    """Return the comparison as Markdown."""
    names = [server["name"] for server in summary["servers"]]
    lines = [f"# {' against '.join(names)}", "", f"{summary['date']}, commit {summary['commit']}", ""]
    lines += ["    " + summary["command"], ""]
    lines += [
        "| concurrency | server | out tok/s | TTFT p50/p99 ms | TBT p50/p99 ms | TPOT mean ms | ratio to it |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for concurrency in concurrencies:
        for name in names:
            lines.append(render_row(summary["results"], concurrency, name, names[0]))
    lines += [
        "",
        "Medians over rounds. Ratio: output tokens/s of the first server over this one, median (min to max).",
    ]
    lines += ["", "Machine limits before the first round and after each:", ""]
    lines += [f"- {json.dumps(limits)}" for limits in summary["machine_limits"]]
    for server in summary["servers"]:
        lines += ["", f"{server['name']}: `{server['command']}`"]
    return "\n".join(lines) + "\n"


def render_row(results: list[dict[str, Any]], concurrency: int, name: str, first: str) -> str:
    def of(server: str) -> dict[int, dict[str, Any]]:
        return {r["round"]: r for r in results if r["server"] == server and r["concurrency"] == concurrency}

    ours, theirs = of(first), of(name)

    def median(key: str) -> float:
        return statistics.median(result[key] for result in theirs.values())

    ratios = [ours[index]["output_throughput"] / theirs[index]["output_throughput"] for index in theirs]
    ratio = (
        "" if name == first else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    cells = [
        str(concurrency),
        name,
        f"{median('output_throughput'):.1f}",
        f"{median('p50_ttft_ms'):.0f} / {median('p99_ttft_ms'):.0f}",
        f"{median('p50_itl_ms'):.1f} / {median('p99_itl_ms'):.0f}",
        f"{median('mean_tpot_ms'):.1f}",
        ratio,
    ]
    return f"| {' | '.join(cells)} |"


def machine_limits() -> dict[str, float]:
    """Measure in a process of its own, so that its threads are gone before the next server starts."""
    script = Path(__file__).with_name("machine_limits.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


if __name__ == "__main__":
    main()
