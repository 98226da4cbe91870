"""Where the one server process of a fleet saturates: its CPU time for a request and for a streamed token.

    python benchmarks/fleet_front_end.py --replicas 4 --json FILE

Starts `onbeat serve` with replicas that stand in for a device, loads it with `onbeat bench serve`, once with
answers of one token and once with long ones, and reads the CPU time of the server's process (HTTP, tokenizer,
router, messages to and from the replicas) from /proc. A process of Python uses one core, so it can do no more
than one over that time; what a core of this machine gives is not affected by what else runs on it, but for
caches.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from harness.fleet import Fleet, fleet_parser, replica_arguments, serving, summary_of
from harness.pages import markdown_table

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process so far, that of its children left out."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def load(fleet: Fleet, args: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Run a closed loop of requests; return what the server spent on them."""
    num_prompts = args.num_prompts if num_tokens == 1 else 2 * args.streams
    flags = ["--dataset-name", "random", "--input-len", str(args.input_len), "--disable-tqdm", "--ignore-eos"]
    flags += ["--num-prompts", str(num_prompts), "--max-concurrency", str(args.streams)]
    before = cpu_seconds(fleet.process_id)
    summary = summary_of(["bench", "serve", "--base-url", fleet.url, "--output-len", str(num_tokens), *flags])
    seconds = cpu_seconds(fleet.process_id) - before
    assert summary["completed"] == num_prompts, f"{summary['failed']} requests failed"
    return {
        "tokens": num_tokens,
        "requests": num_prompts,
        "cpu_us_per_request": 1e6 * seconds / num_prompts,
        "requests_per_s": summary["request_throughput"],
        "tokens_per_s": summary["output_throughput"],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = fleet_parser(__doc__, port=8973)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    args = parser.parse_args()
    arguments = [*replica_arguments(args.model, args.device, args.replicas), "--no-log-requests"]
    with serving(arguments, args.port) as fleet:
        load(fleet, args, 1)  # warm-up
        short = load(fleet, args, 1)
        long = load(fleet, args, args.output_len)
    token = (long["cpu_us_per_request"] - short["cpu_us_per_request"]) / (args.output_len - 1)
    rows = [
        [
            f"{each['tokens']}",
            f"{each['cpu_us_per_request']:.0f}",
            f"{1e6 / each['cpu_us_per_request']:.0f}",
            f"{each['requests_per_s']:.0f}",
            f"{each['tokens_per_s']:.0f}",
        ]
        for each in (short, long)
    ]
    header = ["tokens", "CPU, us a request", "requests/s of a core", "ran at requests/s", "tokens/s"]
    print(markdown_table(header, rows))
    print(f"a token beside that: {token:.1f} us, {1e6 / token:,.0f} tokens/s of a core")
    if args.json:
        args.json.write_text(json.dumps({"short": short, "long": long, "cpu_us_per_token": token}, indent=1))


if __name__ == "__main__":
    main()
