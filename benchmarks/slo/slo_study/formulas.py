"""TTFT, TBT and E2E of each request put together again from the log of steps.

A prompt waits in the queue (t_qp) until its first step, then runs in N steps (t_inf each) between which it
waits (t_qc in the mean): TTFT = t_qp + (N - 1) t_qc + sum of t_inf. A token waits for its step and is then
in it; E2E is TTFT and the sum of these.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from benchmarks.harness.pages import markdown_table
from benchmarks.slo.slo_study.replica import Stage
from benchmarks.slo.slo_study.scenarios import SUBJECT, Finding
from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.observer import StepsWanted

MICROSECOND = 1e-6


class StepLog:
    """An observer that keeps when each step ran, and whose prompts were in it."""

    wanted_steps: StepsWanted = "all"

    def __init__(self) -> None:
        self.end_of: dict[float, float] = {}
        """start -> end of a step"""
        self.start_of: dict[float, float] = {}
        self.chunks: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """request id -> (start, end) of the steps with more than one token of its prompt"""

    def on_request(self, record: RequestRecord, /) -> None: ...

    def on_finish(self, record: RequestRecord, /) -> None: ...

    def on_step(self, replica: int, stats: StepStats, /) -> None:  # noqa: ARG002
        self.end_of[stats.start], self.start_of[stats.end] = stats.end, stats.start
        for request_id in stats.chunk_request_ids:
            self.chunks[request_id].append((stats.start, stats.end))

    def prompt_steps(self, record: RequestRecord) -> list[tuple[float, float]]:
        """Return the steps of a prompt; the log does not name it in steps with one token of it."""
        assert record.first_token is not None
        assert record.scheduled is not None
        last = self.start_of[record.first_token], record.first_token
        first = record.scheduled, self.end_of[record.scheduled]
        own = {step for step in self.chunks[record.request_id] if step[1] <= record.first_token}
        return sorted({first, *own, last})

    def ttft(self, record: RequestRecord) -> float:
        """Return TTFT as the formula has it."""
        steps = self.prompt_steps(record)
        waits = [after[0] - before[1] for before, after in pairwise(steps)]
        mean_wait = sum(waits) / len(waits) if waits else 0.0
        return (
            steps[0][0] - record.arrival + len(waits) * mean_wait + sum(end - start for start, end in steps)
        )

    def e2e(self, record: RequestRecord) -> float:
        """Return E2E: TTFT, and for each later token its wait and its step."""
        total = self.ttft(record)
        for before, now in pairwise(record.delivery_times):
            start = self.start_of[now]
            total += (start - before) + (now - start)
        return total


def formulas(stage: Stage, capacity: float, *, num_requests: int = 600) -> Finding:
    """Hold the formulas against the records of runs."""
    rows, worst = [], 0.0
    for policy in (SUBJECT, "sarathi-512", "prefill-first"):
        log = StepLog()
        load = stage.load(0, num_requests).at_rate(capacity)
        records = stage.run(load, policy, observer=log).records
        ttft = max(abs(log.ttft(record) - record.ttft) for record in records if record.ttft is not None)
        e2e = max(abs(log.e2e(record) - record.e2e) for record in records)
        steps = sum(len(log.prompt_steps(record)) for record in records) / len(records)
        rows.append([policy, str(len(records)), f"{steps:.2f}", f"{ttft * 1e6:.6f}", f"{e2e * 1e6:.6f}"])
        worst = max(worst, ttft, e2e)
    return Finding(
        title="TTFT, TBT and E2E from the log of steps",
        text=markdown_table(
            ["policy", "requests", "steps of a prompt", "largest error of TTFT, us", "of E2E, us"], rows
        ),
        claims=((f"the largest error is {worst * 1e6:.6f} us (1)", worst <= MICROSECOND),),
    )
