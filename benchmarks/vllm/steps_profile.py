"""Record a vLLM server's steps, fit a profile to them, simulate another load, and serve that load.

    python -m benchmarks.vllm.steps_profile --vllm .vllm/bin/vllm --model FOLDER --out DIR

The server runs with `onbeat.vllm.StepLog`. Three loads go to it, one after another:

1. alone: one request at a time, for what the server does beside steps;
2. recorded: rates up and down, whose steps are fitted, a fifth of them held back;
3. served: a Poisson load that no fit has seen. It is simulated as well, with the profile alone.

Printed are the errors on held-back steps, on the steps of the third load (`onbeat replay --steps`), and of
its TTFT and TBT, simulated against served. It holds if the median error of held-back steps is at most 5 %,
and the simulated medians are within 5 % (TBT) and 10 % (TTFT). Needs a machine with nothing else on it: two
cores take some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_STARTS_WITHIN = 400.0
_LIMITS = {"held_back": 0.05, "tbt": 0.05, "ttft": 0.10}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="its command, in an environment of its own")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8192)
    parser.add_argument("--rates", default="1,3,5", help="requests/s of the recorded load, in turn")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s of the served load")
    parser.add_argument("--num-prompts", type=int, default=200, help="of the recorded and the served load")
    parser.add_argument("--num-alone", type=int, default=20, help="of the load of one request at a time")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=60)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("vllm_flags", nargs="*", help="behind --: further flags of vllm serve")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps = args.out / "steps.jsonl"
    with serving(args, steps):
        bench(args, "alone", "--max-concurrency", "1", "--num-prompts", str(args.num_alone))
        rates = ",".join(f"{rate}:15" for rate in args.rates.split(","))
        count = ("--num-prompts", str(args.num_prompts))
        bench(args, "recorded", "--arrivals", "steps", "--rate-steps", rates, *count)
        num_recorded = len(steps.read_text().splitlines())
        bench(args, "served", "--request-rate", str(args.rate), "--seed", "1", *count)
    recorded, served = split(steps, num_recorded)
    return compare(args, recorded, served)


@contextmanager
def serving(args: argparse.Namespace, steps: Path) -> Iterator[None]:
    """Run vLLM with the step log; the plug-in is found beside it, in a folder of this checkout's own."""
    site = args.out / "site" / "onbeat_here-0.dist-info"
    site.mkdir(parents=True, exist_ok=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: onbeat-here\nVersion: 0\n")
    plugin = "[vllm.stat_logger_plugins]\nonbeat_step_log = onbeat.vllm:StepLog\n"
    (site / "entry_points.txt").write_text(plugin)
    environment = os.environ | {
        "PYTHONPATH": f"{site.parent.absolute()}:{ROOT / 'src'}",
        "ONBEAT_STEP_LOG": str(steps),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        *(args.vllm, "serve", args.model, "--served-model-name", "default", "--host", "127.0.0.1"),
        *("--port", args.port, "--max-num-seqs", args.max_num_seqs),
        *("--max-num-batched-tokens", args.max_num_batched_tokens, "--no-enable-prefix-caching"),
        *("--enable-logging-iteration-details", *args.vllm_flags),
    ]
    with (args.out / "vllm.log").open("w") as log:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
    try:
        wait_until_ready(f"http://127.0.0.1:{args.port}/health", server)
        yield
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit("vLLM ended while it started; see vllm.log")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(1)
    sys.exit(f"vLLM was not ready in {_STARTS_WITHIN:g} s; see vllm.log")


def load_flags(args: argparse.Namespace) -> list[str]:
    lengths = ("--random-input-len", args.input_len, "--random-output-len", args.output_len)
    return list(map(str, ("--dataset-name", "random", "--random-range-ratio", 0.9, *lengths)))


def bench(args: argparse.Namespace, name: str, *flags: str) -> None:
    server = ("--base-url", f"http://127.0.0.1:{args.port}", "--model", "default", "--tokenizer", args.model)
    saved = ("--json", args.out / f"{name}.json", "--save-detailed", "--disable-tqdm", "--ignore-eos")
    onbeat("bench", "serve", *map(str, server), *load_flags(args), *map(str, saved), *flags)


def split(steps: Path, num_recorded: int) -> tuple[Path, Path]:
    """Return the steps of the recorded and of the served load, each as a file with the header."""
    lines = steps.read_text().splitlines(keepends=True)
    recorded, served = steps.with_name("recorded.jsonl"), steps.with_name("served.jsonl")
    recorded.write_text("".join(lines[:num_recorded]))
    served.write_text("".join([lines[0], *lines[num_recorded:]]))
    return recorded, served


def compare(args: argparse.Namespace, recorded: Path, served: Path) -> int:
    profile = args.out / "profile.json"
    requests = str(args.out / "alone.json")
    onbeat("profile", "--from", str(recorded), "--output", str(profile), "--requests", requests)
    onbeat("replay", "--steps", str(served), "--profile", str(profile))
    content = json.loads(profile.read_text())
    device = ("--model", args.model, "--device", content["key"]["device"], "--step-time", "fitted")
    limits = ("--max-num-seqs", args.max_num_seqs, "--max-num-batched-tokens", args.max_num_batched_tokens)
    load = ("--request-rate", args.rate, "--seed", 1, "--num-prompts", args.num_prompts)
    memory = ("--policy", "sarathi", "--num-blocks", 4096, "--max-model-len", 2048, "--disable-tqdm")
    flags = map(str, (*device, "--profile", profile, *limits, *load, *memory))
    onbeat("simulate", *flags, *load_flags(args), "--json", str(args.out / "simulated.json"))
    measured, simulated = (read(args.out / f"{name}.json") for name in ("served", "simulated"))
    errors = {"held_back": content["fit"]["errors"]["p50"]}
    print(f"held-back steps: median error {errors['held_back']:.1%}")
    for metric, column in (("tbt", "median_itl_ms"), ("ttft", "median_ttft_ms")):
        errors[metric] = abs(simulated[column] / measured[column] - 1)
        print(
            f"{metric.upper()} P50: served {measured[column]:.1f} ms, simulated {simulated[column]:.1f} ms, "
            f"error {errors[metric]:.1%}"
        )
    missed = [name for name, most in _LIMITS.items() if errors[name] > most]
    print(f"missed: {', '.join(missed)}" if missed else "all within their limits")
    (args.out / "errors.json").write_text(json.dumps(errors))
    return 1 if missed else 0


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def onbeat(*arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command: Sequence[str] = [sys.executable, "-m", "onbeat", *arguments]
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())
