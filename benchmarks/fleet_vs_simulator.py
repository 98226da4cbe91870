"""The same load on a fleet of stand-ins and in the simulator: how far apart are their latencies?

    python benchmarks/fleet_vs_simulator.py --replicas 2 --rates 2,3 --json FILE

Starts `onbeat serve` with replicas that stand in for a device, loads it with `onbeat bench serve`, and
simulates the same requests with the same policy and router. What a step costs beside its predicted time
(planning, messages, the client) is measured first, with one request at a time, and given to the simulator as
`--host-overhead-ms`. Times are the client's. Needs a quiet machine: all replicas, the server and the client
share its cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.fleet import replica_arguments, serving, summary_of
from harness.pages import markdown_table

QUANTILES = ("p50", "p99")
METRICS = ("ttft", "itl")


def objectives(args: argparse.Namespace) -> list[str]:
    return ["--slo-ttft-ms", str(args.ttft_ms), "--slo-tbt-ms", str(args.tbt_ms)]


def load(args: argparse.Namespace, rate: float | None, num_prompts: int) -> list[str]:
    """Return the flags of a load, which both commands understand; without a rate one request at a time."""
    flags = ["--dataset-name", "random", "--input-len", str(args.input_len), "--output-len"]
    flags += [str(args.output_len), "--random-range-ratio", "0.8", "--num-prompts", str(num_prompts)]
    flags += ["--seed", str(args.seed), "--disable-tqdm", *objectives(args)]
    return [*flags, *(["--max-concurrency", "1"] if rate is None else ["--request-rate", str(rate)])]


def live(args: argparse.Namespace, url: str, rate: float | None, num_prompts: int) -> dict[str, Any]:
    flags = ["--base-url", url, "--ignore-eos", *load(args, rate, num_prompts)]
    return summary_of(["bench", "serve", *flags])


def simulated(
    args: argparse.Namespace, rate: float | None, num_prompts: int, overhead_ms: float
) -> dict[str, Any]:
    flags = ["--device", args.device, "--replicas", str(args.replicas), "--policy", "slo"]
    flags += ["--host-overhead-ms", f"{overhead_ms:.3f}", *load(args, rate, num_prompts)]
    return summary_of(["simulate", "--model", args.model, *flags])


def quantiles(summary: dict[str, Any]) -> dict[str, float]:
    """Return latencies in ms, by metric and quantile."""
    names = {f"{metric}_{q}": f"{q}_{metric}_ms" for metric in METRICS for q in QUANTILES}
    names |= {f"{metric}_p50": f"median_{metric}_ms" for metric in METRICS}
    return {name: float(summary[key]) for name, key in names.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--device", default="a10g")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rates", default="2,3")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--ttft-ms", type=float, default=2000)
    parser.add_argument("--tbt-ms", type=float, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8971)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, found = [], []
    arguments = [*replica_arguments(args.model, args.device, args.replicas), *objectives(args)]
    with serving(arguments, args.port) as fleet:
        bare = quantiles(simulated(args, None, 10, 0.0))
        alone = quantiles(live(args, fleet.url, None, 10))
        overhead = max(0.0, alone["itl_p50"] - bare["itl_p50"])
        print(f"beside its predicted {bare['itl_p50']:.1f} ms a step takes {overhead:.2f} ms")
        for rate in map(float, args.rates.split(",")):
            measured = quantiles(live(args, fleet.url, rate, args.num_prompts))
            predicted = quantiles(simulated(args, rate, args.num_prompts, overhead))
            found.append({"rate": rate, "overhead_ms": overhead, "live": measured, "simulated": predicted})
            for name, value in measured.items():
                error = predicted[name] / value - 1
                rows.append(
                    [f"{rate:g}", name, f"{value:.1f}", f"{predicted[name]:.1f}", f"{error * 100:+.1f} %"]
                )
                print(*rows[-1], flush=True)
    print(markdown_table(["requests/s", "", "live, ms", "simulated, ms", "error"], rows))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
