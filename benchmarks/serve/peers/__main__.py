"""onbeat and other servers under the same load on this machine, in interleaved rounds.

    export MODEL=DIRECTORY GGUF=FILE        # what servers.yaml refers to
    python -m benchmarks.serve.peers onbeat vllm --tune
    python -m benchmarks.serve.peers onbeat llama.cpp
    GGUF=model-Q8_0.gguf python -m benchmarks.serve.peers onbeat-gguf llama.cpp --name q8_0

The first server is the one whose ratio to the others is reported. Names are those of `servers.yaml` beside
this script, or of --config. Every server gets the same prompts: closed loops at several concurrencies and one
with long prompts among the short ones. Results go to
`benchmarks/results/DATE-peers-NAME.md` and the JSON file beside it, the plot to `docs/images/`.
Needs a machine with nothing else to do. `--quick` tries it out. How the peers are installed:
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import sys
import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.pages import REPOSITORY, git_commit, machine
from benchmarks.serve.peers import report
from benchmarks.serve.peers.client import LoadClient, Objectives
from benchmarks.serve.peers.entries import Entry, EntryError, launch_here, read_entries
from benchmarks.serve.peers.rounds import Loads, Runs, run_rounds
from benchmarks.serve.peers.stage import TURNS, Stage, open_stage
from benchmarks.serve.peers.tuning import tune
from benchmarks.serve.peers.workload import MIN_REQUESTS, QUICK_REQUESTS, Cell, make_cells
from onbeat.bench.bench_config import SEND_SLO
from onbeat.hub.resolve import resolve_model
from onbeat.text.tokenizer import load_tokenizer

CONFIG = Path(__file__).with_name("servers.yaml")
CONCURRENCIES = (1, 8, 16, 32)
QUICK_CONCURRENCIES = (1, 4)
TUNED_FROM = 16
"""Loads of at least this concurrency decide over a peer's best setting, and the one with long prompts."""


def main() -> None:
    args = parse_args()
    if args.render:
        document = json.loads(args.render.read_text(encoding="utf-8"))
        report.write(document, args.render.with_suffix(""), args.images_dir)
        return
    began = time.monotonic()
    try:
        entries = read_entries(args.config, args.servers)
        for entry in entries:
            launch_here(entry)  # a variable that is not set shows before minutes are spent
    except EntryError as error:
        sys.exit(str(error))
    compare(entries, args)
    print(f"took {(time.monotonic() - began) / 60:.1f} min")


def compare(entries: list[Entry], args: argparse.Namespace) -> None:
    """Tune peers where asked for, do the rounds, and write the results after each."""
    client = LoadClient(
        load_tokenizer(resolve_model(args.tokenizer).path),
        objectives=Objectives(ttft=args.ttft_ms / 1e3, tbt=args.tbt_ms / 1e3),
        send_slo=args.send_slo,
        seed=args.seed,
    )
    salt = secrets.token_hex(4)
    entries, tuning = tune_peers(entries, args, client, salt)
    loads = Loads(client=client, cells=cells_of(args, args.per_slot), salt=salt)
    names = [entry.name for entry in entries]
    stem = args.results_dir / f"{args.day or date.today().isoformat()}-peers-{args.name}"
    with open_stage(entries, args.turns) as stage:

        def on_round(runs: Runs, limits: list[dict[str, float]]) -> None:
            document = describe(args, entries, stage, client) | {
                "tuning": tuning,
                "limits": limits,
                "starts": stage.starts,
                "runs": runs,
            }
            report.write(document, stem, args.images_dir)

        run_rounds(stage, loads, names, args.rounds, on_round)


def tune_peers(
    entries: list[Entry], args: argparse.Namespace, client: LoadClient, salt: str
) -> tuple[list[Entry], Runs]:
    """Return the servers with each tuned peer's best variant after it, and the runs that found it."""
    if not args.tune:
        return entries, []
    cells = [
        cell
        for cell in cells_of(args, args.tune_per_slot)
        if cell.concurrency >= TUNED_FROM or cell.long_share
    ]
    loads = Loads(client=client, cells=cells, salt=salt)
    together: list[Entry] = []
    runs: Runs = []
    for entry in entries:
        if entry.tune is None:
            together.append(entry)
            continue
        tuned, own = tune(entry, loads)
        together += tuned
        runs += own
    return together, runs


def cells_of(args: argparse.Namespace, per_slot: int) -> list[Cell]:
    return make_cells(
        args.concurrency,
        per_slot=per_slot,
        interference=args.interference or None,
        least=QUICK_REQUESTS if args.quick else MIN_REQUESTS,
    )


def describe(
    args: argparse.Namespace, entries: list[Entry], stage: Stage, client: LoadClient
) -> dict[str, Any]:
    """Return what a result says of its making."""
    return {
        "name": args.name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine(),
        "command": shlex.join(["python", "-m", "benchmarks.serve.peers", *sys.argv[1:]]),
        "objectives": str(client.objectives),
        "turns": "suspend" if stage.keeps_up else "restart",
        "names": [entry.name for entry in entries],
        "servers": {entry.name: entry.as_json() for entry in entries},
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="*", metavar="SERVER", help="names in the configuration, ours first")
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML file of servers")
    parser.add_argument("--name", help="in the names of the result files (default: the peers')")
    parser.add_argument("--quick", action="store_true", help="one short round, to try it out")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="levels (default: 1 8 16 32)")
    parser.add_argument("--per-slot", type=int, help="requests for each concurrent one (default: 10)")
    parser.add_argument(
        "--interference", type=int, metavar="N", help="concurrency of the load with long prompts; 0: none (8)"
    )
    parser.add_argument(
        "--tune", action="store_true", help="try a peer's settings; its best one takes part too"
    )
    parser.add_argument(
        "--tune-per-slot", type=int, default=4, help="requests for each concurrent one in that"
    )
    turns_help = "suspend servers between turns, or start them anew; auto: suspend where all fit in memory"
    parser.add_argument("--turns", choices=TURNS, default="auto", help=turns_help)
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="objective")
    parser.add_argument("--tbt-ms", type=float, default=100.0, help="objective, of a request's own P99 gap")
    parser.add_argument("--send-slo", choices=SEND_SLO, default="auto", help="how servers hear of objectives")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths")
    parser.add_argument(
        "--tokenizer", default="smollm2-135m-instruct", metavar="MODEL", help="of the model that servers run"
    )
    parser.add_argument("--results-dir", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--images-dir", type=Path, default=REPOSITORY / "docs" / "images")
    parser.add_argument("--day", help="date in the names of the result files (default: today)")
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="only write a result's page again")
    args = parser.parse_args()
    if not args.render and len(args.servers) < 2:
        parser.error("name at least two servers, ours first")
    args.name = args.name or "-".join(args.servers[1:])
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.concurrency = args.concurrency or list(QUICK_CONCURRENCIES if args.quick else CONCURRENCIES)
    args.per_slot = args.per_slot or (1 if args.quick else 10)
    args.interference = 8 if args.interference is None else args.interference
    return args


if __name__ == "__main__":
    main()
