"""(iii) Two classes on one server: a tight and a loose one, at a load that no single token budget serves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from harness import plots
from harness.pages import markdown_table, percent

from onbeat.bench.saved import result_keys
from onbeat.core.slo import SLO
from onbeat.workload.slo_classes import SLOClass
from slo_live.context import Context
from slo_live.load import Load, Result, Scores
from slo_live.servers import Fleet

HEADING = "(iii) Two classes on one server"
TIGHT, LOOSE = (20, 3), (400, 30)
"""TTFT and TBT in decode steps."""
LOAD = 1.25
"""Of sarathi's capacity at the objectives of `measure`: more than it can keep up with, while the loose half
can be put off for as long as such a run lasts."""
BUDGETS = (64, 128, 256, 512, 1024)
NUM_KEPT = 2
"""Budgets that go on after the first round: the best ones."""
RUN_SECONDS = 13.0


def run(context: Context) -> None:
    seconds = context.seconds(RUN_SECONDS)
    budgets = [context.args.budget] if context.args.budget else list(BUDGETS)
    kept = min(NUM_KEPT, len(budgets))
    context.announce(
        num_starts=1 + len(budgets),
        run_seconds=[seconds] * (1 + len(budgets) + (context.rounds - 1) * (1 + kept)),
    )
    classes = two_classes(context.decode_step)
    rate = (context.args.load or LOAD) * context.capacity("sarathi")
    names = {f"sarathi {budget}": budget for budget in budgets}
    runs: list[dict[str, Any]] = []
    with Fleet() as fleet, classes_file(classes) as path:
        # A server that is not told of classes needs no file of them.
        flags = [] if context.client.send_slo == "none" else ["--slo-classes", str(path)]
        fleet.start_all([context.slo_server(*flags)])
        fleet.start_all([context.sarathi_server(budget, *flags, name=name) for name, budget in names.items()])
        for index in range(context.rounds):
            turns = list(fleet.servers)
            for name in turns if index % 2 == 0 else reversed(turns):
                load = Load(seed=context.args.seed + index, seconds=seconds, rate=rate, classes=classes)
                with fleet.servers[name].turn() as url:
                    result = context.client.run(url, load)
                runs.append(Scores(result, {"server": name, "round": index} | of_classes(result)).as_dict())
                shown = ", ".join(
                    f"{each.name} {percent(runs[-1][each.name]['attainment'])}" for each in classes
                )
                print(f"round {index} {name}: {shown}", flush=True)
            if index == 0:
                best = sorted(names, key=lambda name: worst_class(runs, name), reverse=True)[:kept]
                fleet.keep(["slo", *best])
    report(context, rate, classes, runs)


def two_classes(step: float) -> tuple[SLOClass, SLOClass]:
    return (
        SLOClass(name="tight", slo=SLO(ttft=TIGHT[0] * step, tbt=TIGHT[1] * step), share=0.5),
        SLOClass(name="loose", slo=SLO(ttft=LOOSE[0] * step, tbt=LOOSE[1] * step), share=0.5),
    )


@contextmanager
def classes_file(classes: Sequence[SLOClass]) -> Iterator[Path]:
    """Write the classes as `onbeat serve --slo-classes` reads them."""
    entries = [
        {"name": each.name}
        | {
            f"{key}_ms": limit * 1e3
            for key in ("ttft", "tbt", "e2e")
            if (limit := getattr(each.slo, key)) is not None
        }
        for each in classes
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classes.yaml"
        path.write_text(yaml.safe_dump({"classes": entries}), encoding="utf-8")
        yield path


def of_classes(result: Result) -> dict[str, Any]:
    keys = ("offered", "good", "attainment", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms")
    return {name: {key: own.get(key) for key in keys} for name, own in result_keys(result)["classes"].items()}


def attainment(runs: Sequence[dict[str, Any]], server: str, name: str) -> float:
    """Return the attainment of a class on a server, all its runs pooled."""
    own = [run[name] for run in runs if run["server"] == server]
    return float(sum(each["good"] for each in own) / sum(each["offered"] for each in own))


def worst_class(runs: Sequence[dict[str, Any]], server: str) -> float:
    return min(attainment(runs, server, name) for name in ("tight", "loose"))


def report(context: Context, rate: float, classes: Sequence[SLOClass], runs: list[dict[str, Any]]) -> None:
    servers = list(dict.fromkeys(run["server"] for run in sorted(runs, key=lambda run: run["round"])))
    servers.sort(key=lambda name: (name != "slo", int(name.split()[-1]) if name != "slo" else 0))
    level = context.args.level
    rows = []
    for server in servers:
        own = [run for run in runs if run["server"] == server]
        cells: list[Any] = [server, len(own)]
        for each in classes:
            cells.append(percent(attainment(runs, server, each.name)))
            for key in ("p50_ttft_ms", "p99_itl_ms"):
                cells.append(sum(run[each.name][key] or 0.0 for run in own) / len(own))
        rows.append([*cells, "both" if worst_class(runs, server) >= level else "not both"])
    columns = ["server", "runs"]
    for each in classes:
        columns += [f"{each.name}: good", "TTFT P50, ms", "TBT P99, ms"]
    columns.append(f"keeps {level:.0%} of")
    image = plots.save(draw(runs, servers, classes, level), context.page.images / "slo-live-classes.png")
    asked = "; ".join(
        f"`{each.name}` TTFT {(each.slo.ttft or 0) * 1e3:.0f} ms, TBT {(each.slo.tbt or 0) * 1e3:.0f} ms"
        for each in classes
    )
    text = f"""{asked} (half of the requests each); {rate:.2f} requests/s in all, the lengths of (i).
All budgets of sarathi in the first round, the {NUM_KEPT} best in the others; latencies are means over runs.

{markdown_table(columns, rows)}

{image}
"""
    attained = {
        server: {each.name: attainment(runs, server, each.name) for each in classes} for server in servers
    }
    context.page.write("classes", HEADING, text, {"rate": rate, "attainment": attained, "runs": runs})


def draw(
    runs: list[dict[str, Any]], servers: Sequence[str], classes: Sequence[SLOClass], level: float
) -> Any:
    made = plots.figure(
        "Attainment of two classes on one server", "", "requests that kept their objectives (%)"
    )
    for each, colour in zip(classes, plots.COLOURS, strict=False):
        made.add_bar(
            x=list(servers),
            y=[attainment(runs, server, each.name) * 100 for server in servers],
            marker={"color": colour},
            name=each.name,
        )
    made.add_hline(y=level * 100, line_dash="dot", line_color="#777")
    made.update_layout(barmode="group", yaxis={"range": [0, 101]})
    return made
