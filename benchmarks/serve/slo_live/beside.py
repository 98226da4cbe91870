"""(v) Another version of onbeat beside this one: four loads, equal requests in turns, what differs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.intervals import mean_interval
from benchmarks.harness.pages import markdown_table, percent
from benchmarks.serve.slo_live.classes import classes_file, of_classes, two_classes
from benchmarks.serve.slo_live.context import Context
from benchmarks.serve.slo_live.load import CHAT, Load, Scores, one_class
from benchmarks.serve.slo_live.overload import LOAD as OVERLOAD
from benchmarks.serve.slo_live.servers import Fleet, ServerSpec

HEADING = "(v) Beside another version"
RUN_SECONDS = 30.0
LONG_SHARE, LONG_TOKENS = 1 / 8, 1500
LONG_LOAD = 0.48
"""Of the rate of (i): 0.6 of what the best static budget carries of it."""
THIS, OTHER = "this", "other"
COLUMNS = ["load", "server", "runs", "good here", "good there", "points, by rounds", "TTFT P50, P99 here, ms"]
COLUMNS += ["there", "TBT P99 here, there, ms"]


@dataclass(frozen=True)
class Trial:
    """One of the four loads."""

    name: str
    load: Load
    policies: tuple[str, ...] = ("slo",)
    key: str = "attainment"
    """What is compared: a share of requests."""
    slo_class: str | None = None
    """The class of requests that is looked at; None is all."""

    def share(self, run: dict[str, Any]) -> float:
        """Return the share of good requests of a run; NaN of none."""
        found = run[self.slo_class]["attainment"] if self.slo_class else run[self.key]
        return float("nan") if found is None else found


def run(context: Context) -> None:
    tree: Path | None = context.args.tree
    if tree is None or not (tree / "src" / "onbeat").is_dir():
        sys.exit(f"--tree {tree}: not a checkout of onbeat; it lacks src/onbeat")
    trials = list(_trials(context))
    seconds = [each.load.seconds for each in trials for _ in each.policies] * 2 * context.rounds
    runs: list[dict[str, Any]] = []
    with Fleet() as fleet, ExitStack() as stack:
        path = stack.enter_context(classes_file(two_classes(context.decode_step)))
        flags = [] if context.client.send_slo == "none" else ["--slo-classes", str(path)]
        specs = [context.slo_server(*flags), context.sarathi_server(context.budget, *flags)]
        context.announce(num_starts=2 * len(specs), run_seconds=seconds)
        fleet.start_all([replace(spec, name=f"{spec.name} {THIS}") for spec in specs])
        fleet.start_all([_of_tree(spec, tree) for spec in specs])
        pairs = [(trial, policy) for trial in trials for policy in trial.policies]
        for index in range(context.rounds):
            for trial, policy in pairs:
                # One after the other, so that a slow spell of the machine meets both.
                for version in (THIS, OTHER) if index % 2 == 0 else (OTHER, THIS):
                    with fleet.servers[f"{policy} {version}"].turn() as url:
                        result = context.client.run(url, replace(trial.load, seed=context.args.seed + index))
                    what = {"load": trial.name, "server": policy, "version": version, "round": index}
                    what |= of_classes(result) if trial.slo_class else {}
                    runs.append(Scores(result, what).as_dict())
                    shown = f"{trial.name}, {policy} {version}: {percent(trial.share(runs[-1]))}"
                    print(f"round {index} {shown}", flush=True)
    _report(context, trials, runs)


def _trials(context: Context) -> Iterator[Trial]:
    rate, seconds = context.capacity("slo"), context.seconds(RUN_SECONDS)
    classes = one_class(context.objectives.ttft, context.objectives.tbt)
    chat = Load(seed=0, seconds=seconds, rate=rate, classes=classes)
    yield Trial("(i) at the capacity", chat, policies=("slo", "sarathi"))
    long = replace(CHAT, random_long_share=LONG_SHARE, random_long_input_len=LONG_TOKENS)
    yield Trial("(ii) long prompts", replace(chat, rate=LONG_LOAD * rate, dataset=long))
    two = replace(chat, classes=two_classes(context.decode_step))
    yield Trial("(iii) two classes: tight", two, slo_class="tight")
    shed = replace(chat, rate=OVERLOAD * rate, asks_to_shed=context.client.send_slo in {"auto", "body"})
    yield Trial("(iv) overload: of the admitted", shed, key="attainment_admitted")


def _of_tree(spec: ServerSpec, tree: Path) -> ServerSpec:
    """Return how the same server of another checkout is started."""
    command = ("env", f"PYTHONPATH={(tree / 'src').resolve()}", *spec.command)
    return ServerSpec(f"{spec.name} {OTHER}", command)


def _report(context: Context, trials: list[Trial], runs: list[dict[str, Any]]) -> None:
    rows = []
    for trial in trials:
        for policy in trial.policies:
            of = {
                version: [
                    run
                    for run in runs
                    if (run["load"], run["server"], run["version"]) == (trial.name, policy, version)
                ]
                for version in (THIS, OTHER)
            }
            here, there = ([trial.share(run) for run in of[version]] for version in (THIS, OTHER))
            points = mean_interval([(a - b) * 100 for a, b in zip(here, there, strict=True)])
            rows.append(
                [
                    trial.name,
                    policy if policy == "slo" else f"sarathi {context.budget}",
                    len(here),
                    percent(float(np.mean(here))),
                    percent(float(np.mean(there))),
                    f"{points.mean:+.1f} [{points.low:+.1f}, {points.high:+.1f}]",
                    *(_latencies(of[version]) for version in (THIS, OTHER)),
                    f"{_mean(of[THIS], 'p99_itl_ms'):.0f}, {_mean(of[OTHER], 'p99_itl_ms'):.0f}",
                ]
            )
    args = context.args
    rate = context.capacity("slo")
    text = f"""{context.objectives}; (i) has {rate:.2f} requests/s, (ii) to (iv) the lengths, classes and
multiples of the studies above. "here" is this version, "there" {args.tree_commit or "another checkout"};
equal requests at equal times in turns (A B, B A, ...), each version with its own engine. What `sarathi`,
whose rule is the same in both, makes of (i) is due to the engine or to the machine. Means over rounds;
points with Student's t interval of the differences of rounds.

{markdown_table(COLUMNS, rows)}
"""
    context.page.write("beside", HEADING, text, {"rate": rate, "runs": runs})


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


def _latencies(runs: list[dict[str, Any]]) -> str:
    return f"{_mean(runs, 'p50_ttft_ms'):.0f}, {_mean(runs, 'p99_ttft_ms'):.0f}"
