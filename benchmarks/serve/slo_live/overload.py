"""(iv) Twice the load that can be served: who is admitted is served in time, others are refused at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import plots
from benchmarks.harness.pages import markdown_table, percent
from benchmarks.serve.slo_live.context import Context
from benchmarks.serve.slo_live.load import Load, Result, Scores, one_class
from benchmarks.serve.slo_live.servers import Fleet
from onbeat.bench.record import Status
from onbeat.metrics.summary import ttft

HEADING = "(iv) Twice the capacity, with shedding"
LOAD = 2.0
RUN_SECONDS = 24.0
ANSWER_MS = 100.0


def run(context: Context) -> None:
    seconds = context.seconds(RUN_SECONDS)
    # What sarathi leaves undone at the end of the arrivals takes it about as long again.
    context.announce(num_starts=2, run_seconds=[seconds] * context.rounds + [2 * seconds])
    rate = (context.args.load or LOAD) * context.capacity("slo")
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    asks = context.client.send_slo in {"auto", "body"}
    results: list[tuple[str, int, Result]] = []
    with Fleet() as fleet:
        fleet.start_all([context.slo_server(), context.sarathi_server(context.budget)])
        for index in range(context.rounds):
            # One round shows what becomes of a server that refuses nobody.
            for name in ("slo", "sarathi") if index == 0 else ("slo",):
                load = Load(
                    seed=context.args.seed + index,
                    seconds=seconds,
                    rate=rate,
                    classes=classes,
                    asks_to_shed=asks and name == "slo",
                )
                with fleet.servers[name].turn() as url:
                    result = context.client.run(url, load)
                results.append((name, index, result))
                summary = result.summary
                print(
                    f"round {index} {name}: {percent(summary.attainment_admitted)} of "
                    f"{summary.counts.num_admitted} admitted good, {summary.counts.num_rejected} refused",
                    flush=True,
                )
    report(context, rate, results)


def report(context: Context, rate: float, results: list[tuple[str, int, Result]]) -> None:
    runs = [Scores(result, {"server": name, "round": index}).as_dict() for name, index, result in results]
    rows = []
    for entry in runs:
        rows.append(
            [
                entry["server"] if entry["server"] == "slo" else f"sarathi {context.budget}",
                entry["round"] + 1,
                entry["offered"],
                entry["rejected"],
                entry["expired"],
                percent(entry["attainment_admitted"]),
                percent(entry["attainment"]),
                entry["goodput"],
                entry["p99_rejection_ms"],
                entry["max_rejection_ms"],
            ]
        )
    columns = ["server", "round", "offered", "refused", "expired", "good of admitted", "good of all"]
    columns += ["goodput, 1/s", "refused within P99, ms", "max, ms"]
    own = [result for name, _, result in results if name == "slo"]
    totals = pooled(own)
    image = plots.save(draw(results, context.objectives.ttft), context.page.images / "slo-live-overload.png")
    text = f"""{context.objectives}; {rate:.2f} requests/s, the lengths of (i); `slo` is asked to shed
(`slo.shed`), sarathi refuses nobody. A refusal's time is from the send to the end of the answer.

{markdown_table(columns, rows)}

All rounds of `slo`: {percent(totals["attainment_admitted"])} of {totals["admitted"]} admitted requests good;
{of_refusals(totals)}.

{image}
"""
    context.page.write("overload", HEADING, text, {"rate": rate, "slo": totals, "runs": runs})


def pooled(results: list[Result]) -> dict[str, Any]:
    records = [record for result in results for record in result.records]
    admitted = [record for record in records if record.status is not Status.REJECTED]
    times = np.array([r.response_time for r in records if r.status is Status.REJECTED]) * 1e3
    good = sum(result.summary.score.own.num_good for result in results)
    return {
        "admitted": len(admitted),
        "attainment_admitted": good / len(admitted) if admitted else None,
        "refused": len(times),
        "p99_refusal_ms": float(np.percentile(times, 99)) if len(times) else None,
        "max_refusal_ms": float(times.max()) if len(times) else None,
        "within": float((times <= ANSWER_MS).mean()) if len(times) else None,
    }


def of_refusals(totals: dict[str, Any]) -> str:
    if not totals["refused"]:
        return "none refused"
    return (
        f"{totals['refused']} refused, {percent(totals['within'])} within {ANSWER_MS:.0f} ms (P99 "
        f"{totals['p99_refusal_ms']:.0f} ms, longest {totals['max_refusal_ms']:.0f} ms)"
    )


def draw(results: list[tuple[str, int, Result]], objective: float) -> Any:
    made = plots.figure(
        "Waiting for the first token, or for a refusal, at twice the capacity",
        "arrival (s)",
        "time from arrival (ms, log; dotted: the objective)",
    )
    for (name, index, result), colour in zip(results[:2], plots.COLOURS, strict=False):
        if index:
            continue
        add_points(made, f"{name}: first token", colour, "circle", answers(result))
        add_points(made, f"{name}: refused", plots.COLOURS[2], "x", refusals(result))
    made.add_hline(y=objective * 1e3, **plots.OBJECTIVE)
    made.update_layout(yaxis=plots.LOG_AXIS)
    return made


def answers(result: Result) -> list[tuple[float, float]]:
    return [(r.arrival - result.start, ttft(r) * 1e3) for r in result.records if r.is_completed]


def refusals(result: Result) -> list[tuple[float, float]]:
    return [
        (r.arrival - result.start, r.response_time * 1e3)
        for r in result.records
        if r.status in {Status.REJECTED, Status.EXPIRED}
    ]


def add_points(made: Any, name: str, colour: str, symbol: str, points: list[tuple[float, float]]) -> None:
    if points:
        made.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="markers",
            marker={"color": colour, "size": 7, "symbol": symbol},
            name=name,
        )
