"""Speculation by prompt lookup live: off, adaptive and fixed lengths, the same tasks, interleaved rounds.

    python benchmarks/speculation_live.py                  # about 30 minutes
    python benchmarks/speculation_live.py --only editing --concurrency 1 --rounds 3
    python benchmarks/speculation_live.py --check-equal    # the same tokens from all servers, in float32

Two sets of tasks, both in benchmarks/data: editing, where the answer repeats much of the prompt, and free
chat, where it does not. All servers are up, suspended but for the one whose turn it is. Results go to
`benchmarks/results/DATE-speculation-live.md` and the JSON file beside it, the plot to `docs/images/`. Needs a
machine with nothing else to do; `--quick` tries it out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from harness.pages import REPOSITORY, git_commit, machine
from peers.stage import Stage
from speculation_live import equal, report
from speculation_live.client import TaskClient
from speculation_live.rounds import NUM_TASKS, QUICK_TASKS, Plan, Runs, run_rounds
from speculation_live.servers import make_entries
from speculation_live.tasks import DATA, TASK_SETS, draw_tasks, read_tasks

from onbeat.hub.known import DEFAULT_MODEL
from onbeat.hub.resolve import resolve_model
from onbeat.text.tokenizer import load_tokenizer

EXACT = "--quantization none"
"""With float32: weights in it too, whatever the file holds."""


def main() -> None:
    args = parse_args()
    stem = args.results_dir / f"{args.day or date.today().isoformat()}-speculation-live"
    document = load_document(stem)
    if args.render:
        document["remark"] = args.remark or document["remark"]
        report.write(document, stem, args.images_dir)
        return
    began = time.monotonic()
    if args.check_equal:
        check(args, document, stem)
    else:
        measure(args, document, stem)
    print(f"took {(time.monotonic() - began) / 60:.1f} min")


def measure(args: argparse.Namespace, document: dict[str, Any], stem: Path) -> None:
    """Do the rounds, and write the results after each."""
    levels = QUICK_TASKS if args.quick else NUM_TASKS
    plan = Plan(
        task_sets={name: read_tasks(DATA / TASK_SETS[name]) for name in args.only},
        num_tasks={level: levels.get(level, NUM_TASKS[level]) for level in args.concurrency or levels},
        rounds=args.rounds,
        minutes=args.minutes,
        seed=args.seed,
    )
    client = TaskClient(load_tokenizer(resolve_model(args.model or DEFAULT_MODEL).path))
    entries = make_entries(args.model, args.server_args, most_drafts=args.most_drafts)
    with Stage(entries, keeps_up=True) as stage:
        for entry in entries:
            stage.start(entry.name)

        def on_round(runs: Runs, limits: list[dict[str, float]]) -> None:
            made = {"machine": machine(), "servers": {entry.name: entry.as_json() for entry in entries}}
            document.update(
                stamp()
                | made
                | {"is_busy": args.busy, "limits": limits, "starts": stage.starts, "runs": runs}
            )
            report.write(document, stem, args.images_dir)

        run_rounds(stage, client, plan, on_round)


def check(args: argparse.Namespace, document: dict[str, Any], stem: Path) -> None:
    """Compare the tokens of all servers; exits with 1 where any differ."""
    sets = [read_tasks(DATA / TASK_SETS[name]) for name in args.only]
    num_tasks = 2 if args.quick else args.tasks
    tasks = [task for tasks in sets for task in draw_tasks(tasks, num_tasks, args.seed)]
    extra = f"{EXACT} {args.server_args}".strip()
    entries = make_entries(args.model, extra, most_drafts=args.most_drafts, dtype="float32")
    # Started one after another: five models in float32 take more memory than there may be.
    with Stage(entries, keeps_up=False) as stage:
        rows = equal.check_equal(stage, [entry.name for entry in entries], tasks)
    document["equality"] = stamp() | {
        "num_tasks": len(tasks),
        "concurrency": equal.CONCURRENCY,
        "rows": rows,
    }
    report.write(document, stem, args.images_dir)
    if any(row["different"] for row in rows):
        sys.exit("servers differ")


def load_document(stem: Path) -> dict[str, Any]:
    """Return what is saved of the day: each kind of run replaces its own part."""
    path = stem.with_name(stem.name + ".json")
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"equality": None, "runs": [], "remark": None} | saved


def stamp() -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": shlex.join(["python", "benchmarks/speculation_live.py", *sys.argv[1:]]),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TASK_SETS, default=list(TASK_SETS), help="sets of tasks")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", choices=NUM_TASKS, help=f"levels (default: {[*NUM_TASKS]})"
    )
    parser.add_argument("--rounds", type=int, help="interleaved rounds at most (default: 10)")
    parser.add_argument("--minutes", type=float, default=30.0, help="no round is begun that would end later")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="count rounds in which others took the processors; the page says so",
    )
    parser.add_argument("--quick", action="store_true", help="one short round, to try it out")
    parser.add_argument("--check-equal", action="store_true", help="compare tokens instead of times")
    parser.add_argument("--tasks", type=int, default=12, help="of each set that --check-equal compares")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the tasks")
    parser.add_argument("--model", help="of all servers (default: the embedded one)")
    parser.add_argument(
        "--most-drafts", type=int, metavar="K", help="of the adaptive server (default: its own)"
    )
    parser.add_argument("--server-args", default="", help="further flags of every server")
    parser.add_argument("--results-dir", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--images-dir", type=Path, default=REPOSITORY / "docs" / "images")
    parser.add_argument("--day", help="date in the names of the result files (default: today)")
    parser.add_argument("--render", action="store_true", help="only write that day's page again")
    parser.add_argument("--remark", help="with --render: a paragraph that the page begins with")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 10)
    return args


if __name__ == "__main__":
    main()
