"""Jobs on a live server on this machine: a planned call against a chain, and two policies under agents.

    python -m benchmarks.jobs.live [MODEL] [--write]

Each load goes to a server of its own by `onbeat bench serve`, which sends the jobs with their deadlines. The
first part sends chains of retrievals and plans of retrievals at three rates, both with the same deadline. The
second part sends agents at two rates, to `slo` and to `sarathi`, which serves by arrival and knows no
deadlines. A job is kept if its last answer is whole by its deadline, by the client's clock.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.pages import machine, markdown_table, publish, show
from benchmarks.harness.servers import server

FLAGS = ("--max-num-seqs", "32", "--max-model-len", "8192")
DEADLINE_MS = 20_000
"""Of retrievals; agents have 3, 5 or 8 times what their tokens take alone."""


class Load(NamedTuple):
    kind: str
    rate: float
    """Jobs a second."""
    num_jobs: int
    policy: str = "slo"


RETRIEVALS = [
    Load(kind, rate, num_jobs)
    for rate, num_jobs in ((0.15, 8), (0.5, 24), (0.9, 32))
    for kind in ("retrieval-chain", "retrieval-plan")
]
AGENTS = [
    Load("agents", rate, num_jobs, policy)
    for rate, num_jobs in ((0.1, 16), (0.25, 32))
    for policy in ("slo", "sarathi")
]


def measure(model: list[str], load: Load) -> dict[str, Any]:
    """Return what became of the jobs of a load, as `onbeat bench serve` saves it."""
    with server(model, ["--policy", load.policy, *FLAGS]) as url, tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "result.json"
        command = [sys.executable, "-m", "onbeat.cli.main", "bench", "serve", "--base-url", url]
        command += ["--backend", "openai-chat", "--dataset-name", load.kind, "--ignore-eos", "--disable-tqdm"]
        command += ["--num-prompts", str(load.num_jobs), "--request-rate", str(load.rate)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", saved.name]
        if load.kind != "agents":
            command += ["--job-deadline-ms", str(DEADLINE_MS)]
        subprocess.run(command, check=True, capture_output=True)
        document = json.loads(saved.read_text(encoding="utf-8"))
    return {**document["jobs"][load.kind], "num_calls": document["completed"]}


def row(load: Load, found: dict[str, Any]) -> list[Any]:
    return [
        f"{load.kind}, {load.rate:g}/s, {load.policy}",
        f"{found['kept']} of {found['offered']}",
        found["late"],
        found["lost"],
        None if found["median_job_ms"] is None else found["median_job_ms"] / 1e3,
        found["num_calls"] / found["offered"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help="MODEL and flags of the server (default: the embedded one)")
    parser.add_argument("--only", choices=("retrievals", "agents"))
    parser.add_argument("--write", action="store_true", help="write the page under today's date")
    args = parser.parse_args()
    loads = {"retrievals": RETRIEVALS, "agents": AGENTS}.get(args.only, RETRIEVALS + AGENTS)
    rows = []
    for load in loads:
        rows.append(row(load, measure(args.model, load)))
        print(*map(show, rows[-1]), sep="  ", flush=True)
    header = ("load", "kept", "late", "lost", "P50 of a job, s", "answers for each job")
    text = (
        f"# Jobs on a live server\n\n    python -m benchmarks.jobs.live {shlex.join(sys.argv[1:])}\n\n"
        f"{machine()}, SmolLM2-135M unless MODEL is given.\n\n{markdown_table(header, rows)}\n"
    )
    publish(text, "jobs-live", write=args.write)


if __name__ == "__main__":
    main()
