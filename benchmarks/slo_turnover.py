"""How right the TTFT is that is predicted on a full machine, by how many ends are waited for one by one.

    python benchmarks/slo_turnover.py [--seeds 3] [--write]

Mistral-7B on a simulated A100 with few slots or little memory, offered more than it can serve: prompts may
wait as long as an objective of 20 or 40 seconds lasts, and ask to be rejected where that is not enough. Of
many that wait, `turnover.py` lets one stand for several. The folder of the traces is named by ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from harness.pages import markdown_table, publish
from slo_study.replica import Stage
from slo_study.scenarios import SUBJECT

from onbeat.core.slo import SLO, ShedMode
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.replica.slo import turnover
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass

NUM_REQUESTS = 2500
ALL = 1 << 30
SHORTEST_WAIT = 1.0
"""Seconds; TTFTs below are not of those that wait for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A full machine."""

    ttft: float
    """The objective, seconds."""
    rate: float
    """Requests per second."""
    num_slots: int
    num_blocks: int | None = None
    """None: what fits."""

    def __str__(self) -> str:
        blocks = "" if self.num_blocks is None else f", {self.num_blocks:,} blocks"
        return f"{self.num_slots} slots{blocks}, {self.ttft:g} s, {self.rate:g} requests/s"


CASES = (
    Case(ttft=20.0, rate=9.0, num_slots=96),
    Case(ttft=40.0, rate=9.0, num_slots=96),
    Case(ttft=20.0, rate=9.0, num_slots=256, num_blocks=4000),
    Case(ttft=20.0, rate=14.0, num_slots=512, num_blocks=9000),
    Case(ttft=20.0, rate=16.0, num_slots=512, num_blocks=9000),
)


def run(case: Case, stage: Stage, seed: int) -> list[RequestRecord]:
    """Run a case."""
    config, step_time = stage.configure(SUBJECT, ShedMode.REJECT)
    num_blocks = case.num_blocks or config.scheduler.num_blocks
    scheduler = replace(config.scheduler, max_num_seqs=case.num_slots, num_blocks=num_blocks)
    own = SLOClass(name="patient", slo=SLO(ttft=case.ttft, tbt=0.1))
    load = stage.load(seed, NUM_REQUESTS).with_classes((own,), seed=seed).at_rate(case.rate)
    return simulate(load, replace(config, scheduler=scheduler), step_time).records


def row(num_ends: int, records: list[list[RequestRecord]], stage: Stage) -> list[str]:
    """Return what a table says of some runs."""
    waited = [
        record.predicted_ttft / record.ttft
        for each in records
        for record in each
        if record.predicted_ttft is not None and record.ttft is not None and record.ttft > SHORTEST_WAIT
    ]
    errors = np.abs(np.array(waited) - 1.0)
    return [
        "all" if num_ends == ALL else str(num_ends),
        str(len(waited)),
        *(f"{value:.1%}" for value in np.percentile(errors, [25, 50, 75])),
        f"{np.median(waited):.3f}",
        str(sum(record.is_rejected for each in records for record in each)),
        f"{np.mean([stage.good(each) for each in records]):.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-ends", type=int, nargs="+", default=(ALL, 64, 32, 16))
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    stage = Stage(seeds=args.seeds)
    parts = [
        f"# Predicted TTFT on a full machine\n\n`python benchmarks/slo_turnover.py --seeds {args.seeds}`."
    ]
    header = ["ends", "requests", "error P25", "P50", "P75", "predicted / actual", "rejected", "good"]
    for index, case in enumerate(CASES):
        print(f"case {index + 1} of {len(CASES)}: {case}", flush=True)
        rows = []
        for num_ends in args.num_ends:
            turnover.NUM_ENDS = num_ends
            records = [run(case, stage, seed) for seed in range(args.seeds)]
            rows.append(row(num_ends, records, stage))
        parts.append(f"## {case}\n\n{markdown_table(header, rows)}")
    publish("\n\n".join(parts), "slo-turnover", write=args.write)


if __name__ == "__main__":
    main()
