"""Steps of the CPU engine as it is and with settings changed, in turns in one process: what a setting costs.

    python -m benchmarks.check.native_settings MODEL batch_invariant=true
    python -m benchmarks.check.native_settings MODEL --before FILE.so  # built from another commit
    python -m benchmarks.check.native_settings MODEL batch_invariant=true --quantization none --threads 1

Both engines run each case A B, B A; the page gives CPU time and time, each the least of a round, as ratios
within rounds: median, least and most. With one thread CPU time is what the step computes; more threads also
wait for one another at full speed. Results go to `benchmarks/results/DATE-NAME.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args

from benchmarks.check.cpu_step.driver import StepDriver, StepSeconds
from benchmarks.check.cpu_step.floor import Case
from benchmarks.harness.pages import REPOSITORY, git_commit, machine
from onbeat.core.options import change, make
from onbeat.engine.engine_config import QUANTIZATIONS, EngineConfig, InstructionSet
from onbeat.engine.load import prepare_model
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.native.library import VARIABLE
from onbeat.hub.resolve import resolve_model

GROUPS = (
    [*(Case.decode(batch, 256) for batch in (1, 8, 32)), Case.prefill(512), Case.prefill(1500)],
    [Case.decode(batch, 2048) for batch in (1, 8)],
)
"""Cases of the same requests, which are filled first."""
TURNS, STEPS = 2, 3
"""The first step of a turn is not counted."""


def main() -> None:
    args = parse_args()
    changes = dict(parse_change(text) for text in args.changes)
    config = make(
        EngineConfig,
        model=resolve_model(args.model),
        device="cpu",
        dtype=args.dtype,
        quantization=args.quantization,
        instruction_set=args.instruction_set,
        threads=args.threads,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=2 * 2**30,
    )
    runners = [
        load(each, library)
        for each, library in (
            (config, args.before),
            (change(config, **changes), os.environ.get(VARIABLE, "")),
        )
    ]
    found: dict[Case, list[tuple[StepSeconds, StepSeconds]]] = {}
    for cases in GROUPS:
        batch, context = max(case.batch for case in cases), cases[0].context
        drivers = [StepDriver(runner, num_requests=batch, num_tokens=context + STEPS) for runner in runners]
        for index in range(args.rounds):
            for case in cases:
                found.setdefault(case, []).append(measure(drivers, case, is_reversed=index % 2 == 1))
        for driver in drivers:
            driver.close()
    page = render(args, found)
    print(page)
    path = args.results_dir / f"{args.day}-{args.name}.md"
    path.write_text(page, encoding="utf-8")


def load(config: EngineConfig, library: str) -> ModelRunner:
    """Load the model; `library`: the native library's file, empty for the one that is installed."""
    os.environ[VARIABLE] = library
    return prepare_model(config).load(print).runner


def measure(
    drivers: Sequence[StepDriver], case: Case, *, is_reversed: bool
) -> tuple[StepSeconds, StepSeconds]:
    """Return the least times of both engines, which take turns."""
    times: list[list[StepSeconds]] = [[], []]
    for _ in range(TURNS):
        for engine in (1, 0) if is_reversed else (0, 1):
            times[engine] += drivers[engine].run(case, STEPS)[1:]
    before, after = (StepSeconds(*map(min, zip(*own, strict=True))) for own in times)
    return before, after


def render(args: argparse.Namespace, found: Mapping[Case, Sequence[tuple[StepSeconds, StepSeconds]]]) -> str:
    """Return the page."""
    lines = [
        f"# {' '.join(args.changes) or 'Two builds'}",
        "",
        f"`{shlex.join(['python', '-m', 'benchmarks.check.native_settings', *sys.argv[1:]])}`, "
        f"commit {git_commit()}, {machine()}",
        "",
        f"Medians of {args.rounds} rounds (least to most): with the change over without.",
        "",
        "| step | CPU ms without | CPU, ratio | time, ratio |",
        "| --- | --- | --- | --- |",
    ]
    for case, pairs in found.items():
        cpu, wall = ([getattr(b, key) / getattr(a, key) for a, b in pairs] for key in ("cpu", "whole"))
        without = statistics.median(1000 * before.cpu for before, _ in pairs)
        lines.append(f"| {case.name} | {without:.1f} | {spread(cpu)} | {spread(wall)} |")
    return "\n".join(lines) + "\n"


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def parse_change(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as of onbeat serve")
    parser.add_argument("changes", nargs="*", metavar="FIELD=VALUE", help="of the engine's configuration")
    parser.add_argument(
        "--before", default="", metavar="FILE", help="native library of the engine without the changes"
    )
    parser.add_argument("--instruction-set", default="auto", choices=get_args(InstructionSet))
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="native-settings", help="in the name of the page")
    parser.add_argument("--results-dir", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--day", default=date.today().isoformat())
    return parser.parse_args()


if __name__ == "__main__":
    main()
