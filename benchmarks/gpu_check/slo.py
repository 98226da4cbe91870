"""Stage K: `slo` live beside `sarathi` with two token budgets, at rates about the knee of each.

    scripts/gpu-check --stages AGK --out OUT             # there
    python -m benchmarks.gpu_check.slo --simulate OUT    # here: the same loads, by the profile in OUT

One server after the other, each with all rates. Chats come beside prompts that are long, an eighth of all. A
load is written down as classes with lengths of their own, so that `onbeat simulate` runs the same one.
`--simulate` of a folder without runs predicts all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.gpu_check.models import model_config, model_folder
from benchmarks.gpu_check.record import IS_REHEARSAL, OUT, WORK, expect, keep_rows, note, seconds_left
from benchmarks.gpu_check.serve import bench, last_run, server

BUDGETS = (256, 512) if IS_REHEARSAL else (512, 2048)
POLICIES: Mapping[str, tuple[str, ...]] = {
    "slo": ("--policy", "slo"),
    **{f"sarathi {each}": ("--policy", "sarathi", "--max-num-batched-tokens", str(each)) for each in BUDGETS},
}
SECONDS = 2 if IS_REHEARSAL else 12
"""Of arrivals, for each rate and server."""
RATES = (6.0, 12.0) if IS_REHEARSAL else (25.0, 30.0, 36.0)
LONG = 300 if IS_REHEARSAL else 4096
PROMPTS, ANSWERS = ((30, 90), (8, 24)) if IS_REHEARSAL else ((153, 459), (75, 225))
"""The least and the most tokens of a chat."""
OBJECTIVES = {"ttft_ms": 500, "tbt_ms": 25}
LONG_SHARE = 0.12
KV_BYTES = 2**26 if IS_REHEARSAL else 40 * 2**30
BLOCK_SIZE = 64
LIMITS = ("--max-model-len", "2048" if IS_REHEARSAL else "8192", "--block-size", str(BLOCK_SIZE))
COLUMNS = ("policy", "long", "rate", "seed", "requests", "kept", "chats_kept", "long_kept")
LATENCIES = ("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")


class Load(NamedTuple):
    """What is asked of each server."""

    long: int
    """Tokens of the long prompts."""
    rate: float
    """Requests a second."""
    seed: int

    def options(self, folder: Path) -> list[str]:
        """Return the options of `bench serve` and `simulate`; the classes are written to a folder."""
        chance, classes = random.Random(0), []
        for name, share, prompts in (
            ("chats", 1 - LONG_SHARE, PROMPTS),
            ("long", LONG_SHARE, [self.long] * 2),
        ):
            lengths = [(chance.randint(*prompts), chance.randint(*ANSWERS)) for _ in range(999)]
            trace = f"{name}-{self.long}.csv"
            with (folder / trace).open("w", newline="") as file:
                csv.writer(file).writerows([("num_prefill_tokens", "num_decode_tokens"), *lengths])
            classes.append({"name": name, **OBJECTIVES, "share": share, "trace": trace})
        path = folder / f"load-{self.long}.yaml"
        path.write_text(yaml.safe_dump({"classes": classes}))
        found = ["--slo-config", str(path), "--request-rate", str(self.rate), "--seed", str(self.seed)]
        return [*found, "--num-prompts", str(round(self.rate * SECONDS))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=3, help="of arrivals and lengths (default: %(default)s)")
    parser.add_argument("--reverse", action="store_true", help="`slo` is last, not first")
    parser.add_argument("--long", type=int, nargs="+", default=[LONG], help="tokens of long prompts")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second")
    parser.add_argument("--simulate", type=Path, metavar="OUT", help="compare runs with simulated ones")
    args = parser.parse_args()
    loads = [Load(long, rate, args.seed) for long in args.long for rate in args.rates]
    if args.simulate is not None:
        return simulate(args.simulate, loads)
    kept: dict[Load, dict[str, float]] = {load: {} for load in loads}
    classes = OUT / "classes.yaml"
    classes.write_text(
        yaml.safe_dump({"classes": [{"name": name, **OBJECTIVES} for name in ("chats", "long")]})
    )
    for policy in list(POLICIES)[:: -1 if args.reverse else 1]:
        profile = OUT / "profile.json"
        known = ("--step-time-profile", str(profile)) if policy == "slo" and profile.exists() else ()
        arguments = ("--kv-cache-memory-bytes", str(KV_BYTES), "--slo-classes", str(classes), *known)
        with server("8b", *LIMITS, *POLICIES[policy], *arguments) as port:
            for load, found in kept.items():
                if port is None or seconds_left() < SECONDS + 12:
                    expect(f"{policy} at {load.rate:g}/s", passed=False, text="no server, or no time left")
                elif (result := measure(port, policy, load)) is not None:
                    found[policy] = result
    for load, found in kept.items():
        own, others = found.pop("slo", 0.0), found.values()
        name = f"{load.rate:g}/s, long {load.long}: slo keeps as many as the better budget"
        expect(name, IS_REHEARSAL or (others and own >= max(others) - 0.01), f"{own:.3f}", shown=True)
    return 0


def measure(port: int, policy: str, load: Load) -> float | None:
    """Load a server, keep what was found, and return the share of requests that kept their objectives."""
    path = WORK / "slo.json"
    name = f"{policy}, long {load.long}, {load.rate:g}/s"
    if not bench(port, "8b", name, [*load.options(OUT), "--num-warmups", "2"], path):
        return None
    result = last_run(path)
    line = {"policy": policy, **load._asdict(), "result": result}
    with (OUT / "slo.json").open("a") as file:
        file.write(json.dumps(line) + "\n")
    keep_rows("slo.csv", (*COLUMNS, *LATENCIES, "long_p99_ttft_ms"), [row(line)])
    note(f"{name}: kept", float(result["attainment"]), shown=True)
    return float(result["attainment"])


def row(line: Mapping[str, Any]) -> list[Any]:
    """Return the values of `COLUMNS` and latencies."""
    result = line["result"]
    chats, of_long = (result["classes"].get(name, {}) for name in ("chats", "long"))
    kept = [each.get("attainment") for each in (result, chats, of_long)]
    named = [*(line[key] for key in COLUMNS[:4]), result["num_prompts"], *kept]
    return [*named, *(result.get(key) for key in LATENCIES), of_long.get("p99_ttft_ms")]


def simulate(out: Path, loads: Sequence[Load]) -> int:
    """Print what each run kept and what a simulated one keeps, and how far its latencies are off."""
    lines = list(_lines(out / "slo.json")) or [
        {"policy": policy, **load._asdict(), "result": None} for load in loads for policy in POLICIES
    ]
    config, profile = model_config("8b"), out / "profile.json"
    block_bytes = 4 * BLOCK_SIZE * config.num_layers * config.num_kv_heads * config.head_dim
    device = ["--num-blocks", str(KV_BYTES // block_bytes), "--device", "h100-sxm"]
    if profile.exists():
        device[-1] = json.loads(profile.read_text())["key"]["device"]
        device += ["--step-time", "fitted", "--profile", str(profile)]
    print(f"{'policy':12} {'long':>5} {'rate':>5} {'live':>6} {'simulated':>9}  TTFT and TPOT of it, off by")
    for line in lines:
        load, path = Load(line["long"], line["rate"], line["seed"]), WORK / "simulated.json"
        command = [sys.executable, "-m", "onbeat", "simulate", "--model", str(model_folder("8b")), *device]
        command += [*LIMITS, *POLICIES[line["policy"]], "--dataset-name", "random", *load.options(WORK)]
        subprocess.run([*command, "--disable-tqdm", "--json", str(path)], check=True, capture_output=True)
        found, live = last_run(path), line["result"]
        kept, off = "-", ""
        if live is not None:
            kept = f"{live['attainment']:.3f}"
            assert found["total_input_tokens"] == live["total_input_tokens"], "that is another load"
            both = [float(found[key]) / float(live[key]) - 1 for key in ("mean_ttft_ms", "mean_tpot_ms")]
            off = " ".join(f"{each:+7.1%}" for each in both)
        print(f"{line['policy']:12} {load.long:5} {load.rate:5g} {kept:>6} {found['attainment']:9.3f}  {off}")
    return 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
