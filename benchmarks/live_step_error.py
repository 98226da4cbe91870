"""How well a server predicted the steps that it ran, from its timeline, as a Markdown table.

    onbeat profile MODEL
    onbeat serve MODEL --timeline timeline.json &      # uses the profile; then send it load, and end it
    python benchmarks/live_step_error.py timeline.json

Predictions are those made when each step was planned, online correction included. The first steps, in which
kernels and memory are prepared, are left out. Errors are absolute and relative to the measured time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timeline", type=Path, help="what `onbeat serve --timeline FILE` has written")
    parser.add_argument("--skip", type=int, default=16, help="first steps to leave out")
    args = parser.parse_args()
    steps = [step for step in read_steps(args.timeline)[args.skip :] if "predicted_ms" in step]
    if not steps:
        raise SystemExit(f"{args.timeline} has no predicted steps; serve with a step-time profile")
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        groups["all"].append(step)
        groups[kind_of(step)].append(step)
    print("| steps | number | median ms | bias | error P50 | P90 | P95 | MBU P50 | MFU P50 |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, group in sorted(groups.items()):
        print(row(name, group))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the arguments of every step; of a server that was killed, too, whose array has no end."""
    text = path.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    return [event["args"] for event in events if event["name"] == "step"]


def kind_of(step: dict[str, Any]) -> str:
    """Return what a step is made of."""
    if not step["chunks"]:
        return "decodes"
    return "mixed" if step["decodes"] else "chunks"


def row(name: str, steps: list[dict[str, Any]]) -> str:
    """Return a line of the table."""
    predicted = np.array([step["predicted_ms"] for step in steps])
    actual = np.array([step["actual_ms"] for step in steps])
    p50, p90, p95 = np.percentile(np.abs(predicted / actual - 1), (50, 90, 95))
    bias = np.exp(np.mean(np.log(predicted / actual)))
    mbu, mfu = (np.median([step[key] for step in steps]) for key in ("mbu", "mfu"))
    return (
        f"| {name} | {len(steps)} | {np.median(actual):.1f} | {bias:.2f} | {p50:.1%} | {p90:.1%} | {p95:.1%} "
        f"| {mbu:.0%} | {mfu:.0%} |"
    )


if __name__ == "__main__":
    main()
