"""The policy `slo` live on this machine: its capacity, overload, and another version beside it.

    python -m benchmarks.serve.slo_live measure     # first: the objectives of the others are multiples of it
    python -m benchmarks.serve.slo_live capacity    # second: the others take their rates from it
    python -m benchmarks.serve.slo_live overload
    python -m benchmarks.serve.slo_live beside --tree CHECKOUT   # another version, with its native library

Every study starts its servers itself, gives them equal requests at equal times in turns (A B, B A, ...) with
the other servers suspended, prints a table with ratios, replaces its own section of
`benchmarks/results/DATE-slo-live.md` and of the JSON file beside it, and draws a plot into `docs/images/`.
Needs a machine with nothing else to do. `--quick` tries a study out in seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve.slo_live import beside, capacity, measure, overload
from benchmarks.serve.slo_live.context import Context, add_common_arguments, make_context

STUDIES: dict[str, Callable[[Context], None]] = {
    "measure": measure.run,
    "capacity": capacity.run,
    "overload": overload.run,
    "beside": beside.run,
}


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    STUDIES[args.study](make_context(args))
    print(f"{args.study} took {(time.monotonic() - began) / 60:.1f} min")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    for name in STUDIES:
        study = studies.add_parser(name)
        add_common_arguments(study)
        if name == "capacity":
            study.add_argument("--rates", type=float, nargs="+", help="requests/s (default: found by probes)")
        if name == "overload":
            study.add_argument("--load", type=float, metavar="X", help="rate as a multiple of the capacity")
        if name == "beside":
            study.add_argument("--tree", type=Path, help="checkout of the other version")
            study.add_argument("--tree-commit", help="what it is, for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
