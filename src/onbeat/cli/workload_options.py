"""The flags of a load that is simulated: what is asked, when, and with which objectives.

Names are those of `onbeat bench serve` wherever it has the flag.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from onbeat.cli.args import count, seed
from onbeat.cli.options import add_options, find_group, number
from onbeat.core.slo import OBJECTIVES, SLO
from onbeat.workload.arrival_plan import ARRIVAL_KINDS
from onbeat.workload.load_source import LOAD_NAMES


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `workload_settings.offered_load` reads."""
    _add_dataset_arguments(parser)
    _add_load_arguments(parser)
    add_slo_arguments(parser)


def _add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=LOAD_NAMES, help="where lengths come from (default: random)")
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="file of a data set that has one; gzip too"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace file of any known kind; replayed in its own time"
    )
    group.add_argument(
        "--length-columns",
        metavar="INPUT,OUTPUT",
        help="columns of lengths (default: num_prefill_tokens,num_decode_tokens)",
    )
    group.add_argument("--tokenizer", type=Path, metavar="PATH", help="measures the texts of sharegpt")
    group.add_argument(
        "--num-prompts", type=count, metavar="N", help="requests (default: 1000, or all of a file)"
    )
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=count,
        metavar="N",
        help="mean prompt tokens of random and conversation, most of zipf (default: 1024)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        type=count,
        metavar="N",
        help="the same of output tokens (default: 128); replaces a file's",
    )
    group.add_argument(
        "--random-range-ratio", type=number, default=0.0, metavar="X", help="spread of random's lengths"
    )
    group.add_argument(
        "--zipf-exponent", type=number, metavar="S", help="p(length) falls as length^-S (default: 1)"
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take requests of files without times in file order"
    )
    group.add_argument("--seed", type=seed, default=0, help="decides lengths, arrivals and classes")
    group.add_argument(
        "--overlong",
        choices=("error", "skip"),
        default="error",
        help="what becomes of requests that do not fit the context",
    )


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=number,
        metavar="R",
        help="requests/s; inf = all at once (default: a trace's own times; a closed loop with "
        "--max-concurrency; else 1)",
    )
    group.add_argument("--max-concurrency", type=count, metavar="N", help="most requests open at once")
    add_arrival_arguments(group)
    group.add_argument(
        "--rate-scale", type=number, default=1.0, metavar="X", help="replay at X times the recorded rate"
    )


def add_arrival_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of how arrivals spread (`arrival_shape`)."""
    group.add_argument(
        "--arrivals",
        choices=ARRIVAL_KINDS,
        help="gamma (Poisson at --burstiness 1, the default), poisson, constant, burst (on and off), steps "
        "(--rate-steps), replay (a trace's own times; its default; with --request-rate stretched to it)",
    )
    group.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        help="shape of the gamma distribution of gaps; below 1 is burstier",
    )
    group.add_argument(
        "--arrival-cv",
        type=number,
        metavar="CV",
        help="the same as a coefficient of variation: 1/sqrt(shape)",
    )
    group.add_argument("--burst-on-sec", type=number, metavar="S", help="busy phases of burst (default: 5)")
    group.add_argument("--burst-off-sec", type=number, metavar="S", help="pauses of burst (default: 15)")
    group.add_argument(
        "--rate-steps", metavar="R:S,...", help="rates and how many seconds each holds, over and over"
    )


def add_slo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of objectives (`slo_options`)."""
    add_options(parser, SLO)
    find_group(parser, OBJECTIVES).add_argument(
        "--slo-config",
        metavar="FILE.yaml",
        help="classes by share (name, share, weight, ttft_ms, tbt_ms, e2e_ms), or the name of a built-in "
        "class: interactive, standard, batch",
    )
