"""Jobs in time: ways to divide a deadline among calls, EDF with triage, and first come first served.

    python -m benchmarks.jobs.compare run [--jobs 2] [--seeds 3] [--minutes 30] [--seconds 40] [--kind agents]
        [--way divided]
    python -m benchmarks.jobs.compare report [--write]

A run is 40 seconds of arrivals of jobs of one kind, and of chats without a deadline beside them, on one
virtual device. Every request declares 1,024 output tokens, so that nobody knows lengths beforehand. A job is
kept if all its calls end by its deadline; a client gives up once the deadline has passed. `run` appends a
line a run and skips what is there.
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
from onbeat.core.slo import SLO
from onbeat.jobs.call import Later, Split, beside_later, by_work
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.jobs import summarise_jobs
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.virtual_clients import call_times
from onbeat.workload.job import Job
from onbeat.workload.job_kinds import STRETCHES, JobKind, draw_jobs, seconds_alone
from onbeat.workload.job_load import job_load, job_outcomes
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

LINES = RESULTS / "jobs-compare.jsonl"
MODEL = "meta-llama/Llama-3.1-8B"
TOKEN_SECONDS = {"a100-80-sxm": 0.012, "h100-sxm": 0.008}
"""What an output token takes on an idle device, about."""
RATES: dict[tuple[str, JobKind], tuple[float, float]] = {
    ("a100-80-sxm", "agents"): (1.8, 3.0),
    ("a100-80-sxm", "retrieval-plan"): (6.0, 12.0),
    ("a100-80-sxm", "chat-sessions"): (12.0, 20.0),
    ("h100-sxm", "agents"): (4.5, 8.0),
    ("h100-sxm", "retrieval-plan"): (14.0, 28.0),
    ("h100-sxm", "chat-sessions"): (25.0, 40.0),
}
"""Jobs a second: a load that is carried, and one that is too much."""
CHATS = 0.5
"""Chats a second beside the jobs, each answer of which has objectives of its own."""


def evenly(later: Later) -> float:
    """Give each call the same part of the time that is left."""
    return later.seconds / (1 + later.num_later)


def whole_rest(later: Later) -> float:
    """Give a call all the time that is left."""
    return later.seconds


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, and what a call of a job gets of the job's time."""

    policy: str
    split: Split
    says_calls_left: bool = True


WAYS = {
    "divided": Way("slo", beside_later),
    "divided, calls left learnt": Way("slo", beside_later, says_calls_left=False),
    "by work": Way("slo", by_work),
    "whole rest": Way("slo", whole_rest),
    "evenly": Way("slo", evenly),
    "EDF with triage, evenly": Way("edf-triage", evenly),
    "FCFS": Way("sarathi", evenly),
}


@dataclass(frozen=True, slots=True)
class JobRun:
    """One way with one load."""

    device: str
    kind: JobKind
    rate: float
    way: str
    seed: int
    seconds: float

    def run(self) -> dict[str, Any]:
        """Return how many jobs and chats were kept."""
        way = WAYS[self.way]
        load = self._load(way)
        settings = {"declared_max_tokens": 1024, "policy": way.policy}
        if way.policy != "slo":
            settings["max_num_batched_tokens"] = 512
        simulation = build_simulation(make(ReplicaSettings, model=MODEL, device=self.device, **settings))
        config = replace(simulation.config, job_split=way.split)
        records = simulate(load, config, simulation.step_time).records
        assert load.jobs is not None
        calls = {int(each.request_id): call_times(each) for each in records}
        found = summarise_jobs(job_outcomes(load.jobs, calls))
        own = found[self.kind]
        chats = [each for each in records if each.request_class == "chat"]
        return {
            "offered": own.num_offered,
            "kept": own.attainment,
            "wasted": own.wasted_share,
            "twice": own.twice_share,
            "chat": float(np.mean(good_requests(chats, mode="stream"))),
        }

    def _load(self, way: Way) -> OfferedLoad:
        rng = np.random.default_rng([self.seed, 7])
        num_jobs, num_chats = round(self.rate * self.seconds), round(CHATS * self.seconds)
        own = [self._due(each, rng) for each in draw_jobs(self.kind, num_jobs, rng)]
        chats = [replace(each, kind="chat") for each in draw_jobs("chat-sessions", num_chats, rng)]
        starts = rng.uniform(0, self.seconds, len(own) + len(chats))
        jobs = [
            replace(job, start=float(start), says_calls_left=way.says_calls_left)
            for job, start in zip([*own, *chats], starts, strict=True)
        ]
        jobs.sort(key=lambda job: job.start or 0.0)
        classes = (
            SLOClass(name="chat", slo=SLO(ttft=0.5, tbt=0.05), share=0.5),
            SLOClass(name=self.kind, slo=SLO(), share=0.5),
        )
        load = job_load("jobs", jobs, np.array([job.start for job in jobs]))
        return load.with_classes(classes, seed=self.seed)

    def _due(self, job: Job, rng: np.random.Generator) -> Job:
        """Return a job with a deadline: what its tokens take alone, several times, and its think times."""
        hasty = replace(job, calls=tuple(replace(call, think=0.0) for call in job.calls))
        alone, tokens = (seconds_alone(each, TOKEN_SECONDS[self.device]) for each in (job, hasty))
        return replace(job, deadline=float(rng.choice(STRETCHES)) * tokens + alone - tokens)


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser(__doc__, seeds=3, seconds=40.0)
    parser.add_argument("--kind", action="append", choices=sorted({kind for _, kind in RATES}))
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--overload", action="store_true", help="only the loads that are too much")
    args = parser.parse_args(argv)
    runs = [
        JobRun(device, kind, rate, way, seed, args.seconds)
        for seed, ((device, kind), rates), way in product(range(args.seeds), RATES.items(), args.way or WAYS)
        for rate in rates[args.overload :]
        if kind in (args.kind or [kind])
    ]
    results = Results(LINES, "jobs-1")
    run_or_report(args, runs, results, lambda: _page(runs, results), "jobs")


def _page(runs: Sequence[JobRun], results: Results) -> str:
    ways = list(dict.fromkeys(run.way for run in runs))
    rows = [
        [f"{device}, {kind}, {rate:g}/s", *(_cell(runs, results, (device, kind, rate, way)) for way in ways)]
        for (device, kind), rates in RATES.items()
        for rate in rates
        if any((run.device, run.kind, run.rate) == (device, kind, rate) for run in runs)
    ]
    return f"Commit {git_commit()}.\n\n" + markdown_table(("load", *ways), rows) + "\n"


def _cell(runs: Sequence[JobRun], results: Results, wanted: tuple[str, JobKind, float, str]) -> str:
    """Return the medians over seeds: jobs kept, and answers of chats kept."""
    own = [each for each in runs if (each.device, each.kind, each.rate, each.way) == wanted]
    found = [one for each in own if (one := results.get(each)) is not None]
    if not found:
        return "-"
    return ", ".join(f"{median(one[name] for one in found):.2f}" for name in ("kept", "chat"))


if __name__ == "__main__":
    main()
