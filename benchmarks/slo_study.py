"""How much load policies carry within latency objectives: capacities in simulation, cell by cell.

    python benchmarks/slo_study.py run [--set-up mistral] [--workload azure-code] [--slo 1s-50ms]
        [--mode gap] [--policy slo sarathi-512] [--seeds 5] [--jobs 2] [--minutes 30] [--tag NAME]
    python benchmarks/slo_study.py probe --rate 6 7 8 --policy slo,sarathi-512 [selection]
    python benchmarks/slo_study.py report [--write]
    python benchmarks/slo_study.py curve --set-up .. --workload .. --slo .. --mode .. --rate 4 5 6 7

A cell is a set-up (model and device), a workload, objectives and what keeping a TBT objective means. In each,
the capacity of a policy is the highest rate at which 90 %, or 99 %, of the requests are good, found by
bisection to 1 % for each seed. Requests that an idle machine with an empty prefix cache could not serve in
time are counted apart. `run` appends to a file of JSON lines and skips what is there. Step times are the
uncalibrated roofline, as in `onbeat simulate`; every request declares exactly its output length. The folder
of the traces is named by ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from slo_study.cells import (
    BOUND,
    MORE_WORKLOADS,
    OBJECTIVES,
    SET_UPS,
    STATIC_POLICIES,
    WORKLOADS,
    Cell,
    all_cells,
)
from slo_study.charts import attainment_chart, ratio_chart, write_image
from slo_study.probe import Probe, measure_curves, run_probe
from slo_study.report import Study, markdown
from slo_study.store import Line, Store
from slo_study.tasks import Plan, make_tasks, run_task

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO_MODES
from onbeat.planner.parallel import run_tasks

NUM_REQUESTS = {"poisson": 600, "azure-code": 600, "azure-conv": 600, "mooncake": 300, "mooncake-ticks": 300}
FASTER = {"poisson": 1000, "azure-conv": 1000}
"""Of `llama`, which serves conversations so fast that fewer requests would last but seconds."""
RESULTS = Path(__file__).parent / "results" / "slo-study.jsonl"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
PLANNING_POLICIES = ("slo", "niyama", "edf")
FOREVER = 1e18
NOTE = """
Made by `python benchmarks/slo_study.py run`, then `report --write`. Mistral-7B-v0.3 on one A100-80G SXM
and Llama-3.1-8B on one H100 SXM, uncalibrated roofline step times as in `onbeat simulate`; `max-num-
seqs` 256 for every policy, whole-prompt policies with the token budget that they need. Every request
declares exactly its output length, which is what `orca` reserves memory for. `poisson` draws lengths
from the Azure conversation trace; on the traces a seed is a window that starts elsewhere, and the rate
is set by squeezing its times. Mooncake's clock ticks every 3 s; requests of one tick are spread over it
at random (as recorded, some ten come at once at every rate, and no policy keeps even 90 %). A capacity
is the highest rate at which the share of the requests is good, to 1 %, with Student's t interval over
the seeds; ratios are of pairs (equal requests), with the interval of their logarithms. Requests that an
idle machine with an empty prefix cache could not serve in time (*hopeless*) count neither way; those
that do not fit the context (*over-long*) are left out. Both columns are means over the seeds. A cell
*binds* where the best hand-tuned policy's capacity is 5 to 95 % of its own with both objectives ten
times looser (the percentage shown; from windows twice as long). The bound of these very requests is what
no policy can pass; that for ever longer loads leaves out the work that a finite run may do after its
last arrival, so a run may pass it (`onbeat.planner.fluid_bound`).
"""


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except ConfigError as error:
        sys.exit(f"slo_study: {error}")


def run(args: argparse.Namespace) -> None:
    store = Store(args.results)
    plan = Plan(
        cells=_cells(args),
        policies=args.policy or [BOUND, *STATIC_POLICIES, *PLANNING_POLICIES],
        num_seeds=args.seeds,
        num_requests=_num_requests(args),
        long_factor=args.long_factor,
        tag=args.tag,
        results=args.results,
        deadline=time.time() + args.minutes * 60 if args.minutes else FOREVER,
    )
    tasks = make_tasks(plan, store.read())
    total = sum(len(task.seeds) * len(task.cells) for task in tasks)
    print(f"{total} of {len(plan.cells) * len(plan.policies) * plan.num_seeds} searches are left")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("searches", total=total)

        def on_event(index: int, lines: list[Line]) -> None:
            store.append(lines)
            for line in lines:
                if not progress.console.is_terminal or args.verbose:
                    _show(line)
            progress.update(bar, advance=len(lines), description=str(tasks[index]))

        run_tasks(run_task, tasks, jobs=args.jobs, on_event=on_event)


def _show(line: Line) -> None:
    rates = " ".join(f"{share}: {rate:.3f}" for share, rate in line.capacity.items())
    loose = " ".join(f"{share}: {rate:.3f}" for share, rate in line.loose.items())
    print(
        f"{line.cell} {line.policy} seed {line.seed}: {rates}{f' (loose {loose})' if loose else ''} "
        f"[{line.num_hopeless} of {line.num_requests} hopeless, {line.num_skipped} over-long; "
        f"{line.num_runs} runs, {line.seconds:.1f} s]",
        flush=True,
    )


def probe(args: argparse.Namespace) -> None:
    for cell in _cells(args):
        num_requests = _num_requests(args)(cell)
        run_probe(
            Probe(
                cell=cell,
                policies=args.policy or [*STATIC_POLICIES],
                rates=args.rate,
                seeds=range(args.seeds),
                num_requests=num_requests,
            )
        )


def report(args: argparse.Namespace) -> None:
    lines = Store(args.results).read()
    cells = set(_cells(args))
    study = Study([line for line in lines if line.cell in cells], tag=args.tag or None)
    note = f"{time.strftime('%Y-%m-%d')}. {NOTE.strip()}"
    text = markdown(study, f"{note}\n\n{args.remark}" if args.remark else note)
    print(text)
    if args.write:
        path = RESULTS.parent / f"{time.strftime('%Y-%m-%d')}-slo-study.md"
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}, {write_image(ratio_chart(study), IMAGES / 'slo-ratios.png')}")


def curve(args: argparse.Namespace) -> None:
    (cell,) = _cells(args)
    points, bounds = measure_curves(
        Probe(
            cell=cell,
            policies=args.policy or [*STATIC_POLICIES, *PLANNING_POLICIES],
            rates=args.rate,
            seeds=range(args.seeds),
            num_requests=_num_requests(args)(cell),
        )
    )
    title = f"Attainment: {cell} ({args.seeds} seeds)"
    print(f"written: {write_image(attainment_chart(title, points, bounds), IMAGES / 'slo-attainment.png')}")


def _cells(args: argparse.Namespace) -> list[Cell]:
    return all_cells(args.set_up, args.workload, args.slo, args.mode)


def _num_requests(args: argparse.Namespace) -> Callable[[Cell], int]:
    def count(cell: Cell) -> int:
        if args.requests:
            return int(args.requests)
        return (FASTER if cell.set_up == "llama" else {}).get(cell.workload, NUM_REQUESTS[cell.workload])

    return count


def _names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--set-up", nargs="+", choices=tuple(SET_UPS), default=())
    shared.add_argument("--workload", nargs="+", choices=(*WORKLOADS, *MORE_WORKLOADS), default=())
    shared.add_argument("--slo", nargs="+", choices=tuple(OBJECTIVES), default=())
    shared.add_argument("--mode", nargs="+", choices=SLO_MODES, default=())
    shared.add_argument("--policy", type=_names, action="extend", help="names, separated by commas")
    shared.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    shared.add_argument("--requests", type=int, help="of each seed, in place of the workload's own number")
    shared.add_argument("--results", type=Path, default=RESULTS)
    each = commands.add_parser("run", parents=[shared], help="find capacities")
    each.add_argument("--jobs", type=int, default=2)
    each.add_argument("--minutes", type=float, help="stop after this long with what there is")
    each.add_argument("--long-factor", type=int, default=2, help="windows of runs that say if a cell binds")
    each.add_argument("--tag", default="", help="version of the policies that plan with objectives")
    each.add_argument("--verbose", action="store_true", help="print each result")
    each.set_defaults(command=run)
    each = commands.add_parser("probe", parents=[shared], help="print attainment at given rates")
    each.add_argument("--rate", type=float, nargs="+", required=True)
    each.set_defaults(command=probe)
    each = commands.add_parser("report", parents=[shared], help="tables and charts of what was found")
    each.add_argument("--tag", default="", help="as given to run")
    each.add_argument("--remark", default="", help="to stand below the note, on how these lines were made")
    each.add_argument("--write", action="store_true", help="into benchmarks/results and docs/images")
    each.set_defaults(command=report)
    each = commands.add_parser("curve", parents=[shared], help="chart of attainment against rate in a cell")
    each.add_argument("--rate", type=float, nargs="+", required=True)
    each.set_defaults(command=curve)
    return parser


if __name__ == "__main__":
    main()
