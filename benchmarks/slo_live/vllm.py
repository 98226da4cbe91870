"""(v) Goodput beside vLLM's CPU engine: same weights, same loads, same objectives, scored by the client."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from harness import plots
from harness.pages import markdown_table, middle, percent

from slo_live.context import Context
from slo_live.load import Load, Scores, one_class
from slo_live.servers import Fleet, command_spec

HEADING = "(v) Beside vLLM's CPU engine"
LOADS = (0.6, 1.0)
"""Of the capacity of `slo`."""
RUN_SECONDS = 18.0
COMMAND_VARIABLE = "VLLM_COMMAND"
PEER = "vllm"


def run(context: Context) -> None:
    args = context.args
    command = args.vllm_command or os.environ.get(COMMAND_VARIABLE)
    if not command:
        sys.exit(f"give the command that starts vLLM with --vllm-command or ${COMMAND_VARIABLE}")
    seconds = context.seconds(RUN_SECONDS)
    loads = [args.load] if args.load else list(LOADS[:1] if args.quick else LOADS)
    rates = [share * context.capacity("slo") for share in loads]
    names = ["slo", PEER]
    # The peer takes about as long to start as five of our servers.
    context.announce(num_starts=6, run_seconds=[seconds] * (len(names) * context.rounds * len(rates)))
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    runs: list[dict[str, Any]] = []
    with Fleet() as fleet:
        fleet.start(context.slo_server())
        fleet.start(command_spec(PEER, command, args.vllm_url, {}))
        for index, name in context.turns(names):
            for position, rate in enumerate(rates):
                load = Load(
                    seed=args.seed + index * len(rates) + position,
                    seconds=seconds,
                    rate=rate,
                    classes=classes,
                    num_warmups=8 if index == 0 and position == 0 else 2,
                )
                with fleet.servers[name].turn() as url:
                    result = context.client.run(url, load)
                runs.append(Scores(result, {"server": name, "round": index, "rate": rate}).as_dict())
                print(
                    f"round {index} {name} at {rate:.2f} req/s: {percent(runs[-1]['attainment'])} good, "
                    f"goodput {runs[-1]['goodput']:.2f}/s",
                    flush=True,
                )
    report(context, rates, names, runs)


def report(context: Context, rates: list[float], names: list[str], runs: list[dict[str, Any]]) -> None:
    values = {(run["server"], run["rate"], run["round"]): run for run in runs}
    rows = []
    ratios: dict[str, list[float]] = {}
    for rate in rates:
        for name in names:
            own = [values[name, rate, index] for index in range(context.rounds)]
            keys = ("goodput", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "output_throughput")
            cells = [statistics.median(run[key] for run in own) for key in keys]
            good = percent(statistics.median(run["attainment"] for run in own))
            of_ours = ratio_to(values, name, rate, context.rounds)
            ratios[f"{name} at {rate:.2f}"] = of_ours
            rows.append([f"{rate:.2f}", name, good, *cells, "" if name == "slo" else middle(of_ours)])
    columns = ["req/s", "server", "good", "goodput, 1/s", "TTFT P50, ms", "P99", "TBT P99, ms", "out tok/s"]
    columns.append("goodput of slo over it")
    image = plots.save(draw(rates, names, runs), context.page.images / "slo-live-vllm.png")
    text = f"""{context.objectives}; the lengths of (i), the same bfloat16 weights, medians over
{context.rounds} interleaved rounds. {context.args.vllm_label}; it is not told of the objectives.

{markdown_table(columns, rows)}

{image}
"""
    context.page.write("vllm", HEADING, text, {"rates": rates, "ratios": ratios, "runs": runs})


def ratio_to(values: dict[Any, dict[str, Any]], name: str, rate: float, rounds: int) -> list[float]:
    """Return our goodput over that of a server in each round; infinity where it had none."""
    pairs = [(values["slo", rate, i]["goodput"], values[name, rate, i]["goodput"]) for i in range(rounds)]
    return [ours / theirs if theirs else float("inf") for ours, theirs in pairs]


def draw(rates: list[float], names: list[str], runs: list[dict[str, Any]]) -> Any:
    made = plots.figure("Goodput by request rate", "request rate (1/s)", "goodput (1/s)")
    for name, colour in zip(names, plots.COLOURS, strict=False):
        own = [run for run in runs if run["server"] == name]
        made.add_scatter(
            x=[run["rate"] for run in own],
            y=[run["goodput"] for run in own],
            mode="markers",
            marker={"color": colour, "size": 10},
            name=name,
        )
    made.add_scatter(x=rates, y=rates, mode="lines", line={"color": "#777", "dash": "dot"}, name="all good")
    made.update_layout(xaxis={"rangemode": "tozero"}, yaxis={"rangemode": "tozero"})
    return made
