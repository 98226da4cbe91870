"""The policy `slo` live on this machine: capacity, interference, classes, overload, and a peer beside it.

    python benchmarks/slo_live.py measure     # first: the objectives of the others are multiples of it
    python benchmarks/slo_live.py capacity    # second: the others take their rates from it
    python benchmarks/slo_live.py interference
    python benchmarks/slo_live.py classes
    python benchmarks/slo_live.py overload
    python benchmarks/slo_live.py beside --tree CHECKOUT   # another version, with its native library
    python benchmarks/slo_live.py vllm --model DIR --vllm-command "vllm serve DIR ... --port 8102"

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

from slo_live import beside, capacity, classes, interference, measure, overload, vllm
from slo_live.context import Context, add_common_arguments, make_context

STUDIES: dict[str, Callable[[Context], None]] = {
    "measure": measure.run,
    "capacity": capacity.run,
    "interference": interference.run,
    "classes": classes.run,
    "overload": overload.run,
    "beside": beside.run,
    "vllm": vllm.run,
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
        if name in {"interference", "classes", "overload", "vllm"}:
            study.add_argument("--load", type=float, metavar="X", help="rate as a multiple of the capacity")
        if name == "beside":
            study.add_argument("--tree", type=Path, help="checkout of the other version")
            study.add_argument("--tree-commit", help="what it is, for the table")
        if name == "vllm":
            study.add_argument("--vllm-command", help=f"starts it (default: ${vllm.COMMAND_VARIABLE})")
            study.add_argument("--vllm-url", default="http://127.0.0.1:8102", help="where it then listens")
            study.add_argument("--vllm-label", default="vLLM with its own defaults", help="for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
