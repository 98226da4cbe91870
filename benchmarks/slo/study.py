"""How much load that lasts policies carry within latency objectives: capacities in simulation, cell by cell.

    python -m benchmarks.slo.study run [--minutes 60] [--jobs 2] [--seeds 5] [--policy slo,simple,static]
        [--cells 32] [--set-up mistral] [--workload azure-code] [--slo 1s-50ms] [--mode gap] [--tag NAME]
    python -m benchmarks.slo.study report [--write] [selection]
    python -m benchmarks.slo.study disturb [--minutes 20] [--jobs 2] [--seeds 5] [--capacity 8.5] [--write]
    python -m benchmarks.slo.study ablate [--minutes 10] [--jobs 2] [--seeds 2]
        [--in-all-cells slo/half-a-step-early [--study TAG]]
    python -m benchmarks.slo.study bound [--minutes 30] [--jobs 2] [--seeds 2] [--write]

A cell is a set-up (model and device), a workload, objectives and what keeping a TBT objective means. A load
lasts: at least 4,000 requests and ten minutes of arrivals are measured, after a warm-up that is thrown away.
A capacity is the rate at which a criterion is no longer kept: 90 or 99 % of the requests good, 90 % in the
worst decile of prompt length, 90 % with a P99 of TTFT below five times its objective; and in any case the
queue must not grow. Requests that an idle machine with an empty prefix cache could not serve in time count
neither way. `run` appends a line a run, skips what is there, and can be stopped at any time. Step times are
the uncalibrated roofline, as in `onbeat simulate`; every request declares exactly its output length. The
folder of the traces is named by ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.harness.pages import REPOSITORY, RESULTS, publish
from benchmarks.harness.plots import write_image
from benchmarks.harness.store import Results, deadline_in, run_missing
from benchmarks.slo.slo_study.ablation import CELLS as ABLATION_CELLS
from benchmarks.slo.slo_study.ablation import (
    VARIANTS,
    ablation_runs,
    ablation_table,
    compared_runs,
    compared_table,
    lasting,
)
from benchmarks.slo.slo_study.cells import (
    CELLS,
    OBJECTIVES,
    SET_UPS,
    SIMPLE,
    STUDIED,
    SUBJECT,
    Cell,
    members,
    select_cells,
)
from benchmarks.slo.slo_study.charts import ratio_chart
from benchmarks.slo.slo_study.disturbed import DISTURBANCES, TRIAGE, DisturbedPlan, disturbed_table
from benchmarks.slo.slo_study.knowledge import CELLS as KNOWLEDGE_CELLS
from benchmarks.slo.slo_study.knowledge import knowledge_runs, knowledge_table
from benchmarks.slo.slo_study.loads import WORKLOADS
from benchmarks.slo.slo_study.replica import Stage
from benchmarks.slo.slo_study.report import Study, markdown
from benchmarks.slo.slo_study.scored import Scored, scored_runs
from benchmarks.slo.slo_study.tasks import Plan, make_tasks, mixed, run_task
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO_MODES
from onbeat.planner.parallel import run_tasks

LINES = RESULTS / "slo-study.jsonl"
IMAGES = REPOSITORY / "docs" / "images"
DISTURBED_NOTE = """
Mistral-7B on one A100-80G, Poisson arrivals, lengths of the Azure conversation trace, 1 s and 100 ms, stream;
16 minutes of arrivals, of which the first four are thrown away: in them each disturbance comes for the first
time. A policy that plans with step times begins with the undisturbed model and learns from the steps that it
sees. Loads are multiples of the capacity (90 % good, of loads that last) of `slo` undisturbed. Of static
budgets with triage the best with the first seed stands for all.
"""

BOUND_NOTE = """
Capacities of `slo` in loads that last, as in the study, and what they are multiplied by if it knows more. It
knows nothing: requests declare 4,096 output tokens and steps vary by 30 % around what is predicted.
`lengths`: requests declare exactly their output. `step times`: steps take what is predicted. `arrivals`: the
prompts that will come are counted when those that cannot all be in time are sorted out. `and no bursts`:
lengths and step times are known, and requests come at equal distances. `bound`: a rate that no policy can
carry for ever, as in a load that lasts what is left over may not grow (`slo_study/bound.py`); bursts, which
all policies suffer from, do not count in it.
"""


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except ConfigError as error:
        sys.exit(f"slo_study: {error}")


def run(args: argparse.Namespace) -> None:
    policies = args.policy or list(STUDIED)
    for policy in policies:
        members(policy)  # an unknown one is refused before anything runs
    results = Results(args.results, args.tag)
    tasks = make_tasks(
        Plan(
            cells=mixed(_cells(args))[: args.cells],
            policies=policies,
            num_seeds=args.seeds,
            tag=args.tag,
            results=args.results,
            deadline=deadline_in(args.minutes),
        )
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("searches", total=len(tasks))

        def on_event(index: int, runs: list[Scored]) -> None:
            for each in runs:
                each.write(results, args.tag)
            progress.update(bar, description=str(tasks[index]))
            if args.verbose:
                print(*runs, sep="\n", flush=True)

        run_tasks(
            run_task,
            tasks,
            jobs=args.jobs,
            on_event=on_event,
            on_result=lambda _index, _count: progress.advance(bar),
        )
    print(f"written: {args.results}")


def report(args: argparse.Namespace) -> None:

    cells = set(_cells(args))
    runs = scored_runs(Results(args.results, args.tag))
    study = Study([each for each in runs if each.run.cell in cells])
    text = markdown(study, date=time.strftime("%Y-%m-%d"), remark=args.remark)
    publish(text, "slo-study", write=args.write)
    if args.write:
        print(f"written: {write_image(ratio_chart(study), IMAGES / 'slo-ratios.png')}")


def disturb(args: argparse.Namespace) -> None:
    capacity = args.capacity or round(Stage().capacity(SUBJECT), 2)
    plan = DisturbedPlan(
        disturbances=args.only,
        policies=[name for each in args.policy or (SUBJECT, SIMPLE, TRIAGE) for name in members(each)],
        capacity=capacity,
        seeds=args.seeds,
    )
    results, deadline = Results(args.results, args.tag), deadline_in(args.minutes)
    run_missing(plan.first_seed(), results, jobs=args.jobs, deadline=deadline)
    run_missing(plan.more_seeds(results), results, jobs=args.jobs, deadline=deadline)
    text = (
        f"# Disturbed\n\n{time.strftime('%Y-%m-%d')}. `python -m benchmarks.slo.study disturb`. "
        f"{DISTURBED_NOTE.strip()} Capacity: {capacity:g} requests/s.\n\n{disturbed_table(plan, results)}\n"
    )
    publish(text, "slo-disturbed", write=args.write)


def ablate(args: argparse.Namespace) -> None:
    results, deadline = Results(args.results, args.tag), deadline_in(args.minutes)
    if args.in_all_cells:
        own = lasting(scored_runs(Results(LINES, args.study)))
        run_missing(compared_runs(own, args.in_all_cells), results, jobs=args.jobs, deadline=deadline)
        print(compared_table(own, args.in_all_cells, results))
        return
    run_missing(ablation_runs(ABLATION_CELLS, args.seeds), results, jobs=args.jobs, deadline=deadline)
    print(ablation_table(ABLATION_CELLS, args.seeds, results))


def bound(args: argparse.Namespace) -> None:
    results = Results(args.results, args.tag)
    run_missing(
        knowledge_runs(KNOWLEDGE_CELLS, args.seeds),
        results,
        jobs=args.jobs,
        deadline=deadline_in(args.minutes),
    )
    text = (
        f"# Against a clairvoyant bound\n\n{time.strftime('%Y-%m-%d')}. "
        f"`python -m benchmarks.slo.study bound`. {BOUND_NOTE.strip()}\n\n"
        f"{knowledge_table(KNOWLEDGE_CELLS, args.seeds, results)}\n"
    )
    publish(text, "slo-bound", write=args.write)


def _cells(args: argparse.Namespace) -> list[Cell]:
    return select_cells(args.set_up, args.workload, args.slo, args.mode)


def _names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--set-up", nargs="+", choices=tuple(SET_UPS), default=())
    shared.add_argument("--workload", nargs="+", choices=WORKLOADS, default=())
    shared.add_argument("--slo", nargs="+", choices=tuple(OBJECTIVES), default=())
    shared.add_argument("--mode", nargs="+", choices=SLO_MODES, default=())
    shared.add_argument("--results", type=Path, default=LINES)
    shared.add_argument("--tag", default="", help="version of the policies that plan with objectives")
    each = commands.add_parser("run", parents=[shared], help=f"find capacities in {len(CELLS)} cells")
    each.add_argument("--policy", type=_names, action="extend", help="names or families, with commas")
    each.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    each.add_argument("--jobs", type=int, default=2)
    each.add_argument("--minutes", type=float, help="stop after this long with what there is")
    each.add_argument("--cells", type=int, help="only so many of the selected, old and new ones in turns")
    each.add_argument("--verbose", action="store_true", help="print each run")
    each.set_defaults(command=run)
    each = commands.add_parser("report", parents=[shared], help="tables and charts of what was found")
    each.add_argument("--remark", default="", help="to stand below the note, on how these lines were made")
    each.add_argument("--write", action="store_true", help="into benchmarks/results and docs/images")
    each.set_defaults(command=report)
    slices = argparse.ArgumentParser(add_help=False)
    slices.add_argument("--jobs", type=int, default=2)
    slices.add_argument("--minutes", type=float, help="stop after this long with what there is")
    slices.add_argument("--tag", default="", help="version of the policies")
    each = commands.add_parser("disturb", parents=[slices], help="disturbed devices and loads")
    each.add_argument("--only", nargs="+", choices=DISTURBANCES, default=DISTURBANCES)
    each.add_argument("--policy", type=_names, action="extend", help="names or families, with commas")
    each.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    each.add_argument("--capacity", type=float, help="requests/s, instead of a search for it")
    each.add_argument("--results", type=Path, default=RESULTS.joinpath("slo-disturbed.jsonl"))
    each.add_argument("--write", action="store_true", help="into benchmarks/results")
    each.set_defaults(command=disturb)
    each = commands.add_parser("ablate", parents=[slices], help="what each part of the policy is worth")
    each.add_argument("--seeds", type=int, default=2, help="how many, from 0")
    each.add_argument(
        "--in-all-cells",
        nargs="+",
        choices=(SUBJECT, *VARIANTS),
        metavar="PART",
        help="only these parts, one seed, in each cell, at the highest rates that keep 90 and 99 %%",
    )
    each.add_argument("--study", default="14", metavar="TAG", help="whose rates these are (default 14)")
    each.add_argument("--results", type=Path, default=RESULTS.joinpath("slo-ablation.jsonl"))
    each.set_defaults(command=ablate)
    each = commands.add_parser("bound", parents=[slices], help="how far from a bound, and for want of what")
    each.add_argument("--seeds", type=int, default=2, help="how many, from 0")
    each.add_argument("--results", type=Path, default=RESULTS.joinpath("slo-bound.jsonl"))
    each.add_argument("--write", action="store_true", help="into benchmarks/results")
    each.set_defaults(command=bound)
    return parser


if __name__ == "__main__":
    main()
