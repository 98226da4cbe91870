"""The last sentences of `onbeat simulate`: how many requests were in time, and what the others missed."""

from __future__ import annotations

from onbeat.cli.simulate_output import SimulatedRun
from onbeat.metrics.attainment import count_missed
from onbeat.report.result import Level
from onbeat.report.units import significant

_MISSED = {
    "refused": "were refused or ended in the queue",
    "TTFT": "had a late first token (TTFT)",
    "TBT": "had late tokens after the first (TBT)",
    "E2E": "ended late (E2E)",
}
"""By what `count_missed` says."""
_NO_OBJECTIVE = "No objective was given: --slo-ttft-ms and --slo-tbt-ms set one."


def answer_of(run: SimulatedRun) -> list[str]:
    """Return in a sentence or two how many requests were in time at which load, and what others missed."""
    score, load = run.summary.score.own, _load(run.header.level)
    counts = run.summary.counts
    if not score.num_offered:
        done = [f"{counts.num_completed:,} of {counts.num_offered:,} requests were completed, {load}."]
        # The deadline of a job is its objective.
        return done if run.jobs else [*done, _NO_OBJECTIVE]
    if num_free := counts.num_offered - score.num_offered:
        load = f"beside {num_free:,} without any, {load} in all"
    if score.num_good == score.num_offered:
        return [f"All {score.num_offered:,} requests kept their objectives, {load}."]
    missed = count_missed(run.records, mode=run.summary.score.slo_mode)
    *most, last = (f"{num:,} {_MISSED[what]}" for what, num in missed.most_common())
    share = score.num_good / score.num_offered * 100
    kept = f"{score.num_good:,} of {score.num_offered:,} requests ({share:.1f} %) kept their objectives"
    return [
        f"{kept}, {load}.",
        f"Of the others, {' and '.join(filter(None, (', '.join(most), last)))}.",
    ]


def _load(level: Level) -> str:
    most = "" if level.max_concurrency is None else f"at most {level.max_concurrency:,} open at a time"
    if level.is_closed:
        return most or "all sent at once"
    return f"at {significant(level.request_rate)} requests/s" + (f" and {most}" if most else "")
