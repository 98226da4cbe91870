"""(i) How many requests per second keep their objectives: `slo` against sarathi at its best budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.harness import plots
from benchmarks.harness.intervals import mean_interval
from benchmarks.harness.pages import markdown_table, percent
from benchmarks.serve.slo_live.context import Context
from benchmarks.serve.slo_live.load import Load, Scores, good_flags, one_class
from benchmarks.serve.slo_live.search import (
    Capacity,
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
GRID = (0.9, 1.0, 1.1, 1.2)
"""Rates of the runs, where `--rates` names none: multiples of where the lower probe crosses the level."""
RATE_COLUMNS = ["req/s", "offered", "slo"]
RUN_COLUMNS = ["server", "round", "req/s", "offered", "good", "good in gap mode"]
RUN_COLUMNS += ["TTFT P50/P99, ms", "TBT P99, ms"]
PROBE_SECONDS, NUM_PROBES, RUN_SECONDS = 20.0, 3, 42.0


def run(context: Context) -> None:
    args = context.args
    budgets = [args.budget] if args.budget else list(BUDGETS[1:3] if args.quick else BUDGETS)
    probe_seconds = min(context.seconds(PROBE_SECONDS), PROBE_SECONDS)
    run_seconds = context.seconds(RUN_SECONDS)
    needs_probes = len(budgets) > 1 or not args.rates
    num_probes = (len(budgets) + 1) * NUM_PROBES + 1 if needs_probes else 0
    num_runs = 2 * context.rounds * len(args.rates or GRID)
    context.announce(
        num_starts=1 + len(budgets),
        run_seconds=[probe_seconds] * num_probes + [run_seconds] * num_runs,
    )
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    names = {f"sarathi {budget}": budget for budget in budgets}
    with Fleet() as fleet:
        fleet.start_all([context.slo_server()])
        fleet.start_all([context.sarathi_server(budget, name=name) for name, budget in names.items()])
        probes = probe(context, fleet, classes, probe_seconds) if needs_probes else {}
        best = max(names, key=lambda name: probes[name]["good"]) if probes else next(iter(names))
        rates = args.rates or [share * min(probes[name]["rate"] for name in ("slo", best)) for share in GRID]
        fleet.keep(["slo", best])
        points, runs = meet_all(context, fleet, ["slo", best], rates, classes, run_seconds)
    report(context, probes, points, runs, names[best])


def probe(
    context: Context, fleet: Fleet, classes: tuple[SLOClass, ...], seconds: float
) -> dict[str, dict[str, float]]:
    """Meet every server with the same growing loads: the more of them is good, the better."""
    client, seed = context.client, context.args.seed + 1000
    first = next(name for name in fleet.servers if name != "slo")
    with fleet.servers[first].turn() as url:
        full = Load(seed=seed, seconds=0, concurrency=FULL_BATCH, num_prompts=3 * FULL_BATCH)
        throughput = client.run(url, full).summary.counts.request_throughput
    print(f"a full batch of {FULL_BATCH} on {first}: {throughput:.2f} req/s", flush=True)
    low, high = (share * throughput for share in RAMP)
    probes = {}
    for name, server in fleet.servers.items():
        num_good, num_offered, rates = 0, 0, []
        for index in range(NUM_PROBES):
            load = Load(seed=seed + index, seconds=seconds, ramp=(low, high), classes=classes)
            with server.turn() as url:
                good = good_flags(client.run(url, load), client.slo_mode)
            num_good, num_offered = num_good + int(good.sum()), num_offered + len(good)
            rates.append(ramp_crossing(good, start_rate=low, end_rate=high, level=context.args.level))
        probes[name] = {"good": num_good, "offered": num_offered, "rate": median(rates)}
        print(f"probe {name}: {num_good} of {num_offered} good, about {median(rates):.2f} req/s", flush=True)
    return probes


def meet_all(
    context: Context,
    fleet: Fleet,
    names: Sequence[str],
    rates: Sequence[float],
    classes: tuple[SLOClass, ...],
    seconds: float,
) -> tuple[dict[str, list[Point]], list[dict[str, Any]]]:
    """Meet both servers with the same requests at every rate, one after the other; new ones each round."""
    points: dict[str, list[Point]] = {name: [] for name in names}
    runs: list[dict[str, Any]] = []
    for index in range(context.rounds):
        for place, rate in enumerate(rates):
            seed = context.args.seed + index * len(rates) + place
            load = Load(seed=seed, seconds=seconds, rate=rate, classes=classes)
            # One after the other, so that a slow spell of the machine meets both.
            for name in names if (index + place) % 2 == 0 else reversed(names):
                with fleet.servers[name].turn() as url:
                    result = context.client.run(url, load)
                summary = result.summary
                point = Point(index, rate, summary.counts.num_offered, summary.score.own.num_good)
                points[name].append(point)
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
    best = f"sarathi {best_budget}"
    ratio = found["slo"].rate / found[best].rate
    ratios = [a.rate / b.rate for a, b in zip(spread["slo"], spread[best], strict=True)] or [ratio]
    rows = [[name, str(found[name]), spread_text(spread[name])] for name in found]
    rows.append(["ratio", f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    run_rows = [
        [r["server"], r["round"] + 1, r["rate"], r["offered"], *shares(r), *latencies(r)] for r in runs
    ]
    image = plots.save(draw(points, found, level), context.page.images / "slo-live-capacity.png")
    text = f"""{context.objectives}; prompts of 100 to 600 tokens, outputs of 20 to 100; Poisson arrivals;
attainment in `{context.client.slo_mode}` mode. At every rate both servers get the same requests, one server
after the other, and new ones each round. Capacity is where the pooled attainment crosses {level:.0%}.

{markdown_table(["server", "capacity, req/s", "with one round left out"], rows)}

{markdown_table([*RATE_COLUMNS, best, "points, by rounds"], rate_rows(points["slo"], points[best]))}

{image}

{chosen_text(probes)}Every run:

{markdown_table(RUN_COLUMNS, run_rows)}
"""
    context.page.write(
        "capacity",
        HEADING,
        text,
        {
            "best_budget": best_budget,
            "slo_capacity": found["slo"].rate,
            "sarathi_capacity": found[best].rate,
            "bounds": {name: each.bound for name, each in found.items()},
            "ratio": ratio,
            "ratios_with_one_round_left_out": ratios,
            "objectives": asdict(context.objectives),
            "probes": probes,
            "runs": runs,
        },
    )


def rate_rows(own: Sequence[Point], other: Sequence[Point]) -> list[list[Any]]:
    """Return for each rate what both servers kept of it, and the difference round by round."""
    rows = []
    for rate in sorted({point.rate for point in own}):
        pairs = [(a, b) for a, b in zip(own, other, strict=True) if a.rate == rate]
        offered = sum(a.num_offered for a, _ in pairs)
        kept = [sum(each.num_good for each in side) / offered for side in zip(*pairs, strict=True)]
        points = mean_interval([(a.attainment - b.attainment) * 100 for a, b in pairs])
        shown = f"{points.mean:+.1f} [{points.low:+.1f}, {points.high:+.1f}]"
        rows.append([f"{rate:.2f}", offered, *(percent(share) for share in kept), shown])
    return rows


def chosen_text(probes: Mapping[str, Mapping[str, float]]) -> str:
    """Return how the budget was chosen; nothing where it was given."""
    if not probes:
        return ""
    rows = [[name, f"{own['good']:.0f} of {own['offered']:.0f}", own["rate"]] for name, own in probes.items()]
    table = markdown_table(["server", "good", "crosses at about, req/s"], rows)
    return f"Budgets were chosen by {NUM_PROBES} growing loads, the same for all:\n\n{table}\n\n"


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
