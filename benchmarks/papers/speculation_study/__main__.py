"""What adaptive draft lengths are worth, in simulation: against fixed ones, and by load.

    python -m benchmarks.papers.speculation_study run [--part turbospec mlc] [--jobs 2] [--minutes 10]
    python -m benchmarks.papers.speculation_study report [--write]

turbospec  Mean latency at Poisson rates with TurboSpec's published coefficients, acceptance 0.5, 0.7 and 0.9:
           no drafts, fixed lengths, and lengths by goodput.
mlc        Mean TPOT of a closed loop on Llama-3-70B with an 8B draft model, fp8, on four H100.

The simulator decides by (seed, request, place of the token) whether a draft is right, so that every way to
plan drafts meets the same luck. `run` appends to a file of JSON lines and skips what is there. The folder of
public data (coefficients, traces) is named by ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.pages import RESULTS, publish
from benchmarks.harness.store import Results, deadline_in, run_missing
from benchmarks.papers.speculation_study.plan import PARTS, Plan, stages
from benchmarks.papers.speculation_study.report import markdown
from onbeat.core.errors import ConfigError

NOTE = """
Made by `python -m benchmarks.papers.speculation_study run`, then `report --write`; {seconds:.0f} s of one
core. The live scheduler's objects under a virtual clock. *turbospec*: the authors' regressions for Llama-8B
with EAGLE on one H100 and Llama-70B with n-gram drafts on four; log-normal lengths of mean 300 in and 300
out; at most 7 drafts. *mlc*: uncalibrated roofline, alone (the hardware's limit, which no engine reaches) and
with 80 us for each sequence of a forward pass of either model (fitted to the post's points for the 8B model),
log-normal lengths of mean 306 in and 500 out, 3 drafts, acceptance 0.7.
Acceptance is the rate at which a draft is accepted if those before it are.
"""


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except ConfigError as error:
        sys.exit(f"speculation_study: {error}")


def run(args: argparse.Namespace) -> None:
    plan, results = _plan(args), Results(args.results, args.tag)
    deadline = deadline_in(args.minutes)
    for stage in stages(plan):
        run_missing(stage(results), results, jobs=args.jobs, deadline=deadline)


def report(args: argparse.Namespace) -> None:
    plan, results = _plan(args), Results(args.results, args.tag)
    note = f"{time.strftime('%Y-%m-%d')}. {NOTE.strip().format(seconds=results.seconds)}"
    text = markdown(results, plan, note)
    publish(text, "speculation-study", write=args.write)


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(parts=tuple(args.part), scale=args.scale)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    shared.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of the numbers of requests",
    )
    shared.add_argument("--results", type=Path, default=RESULTS / "speculation-study.jsonl")
    shared.add_argument("--tag", default="", help="version of what is studied")
    each = commands.add_parser("run", parents=[shared], help="do the runs that are missing")
    each.add_argument("--jobs", type=int, default=2)
    each.add_argument("--minutes", type=float, help="stop after this long with what there is")
    each.set_defaults(command=run)
    each = commands.add_parser("report", parents=[shared], help="tables and claims of what was found")
    each.add_argument("--write", action="store_true", help="into benchmarks/results")
    each.set_defaults(command=report)
    return parser


if __name__ == "__main__":
    main()
