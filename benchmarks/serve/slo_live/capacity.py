"""(i) How many requests per second keep their objectives: `slo` against sarathi at its best budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.harness import plots
from benchmarks.harness.pages import markdown_table, percent
from benchmarks.serve.slo_live.context import Context
from benchmarks.serve.slo_live.load import Load, Scores, good_flags, one_class
from benchmarks.serve.slo_live.search import (
    Capacity,
    Ladder,
    Point,
    crossing,
    ramp_crossing,
    without_each_round,
)
from benchmarks.serve.slo_live.servers import Fleet
from onbeat.workload.slo_classes import SLOClass

HEADING = "(i) Capacity at 90 % attainment"
BUDGETS = (64, 128, 256, 512, 1024)
RAMP = (0.35, 1.15)
"""First and last rate of a probe, as shares of the throughput of a full batch."""
FULL_BATCH = 16
RUN_COLUMNS = ["server", "round", "req/s", "offered", "good", "good in gap mode"]
RUN_COLUMNS += ["TTFT P50/P99, ms", "TBT P99, ms"]
PROBE_SECONDS, RUN_SECONDS, RUNS_PER_ROUND = 20.0, 42.0, 2


def run(context: Context) -> None:
    args = context.args
    budgets = [args.budget] if args.budget else list(BUDGETS[1:3] if args.quick else BUDGETS)
    probe_seconds = min(context.seconds(PROBE_SECONDS), PROBE_SECONDS)
    run_seconds = context.seconds(RUN_SECONDS)
    context.announce(
        num_starts=1 + len(budgets),
        run_seconds=[probe_seconds] * (len(budgets) + 2)
        + [run_seconds] * (2 * context.rounds * RUNS_PER_ROUND),
    )
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    names = {f"sarathi {budget}": budget for budget in budgets}
    with Fleet() as fleet:
        fleet.start_all([context.slo_server()])
        fleet.start_all([context.sarathi_server(budget, name=name) for name, budget in names.items()])
        probes = probe(context, fleet, classes, probe_seconds)
        best = max(names, key=lambda name: probes[name]["good"])
        fleet.keep(["slo", best])
        points, runs = climb(context, fleet, {"slo": probes["slo"], best: probes[best]}, classes, run_seconds)
    report(context, probes, points, runs, names[best])


def probe(
    context: Context, fleet: Fleet, classes: tuple[SLOClass, ...], seconds: float
) -> dict[str, dict[str, float]]:
    """Meet every server with the same growing load: the more of it is good, the better."""
    client, seed = context.client, context.args.seed + 1000
    first = next(name for name in fleet.servers if name != "slo")
    with fleet.servers[first].turn() as url:
        full = Load(seed=seed, seconds=0, concurrency=FULL_BATCH, num_prompts=3 * FULL_BATCH)
        throughput = client.run(url, full).summary.counts.request_throughput
    print(f"a full batch of {FULL_BATCH} on {first}: {throughput:.2f} req/s", flush=True)
    ramp = (RAMP[0] * throughput, RAMP[1] * throughput)
    probes = {}
    for name, server in fleet.servers.items():
        with server.turn() as url:
            result = client.run(url, Load(seed=seed, seconds=seconds, ramp=ramp, classes=classes))
        good = good_flags(result, client.slo_mode)
        rate = ramp_crossing(good, start_rate=ramp[0], end_rate=ramp[1], level=context.args.level)
        probes[name] = {"good": float(good.sum()), "offered": float(len(good)), "rate": rate}
        print(f"probe {name}: {good.sum()} of {len(good)} good, about {rate:.2f} req/s", flush=True)
    return probes


def climb(
    context: Context,
    fleet: Fleet,
    probes: Mapping[str, Mapping[str, float]],
    classes: tuple[SLOClass, ...],
    seconds: float,
) -> tuple[dict[str, list[Point]], list[dict[str, Any]]]:
    """Alternate between the servers, each on its own ladder of rates around where its attainment crosses."""
    level = context.args.level
    ladders = {name: Ladder(own["rate"], level=level) for name, own in probes.items()}
    points: dict[str, list[Point]] = {name: [] for name in probes}
    runs: list[dict[str, Any]] = []
    for index, name in context.turns(list(probes)):
        for part in range(RUNS_PER_ROUND):
            rate = ladders[name].rate
            seed = context.args.seed + index * RUNS_PER_ROUND + part
            load = Load(seed=seed, seconds=seconds, rate=rate, classes=classes)
            with fleet.servers[name].turn() as url:
                result = context.client.run(url, load)
            summary = result.summary
            point = Point(index, rate, summary.counts.num_offered, summary.score.own.num_good)
            points[name].append(point)
            ladders[name].note(point.attainment)
            runs.append(Scores(result, {"server": name, "round": index, "rate": rate}).as_dict())
            print(f"round {index} {name} at {rate:.2f} req/s: {percent(point.attainment)}", flush=True)
    return points, runs


def report(
    context: Context,
    probes: Mapping[str, Mapping[str, float]],
    points: Mapping[str, list[Point]],
    runs: list[dict[str, Any]],
    best_budget: int,
) -> None:
    level = context.args.level
    found = {name: crossing(own, level=level) for name, own in points.items()}
    spread = {name: without_each_round(own, level=level) for name, own in points.items()}
    slo, sarathi = found["slo"], found[f"sarathi {best_budget}"]
    ratio = slo.rate / sarathi.rate
    ratios = [
        a.rate / b.rate for a, b in zip(spread["slo"], spread[f"sarathi {best_budget}"], strict=True)
    ] or [ratio]
    rows = [[name, str(found[name]), spread_text(spread[name])] for name in found]
    rows.append(["ratio", f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    probe_rows = [
        [name, f"{own['good']:.0f} of {own['offered']:.0f}", own["rate"]] for name, own in probes.items()
    ]
    run_rows = [
        [r["server"], r["round"] + 1, r["rate"], r["offered"], *shares(r), *latencies(r)] for r in runs
    ]
    image = plots.save(draw(points, found, level), context.page.images / "slo-live-capacity.png")
    text = f"""{context.objectives}; prompts of 100 to 600 tokens, outputs of 20 to 100; Poisson arrivals;
attainment in `{context.client.slo_mode}` mode. Each server climbs its own ladder of rates (6 % a rung), up
after a run of at least {level:.0%}, else down, twice as far each time until runs lie on both sides; capacity
is where the pooled attainment crosses {level:.0%}.

{markdown_table(["server", "capacity, req/s", "with one round left out"], rows)}

{image}

Budgets were chosen by one growing load each, the same for all:

{markdown_table(["server", "good", "crosses at about, req/s"], probe_rows)}

Every run:

{markdown_table(RUN_COLUMNS, run_rows)}
"""
    context.page.write(
        "capacity",
        HEADING,
        text,
        {
            "best_budget": best_budget,
            "slo_capacity": slo.rate,
            "sarathi_capacity": sarathi.rate,
            "bounds": {name: each.bound for name, each in found.items()},
            "ratio": ratio,
            "ratios_with_one_round_left_out": ratios,
            "objectives": asdict(context.objectives),
            "probes": probes,
            "runs": runs,
        },
    )


def spread_text(spread: list[Capacity]) -> str:
    rates = [each.rate for each in spread]
    return f"{min(rates):.2f} to {max(rates):.2f}" if rates else "-"


def shares(run: Mapping[str, Any]) -> list[str]:
    return [percent(run["attainment"]), percent(run["attainment_gap"])]


def latencies(run: Mapping[str, Any]) -> list[str]:
    return [f"{run['p50_ttft_ms']:.0f} / {run['p99_ttft_ms']:.0f}", f"{run['p99_itl_ms']:.0f}"]


def draw(points: Mapping[str, list[Point]], found: Mapping[str, Capacity], level: float) -> Any:
    made = plots.figure(
        "Attainment by request rate", "request rate (1/s)", "requests that kept their objectives (%)"
    )
    for (name, own), colour in zip(points.items(), plots.COLOURS, strict=False):
        made.add_scatter(
            x=[point.rate for point in own],
            y=[point.attainment * 100 for point in own],
            mode="markers",
            marker={"color": colour, "size": 10},
            name=f"{name}: capacity {found[name]}/s",
        )
        made.add_vline(x=found[name].rate, line_color=colour, line_dash="dash")
    made.add_hline(y=level * 100, line_dash="dot", line_color="#777")
    return made
