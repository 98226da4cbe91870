"""Retrieval by one planned call or by a chain of calls, simulated.

    python -m benchmarks.jobs.plan_or_chain run [--jobs 2] [--seeds 5] [--seconds 60]
    python -m benchmarks.jobs.plan_or_chain report [--write]

A chain chooses 2 to 4 searches one after another, by a thought each, and then answers. A plan names all of
them in one call under a JSON schema, the searches run at once, and a second call answers (REAPER, arXiv
2407.18553). Both have the same deadline, and the same model makes all calls. `run` skips what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.pages import RESULTS, git_commit, markdown_table
from benchmarks.harness.store import Results, run_or_report, study_parser
from onbeat.core.options import make
from onbeat.metrics.jobs import summarise_jobs
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.virtual_clients import call_times
from onbeat.workload.job_kinds import JobKind, draw_jobs
from onbeat.workload.job_load import job_load, job_outcomes

LINES = RESULTS / "plan-or-chain.jsonl"
MODEL = "meta-llama/Llama-3.1-8B"
KINDS: tuple[JobKind, JobKind] = ("retrieval-chain", "retrieval-plan")
DEADLINES = {"a100-80-sxm": 6.0, "h100-sxm": 4.0}
"""Seconds for a whole answer: a chain alone keeps nine in ten."""
RATES = {"a100-80-sxm": (0.2, 3.0, 5.0), "h100-sxm": (0.5, 8.0, 13.0)}
"""Jobs a second: idle, loaded, and more than a chain's calls can be in time for."""
LOADS = ("idle", "loaded", "overloaded")


@dataclass(frozen=True, slots=True)
class RetrievalRun:
    """Jobs of a kind at a rate."""

    device: str
    kind: JobKind
    rate: float
    seed: int
    seconds: float

    def run(self) -> dict[str, Any]:
        """Return how many jobs were kept, and how long those took that came to their end."""
        rng = np.random.default_rng([self.seed, 13])
        num_jobs = max(round(self.rate * self.seconds), 20)
        starts = np.sort(rng.uniform(0, num_jobs / self.rate, num_jobs))
        jobs = draw_jobs(self.kind, num_jobs, rng, deadline=DEADLINES[self.device])
        load = job_load("retrieval", [replace(job, start=0.0) for job in jobs], starts)
        settings = make(
            ReplicaSettings, model=MODEL, device=self.device, policy="slo", declared_max_tokens=1024
        )
        simulation = build_simulation(settings)
        records = simulate(load, simulation.config, simulation.step_time).records
        assert load.jobs is not None
        calls = {int(each.request_id): call_times(each) for each in records}
        own = summarise_jobs(job_outcomes(load.jobs, calls))[self.kind]
        return {"kept": own.attainment, "median_s": own.median_seconds, "calls": len(load) / num_jobs}


def main(argv: Sequence[str] | None = None) -> None:
    args = study_parser(__doc__, seeds=5, seconds=60.0).parse_args(argv)
    runs = [
        RetrievalRun(device, kind, rate, seed, args.seconds)
        for seed, (device, rates), kind in product(range(args.seeds), RATES.items(), KINDS)
        for rate in rates
    ]
    results = Results(LINES, "plan-or-chain-1")
    run_or_report(args, runs, results, lambda: _page(runs, results), "plan-or-chain")


def _page(runs: Sequence[RetrievalRun], results: Results) -> str:
    header = ("load", "calls", "P50 of a job, s", "kept", "plan over chain: P50, kept")
    rows = [
        [f"{device}, {what}, {rate:g}/s", *_cells(runs, results, device, rate)]
        for device, rates in RATES.items()
        for what, rate in zip(LOADS, rates, strict=True)
    ]
    return f"Commit {git_commit()}.\n\n" + markdown_table(header, rows) + "\n"


def _cells(runs: Sequence[RetrievalRun], results: Results, device: str, rate: float) -> list[str]:
    """Return the medians over seeds, of the chain and of the plan."""

    def found(kind: JobKind, name: str) -> float | None:
        own = [each for each in runs if (each.device, each.kind, each.rate) == (device, kind, rate)]
        values = [one[name] for each in own if (one := results.get(each)) is not None]
        values = [value for value in values if value is not None]
        return median(values) if values else None

    pairs = {name: [found(kind, name) for kind in KINDS] for name in ("calls", "median_s", "kept")}
    cells = [" to ".join("-" if each is None else f"{each:.2f}" for each in pair) for pair in pairs.values()]
    ratios = [
        f"{plan / chain:.2f}" if chain and plan else "-" for chain, plan in (pairs["median_s"], pairs["kept"])
    ]
    return [*cells, ", ".join(ratios)]


if __name__ == "__main__":
    main()
