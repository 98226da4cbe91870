"""(ii) Long prompts among short ones: do they stretch the others' tokens, and at what price?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from harness import plots
from harness.pages import markdown_table, middle, percent

from onbeat.bench.saved import result_keys
from slo_live.context import Context
from slo_live.load import CHAT, Load, Result, Scores, one_class, pooled_gaps_ms
from slo_live.servers import Fleet

HEADING = "(ii) One prompt in eight has 1,500 tokens"
LONG_SHARE, LONG_TOKENS = 1 / 8, 1500
LOAD = 0.6
"""Of sarathi's capacity without long prompts: they are a third more work a request."""
RUN_SECONDS = 26.0


def run(context: Context) -> None:
    seconds = context.seconds(RUN_SECONDS)
    names = ["slo", "sarathi"]
    context.announce(num_starts=2, run_seconds=[seconds] * (2 * context.rounds))
    dataset = replace(CHAT, long_share=LONG_SHARE, long_input_len=LONG_TOKENS)
    rate = (context.args.load or LOAD) * context.capacity("sarathi")
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    runs: list[dict[str, Any]] = []
    gaps: dict[str, list[np.ndarray]] = defaultdict(list)
    with Fleet() as fleet:
        fleet.start_all([context.slo_server(), context.sarathi_server(context.budget)])
        for index, name in context.turns(names):
            seed = context.args.seed + index
            load = Load(seed=seed, seconds=seconds, rate=rate, classes=classes, dataset=dataset)
            with fleet.servers[name].turn() as url:
                result = context.client.run(url, load)
            runs.append(Scores(result, {"server": name, "round": index} | of_groups(result)).as_dict())
            gaps[name].append(pooled_gaps_ms(result))
            print(
                f"round {index} {name}: P99 gap {runs[-1]['p99_itl_ms']:.0f} ms, TTFT of short prompts "
                f"{runs[-1]['short_p50_ttft_ms']:.0f} ms",
                flush=True,
            )
    report(context, rate, runs, {name: np.concatenate(own) for name, own in gaps.items()})


def of_groups(result: Result) -> dict[str, Any]:
    keys = ("mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "attainment")
    return {
        f"{name}_{key}": own.get(key) for name, own in result_keys(result)["groups"].items() for key in keys
    }


def report(context: Context, rate: float, runs: list[dict[str, Any]], gaps: dict[str, np.ndarray]) -> None:
    objectives = context.objectives
    rows = []
    for name, own in gaps.items():
        of_server = [run for run in runs if run["server"] == name]
        rows.append(
            [
                name if name == "slo" else f"sarathi {context.budget}",
                f"{np.percentile(own, 99):.0f}",
                f"{own.max():.0f}",
                f"{(own <= objectives.tbt * 1e3).mean():.2%}",
                *(
                    middle([run[f"short_{key}_ttft_ms"] for run in of_server], 0)
                    for key in ("mean", "p50", "p99")
                ),
                middle([run.get("long_p50_ttft_ms") for run in of_server], 0),
                percent(float(np.mean([run["attainment"] for run in of_server]))),
            ]
        )
    ratios = {key: paired_ratios(runs, f"short_{key}_ttft_ms") for key in ("mean", "p50", "p99")}
    columns = ["server", "P99 gap, ms", "longest", f"within {objectives.tbt * 1e3:.0f} ms"]
    columns += ["TTFT of short: mean, ms", "P50", "P99", "TTFT of long: P50", "good"]
    image = plots.save(draw(gaps, objectives.tbt), context.page.images / "slo-live-interference.png")
    shown = ", ".join(f"{key} {middle(values)}" for key, values in ratios.items())
    text = f"""{objectives}; {rate:.2f} requests/s, prompts of 100 to 600 tokens, every
eighth of {LONG_TOKENS:,}; gaps of all requests and rounds
pooled, TTFT as median over rounds (minimum to maximum).

{markdown_table(columns, rows)}

TTFT of short prompts, `slo` over sarathi, by round: {shown}.

{image}
"""
    numbers = {"rate": rate, "budget": context.budget, "short_ttft_ratios": ratios, "runs": runs}
    numbers["p99_gap_ms"] = {name: float(np.percentile(own, 99)) for name, own in gaps.items()}
    context.page.write("interference", HEADING, text, numbers)


def paired_ratios(runs: list[dict[str, Any]], key: str) -> list[float]:
    """Return slo over sarathi in each round: the two had the same requests at the same times."""
    values = {(run["server"], run["round"]): run[key] for run in runs}
    rounds = sorted({run["round"] for run in runs})
    return [values["slo", index] / values["sarathi", index] for index in rounds]


def draw(gaps: dict[str, np.ndarray], tbt: float) -> Any:
    made = plots.figure(
        "Gaps between tokens while long prompts arrive",
        "gap (ms, log; dotted: the objective)",
        "gaps longer than this (%, log)",
    )
    for (name, own), colour in zip(gaps.items(), plots.COLOURS, strict=False):
        ordered = np.sort(own)
        share = 100 * (1 - np.arange(len(ordered)) / len(ordered))
        made.add_scatter(x=ordered, y=share, mode="lines", line={"color": colour, "width": 2}, name=name)
    made.add_vline(x=tbt * 1e3, **plots.OBJECTIVE)
    made.add_hline(y=1, line_dash="dot", line_color="#777")
    made.update_layout(xaxis=plots.LOG_AXIS, yaxis=plots.LOG_AXIS)
    return made
