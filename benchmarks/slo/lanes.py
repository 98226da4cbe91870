"""Lanes: what a corpus at full speed does to chats and queries, and what it gets itself, simulated.

    python -m benchmarks.slo.lanes run [--jobs 2] [--seeds 5] [--seconds 60]
    python -m benchmarks.slo.lanes report [--write]

Chats (500 ms, 50 ms) and queries to embed (100 ms) arrive at a rate that the device carries; 64 clients send
documents, each the next one when the one before it is embedded. Each load is run without the corpus, with it,
and the corpus is run alone. Steps take their predicted time times noise of 5 %. `run` skips what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks.harness.pages import RESULTS, git_commit, markdown_table
from benchmarks.harness.store import Results, run_or_report, study_parser
from onbeat.core.options import make
from onbeat.metrics.attainment import good_requests
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.lanes import CHAT, LANE_CLASSES, OFFLINE, QUERY, lane_load

LINES = RESULTS / "lanes.jsonl"
MODEL = "meta-llama/Llama-3.1-8B"
Which = Literal["online", "both", "corpus"]
RATES = {"a100-80-sxm": (7.0, 14.0, 21.0), "h100-sxm": (16.0, 32.0, 48.0)}
"""Chats and queries a second; two of seven are chats."""
DOCUMENTS = {"a100-80-sxm": 40.0, "h100-sxm": 110.0}
"""Documents of the corpus for each second: more than the device embeds."""
POLICIES: dict[str, dict[str, Any]] = {
    "slo": {"policy": "slo"},
    "EDF with triage, 512": {"policy": "edf-triage", "max_num_batched_tokens": 512},
    "sarathi, 512": {"policy": "sarathi", "max_num_batched_tokens": 512},
    "sarathi, 2048": {"policy": "sarathi", "max_num_batched_tokens": 2048},
}
WARM_UP = 5.0
"""Seconds at the start that do not count."""


@dataclass(frozen=True, slots=True)
class LaneRun:
    """One policy with one load."""

    device: str
    rate: float
    policy: str
    which: Which
    seed: int
    seconds: float

    def run(self) -> dict[str, Any]:
        """Return what chats and queries kept, and documents got, while arrivals went on."""
        settings = make(
            ReplicaSettings, model=MODEL, device=self.device, step_noise=0.05, **POLICIES[self.policy]
        )
        simulation = build_simulation(replace(settings, seed=self.seed))
        rng = np.random.default_rng([self.seed, 11])
        num_online = 0 if self.which == "corpus" else round(self.rate * self.seconds)
        load = lane_load(
            np.sort(rng.uniform(0, self.seconds, num_online)),
            rng,
            num_documents=0 if self.which == "online" else round(DOCUMENTS[self.device] * self.seconds),
        ).with_classes(LANE_CLASSES, seed=self.seed)
        records = simulate(load, simulation.config, simulation.step_time).records
        documents = [
            each for each in records if each.request_class == OFFLINE and WARM_UP < each.end <= self.seconds
        ]
        tokens = sum(each.num_prompt_tokens for each in documents)
        found: dict[str, Any] = {"document_tokens_s": tokens / (self.seconds - WARM_UP)}
        for name in (CHAT, QUERY):
            own = [each for each in records if each.request_class == name and each.arrival > WARM_UP]
            found[name] = float(np.mean(good_requests(own, mode="stream"))) if own else None
        found["query_p99_ms"] = _p99(each for each in records if each.request_class == QUERY)
        return found


def _p99(records: Any) -> float | None:
    waits = [each.delivery_times[0] - each.arrival for each in records if each.delivery_times]
    return float(np.percentile(waits, 99)) * 1e3 if waits else None


def main(argv: Sequence[str] | None = None) -> None:
    args = study_parser(__doc__, seeds=5, seconds=60.0).parse_args(argv)
    runs = [
        LaneRun(device, rate if which != "corpus" else 0.0, policy, which, seed, args.seconds)
        for seed, (device, rates), policy in product(range(args.seeds), RATES.items(), POLICIES)
        for which in ("online", "both", "corpus")
        for rate in (rates if which != "corpus" else rates[:1])
    ]
    results = Results(LINES, "lanes-1")
    run_or_report(args, runs, results, lambda: _page(results, args.seeds, args.seconds), "lanes")


def _page(results: Results, num_seeds: int, seconds: float) -> str:
    header = ("load", "policy", "chats kept", "queries kept", "query P99, ms", "documents, tokens/s")
    rows = [
        [f"{device}, {rate:g}/s", policy, *_cells(results, (device, rate, policy), num_seeds, seconds)]
        for device, rates in RATES.items()
        for rate in rates
        for policy in POLICIES
    ]
    return f"Commit {git_commit()}.\n\n" + markdown_table(header, rows) + "\n"


def _cells(results: Results, what: tuple[str, float, str], num_seeds: int, seconds: float) -> list[str]:
    """Return the medians over seeds, without the corpus and with it."""

    def found(which: Which, name: str) -> list[float]:
        device, rate, policy = what
        own = [
            LaneRun(device, rate if which != "corpus" else 0.0, policy, which, seed, seconds)
            for seed in range(num_seeds)
        ]
        return [one[name] for each in own if (one := results.get(each)) is not None]

    if not (found("online", CHAT) and found("both", CHAT) and found("corpus", "document_tokens_s")):
        return ["-"] * 4
    kept = [
        f"{median(found('online', name)):.3f}, {median(found('both', name)):.3f}" for name in (CHAT, QUERY)
    ]
    p99 = f"{median(found('online', 'query_p99_ms')):.0f}, {median(found('both', 'query_p99_ms')):.0f}"
    both, alone = (median(found(which, "document_tokens_s")) for which in ("both", "corpus"))
    return [*kept, p99, f"{both:,.0f} of {alone:,.0f} ({both / alone:.0%})"]


if __name__ == "__main__":
    main()
