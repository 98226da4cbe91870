"""What all studies share: options, objectives, servers, the order of turns."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.pages import REPOSITORY
from benchmarks.serve.slo_live.load import Client
from benchmarks.serve.slo_live.page import StudyPage
from benchmarks.serve.slo_live.servers import ServerSpec, busy_share, onbeat_spec
from onbeat.bench.bench_config import SEND_SLO
from onbeat.core.slo import SLO_MODES

TBT_STEPS, TTFT_STEPS = 4, 40
"""Objectives in decode steps at batch 8."""
START_SECONDS, TAIL_SECONDS = 12, 6
"""About what a start of a server and the ends of a run take; only for the printed time budget."""
NOISY_SHARE = 0.1


@dataclass(frozen=True)
class Objectives:
    """Of every request, seconds."""

    ttft: float
    tbt: float

    def __str__(self) -> str:
        return f"TTFT {self.ttft * 1e3:.0f} ms, TBT {self.tbt * 1e3:.0f} ms"


@dataclass(frozen=True)
class Context:
    """A study's surroundings."""

    args: argparse.Namespace
    client: Client
    page: StudyPage

    @property
    def objectives(self) -> Objectives:
        """The objectives given, else those that `measure` has found."""
        found = self.page.read("measure")
        ttft_ms = self.args.ttft_ms or found.get("ttft_ms")
        tbt_ms = self.args.tbt_ms or found.get("tbt_ms")
        if ttft_ms is None or tbt_ms is None:
            sys.exit("run the study `measure` first, or give --ttft-ms and --tbt-ms")
        return Objectives(ttft_ms / 1e3, tbt_ms / 1e3)

    @property
    def decode_step(self) -> float:
        """Decode step at batch 8 that the objectives are multiples of, seconds."""
        return self.objectives.tbt / TBT_STEPS

    @property
    def budget(self) -> int:
        """Token budget of sarathi: the one given, else the best one that `capacity` has found."""
        found: int | None = self.args.budget or self.page.read("capacity").get("best_budget")
        if found is None:
            sys.exit("run the study `capacity` first, or give --budget")
        return found

    def capacity(self, policy: str) -> float:
        """Requests per second that `capacity` has found for a policy, or --capacity."""
        found: float | None = self.args.capacity or self.page.read("capacity").get(f"{policy}_capacity")
        if found is None:
            sys.exit("run the study `capacity` first, or give --capacity")
        return found

    def slo_server(self, *flags: str) -> ServerSpec:
        own = [*shlex.split(self.args.slo_args), *flags]
        return self._onbeat("slo", self.args.slo_policy, own)

    def sarathi_server(self, budget: int, *flags: str, name: str | None = None) -> ServerSpec:
        return self._onbeat(name or "sarathi", "sarathi", ["--max-num-batched-tokens", str(budget), *flags])

    def _onbeat(self, name: str, policy: str, flags: Sequence[str]) -> ServerSpec:
        common = ["--max-num-seqs", str(self.args.max_num_seqs), "--slo-mode", self.client.slo_mode]
        common += shlex.split(self.args.server_args)
        return onbeat_spec(name, policy, [*common, *flags], model=self.args.model)

    def seconds(self, default: float) -> float:
        """Return how long a run lasts: the option, the default, or little in a quick trial."""
        chosen: float = self.args.run_seconds or (6.0 if self.args.quick else default)
        return chosen

    @property
    def rounds(self) -> int:
        chosen: int = self.args.rounds or (1 if self.args.quick else 3)
        return chosen

    def announce(self, *, num_starts: int, run_seconds: Sequence[float]) -> None:
        """Print how long the study will take, and whether somebody else is using the machine."""
        total = START_SECONDS * num_starts + sum(seconds + TAIL_SECONDS for seconds in run_seconds)
        print(
            f"{self.args.study}: {num_starts} servers, {len(run_seconds)} runs, about {total / 60:.1f} min",
            flush=True,
        )
        self.page.busy_share = busy_share()
        if self.page.busy_share > NOISY_SHARE:
            print(f"warning: others use {self.page.busy_share:.0%} of this machine's CPU time", flush=True)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="one short round, to try the study out")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3)")
    parser.add_argument("--run-seconds", type=float, help="arrivals of one run (default: the study's own)")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each round has its own")
    parser.add_argument("--level", type=float, default=0.9, help="attainment that makes a capacity")
    parser.add_argument("--model", help="model of onbeat serve (default: the embedded one)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of every server")
    parser.add_argument("--server-args", default="", help="further flags of every onbeat server")
    parser.add_argument("--slo-args", default="", help="further flags of the server with deadlines")
    parser.add_argument("--slo-policy", default="slo", help="its policy")
    parser.add_argument("--budget", type=int, help="token budget of sarathi (default: found by capacity)")
    parser.add_argument("--capacity", type=float, help="requests/s (default: found by capacity)")
    parser.add_argument("--ttft-ms", type=float, help=f"objective (default: {TTFT_STEPS} decode steps)")
    parser.add_argument("--tbt-ms", type=float, help=f"objective (default: {TBT_STEPS} decode steps)")
    parser.add_argument("--slo-mode", choices=SLO_MODES, default="stream")
    parser.add_argument("--send-slo", choices=SEND_SLO, default="auto")
    parser.add_argument("--results-dir", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--images-dir", type=Path, default=REPOSITORY / "docs" / "images")
    parser.add_argument("--day", help="date in the names of the result files (default: today)")


def make_context(args: argparse.Namespace) -> Context:
    return Context(
        args=args,
        client=Client(send_slo=args.send_slo, slo_mode=args.slo_mode),
        page=StudyPage(args.results_dir, args.images_dir, day=args.day),
    )
