"""How much load that lasts policies carry within latency objectives: capacities in simulation, cell by cell.

    python -m benchmarks.slo.study run [--minutes 60] [--jobs 2] [--seeds 5] [--policy slo,simple,static]
        [--cells 32] [--set-up mistral] [--workload azure-code] [--slo 1s-50ms] [--mode gap] [--tag NAME]
    python -m benchmarks.slo.study report [--write] [selection]
    python -m benchmarks.slo.study ablate [--minutes 10] [--jobs 2] [--seeds 2]

A cell is a set-up (model and device), a workload, objectives and what keeping a TBT objective means. A load
lasts: at least 4,000 requests and ten minutes of arrivals are measured, after a warm-up that is thrown away.
A capacity is the rate at which a criterion is no longer kept: 90 or 99 % of the requests good, 90 % in the
worst decile of prompt length, 90 % with a P99 of TTFT below five times its objective. In all of these the
queue must not grow; in a fifth, 90 % of attainment alone, it may.
Requests that an idle machine with an empty prefix cache could not serve in time count
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

from benchmarks.harness.pages import RESULTS, publish
from benchmarks.harness.store import Results, deadline_in, run_missing
from benchmarks.slo.slo_study.ablation import CELLS as ABLATION_CELLS
from benchmarks.slo.slo_study.ablation import ablation_runs, ablation_table
from benchmarks.slo.slo_study.cells import (
    CELLS,
    OBJECTIVES,
    SET_UPS,
    STUDIED,
    Cell,
    members,
    select_cells,
)
from benchmarks.slo.slo_study.loads import WORKLOADS
from benchmarks.slo.slo_study.report import Study, markdown
from benchmarks.slo.slo_study.scored import Scored, scored_runs
from benchmarks.slo.slo_study.tasks import Plan, make_tasks, mixed, run_task
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO_MODES
from onbeat.planner.parallel import Pool

LINES = RESULTS / "slo-study.jsonl"


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

        with Pool(args.jobs) as pool:
            pool.run(
                run_task, tasks, on_event=on_event, on_result=lambda _index, _count: progress.advance(bar)
            )
    print(f"written: {args.results}")


def report(args: argparse.Namespace) -> None:

    cells = set(_cells(args))
    runs = scored_runs(Results(args.results, args.tag))
    study = Study([each for each in runs if each.run.cell in cells])
    text = markdown(study, date=time.strftime("%Y-%m-%d"), remark=args.remark)
    publish(text, "slo-study", write=args.write)


def ablate(args: argparse.Namespace) -> None:
    results, deadline = Results(args.results, args.tag), deadline_in(args.minutes)
    run_missing(ablation_runs(ABLATION_CELLS, args.seeds), results, jobs=args.jobs, deadline=deadline)
    print(ablation_table(ABLATION_CELLS, args.seeds, results))


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
    each = commands.add_parser("report", parents=[shared], help="tables of what was found")
    each.add_argument("--remark", default="", help="to stand below the note, on how these lines were made")
    each.add_argument("--write", action="store_true", help="into benchmarks/results")
    each.set_defaults(command=report)
    each = commands.add_parser("ablate", help="what each part of the policy is worth")
    each.add_argument("--jobs", type=int, default=2)
    each.add_argument("--minutes", type=float, help="stop after this long with what there is")
    each.add_argument("--tag", default="", help="version of the policies")
    each.add_argument("--seeds", type=int, default=2, help="how many, from 0")
    each.add_argument("--results", type=Path, default=RESULTS.joinpath("slo-ablation.jsonl"))
    each.set_defaults(command=ablate)
    return parser


if __name__ == "__main__":
    main()
