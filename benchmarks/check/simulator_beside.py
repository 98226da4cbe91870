"""How fast the simulator is beside another version of it: two processes take turns on one core.

    git worktree add ../other COMMIT
    python -m benchmarks.check.simulator_beside --tree ../other --shared DIR [--policy slo [--objectives]]

A run of the simulator scatters by a third on a shared host, since others take its caches and its clock for
seconds at a time; two processes that take turns of a tenth of a second are slowed alike. In a turn each
simulates the first requests of the trace of `simulator_speed.py` once, with this version's set-up; CPU
seconds count. The ratio is the median over turns, then over starts of the two processes, whose memory lies
elsewhere each time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.check.simulator_speed import make_replica, read_load, under_slo
from benchmarks.harness.pages import REPOSITORY, middle
from onbeat.core.slo import SLO
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.slo_classes import SLOClass

OBJECTIVE = SLOClass(name="all", slo=SLO(ttft=1.0, tbt=0.1))
LAST_CORE = max(os.sched_getaffinity(0))


def work(shared: Path, num_requests: int, policy: str, *, has_objectives: bool) -> None:
    """Simulate once for each line that comes, and answer with the CPU seconds that it took."""
    scheduler, step_time = make_replica()
    load = read_load(shared).take(np.arange(num_requests))
    if has_objectives:
        load = load.with_classes([OBJECTIVE], seed=0)
    config = SimulationConfig(scheduler=under_slo(scheduler) if policy == "slo" else scheduler)
    for _ in sys.stdin:
        before = time.process_time()
        simulate(load, config, step_time)
        print(time.process_time() - before, flush=True)


class Worker:
    """One version in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self) -> float:
        """Return the CPU seconds of one more simulation."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a version cannot run the simulation; see above")
        return float(answer)


@contextmanager
def started(tree: Path, args: argparse.Namespace) -> Iterator[Worker]:
    """Yield a worker with the package of a checkout."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.check.simulator_beside",
        "--work",
        "--shared",
        str(args.shared),
        "--requests",
        str(args.requests),
        "--policy",
        args.policy,
        *(["--objectives"] if args.objectives else []),
    ]
    # The threads of BLAS wait in a loop, which counts as CPU time.
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
    ) as process:
        os.sched_setaffinity(process.pid, {LAST_CORE})
        yield Worker(process)
        assert process.stdin is not None
        process.stdin.close()


def ratio(args: argparse.Namespace) -> float:
    """Return how often faster this version is, of one start of both."""
    with ExitStack() as stack:
        other, this = (stack.enter_context(started(tree, args)) for tree in (args.tree.resolve(), REPOSITORY))
        other.run(), this.run()  # the first is slower: caches, specialised bytecode
        pairs = []
        for turn in range(args.turns):
            if turn % 2:
                seconds = other.run()
                pairs.append(seconds / this.run())
            else:
                seconds = this.run()
                pairs.append(other.run() / seconds)
        return median(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, help="a checkout of the other version")
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--requests", type=int, default=400, help="of the trace, in each turn")
    parser.add_argument("--policy", choices=("sarathi", "slo"), default="sarathi")
    parser.add_argument("--objectives", action="store_true", help="each request has one, of 1 s and 100 ms")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared or set ONBEAT_SHARED: the folder with data/traces")
    if args.work:
        work(Path(args.shared), args.requests, args.policy, has_objectives=args.objectives)
        return
    if args.tree is None:
        parser.error("give --tree: a checkout of the version to compare with")
    ratios = [ratio(args) for _ in range(args.starts)]
    print(f"speed beside {args.tree}: {middle(ratios)} times, {args.starts} starts of {args.turns} turns")


if __name__ == "__main__":
    main()
