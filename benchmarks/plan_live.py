#!/usr/bin/env python3
"""Whether live fleets keep what was planned for them: planned, served and held to it, one after the other.

    python benchmarks/plan_live.py --out FOLDER              # a quarter of an hour, with nothing beside it
    python benchmarks/plan_live.py --out FOLDER --only "2 GPUs" "1 CPU engine"
    python benchmarks/plan_live.py --out FOLDER --seconds 5  # a trial of the script: it says nothing of plans

Stand-ins of Llama-3.1-8B on 2, 3 and 6 GPUs of two kinds, and the CPU engine with its embedded model on 1 and
2 replicas. Each promise is planned with the headroom of a careful user: 20 % on GPUs, and 40 % where engines
share their cores with the server and the client of the test.

1. `onbeat plan` with bare step times; of the CPU those of `onbeat profile`, with one thread a replica.
2. That fleet is served, and a short load says how much longer its tokens take than planned: the time of the
   host. Nothing else of this load is used.
3. `onbeat plan` once more with that time in each step (`--host-overhead-ms`).
4. That fleet is served, and `onbeat bench serve --check-plan` holds it to the promise.

The table has what step 3 planned and step 4 measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness.fleet import ONBEAT, serving
from harness.pages import git_commit, machine, markdown_table

from onbeat.hub.known import DEFAULT_MODEL
from onbeat.hub.resolve import resolve_model

SHORT_SECONDS, CHECK_SECONDS = 15.0, 60.0
"""Of the load that tells the time of the host, and of the check."""
BROKEN = 3
"""Exit code of a plan that cannot be, and of a promise that was not kept."""
FEWEST = 60
"""Requests of either: a share of fewer says little."""
HEADER = (
    *("GPUs or engines", "fleet", "requests/s", "host, ms a step", "headroom", "planned", "interval"),
    *("measured", "interval", "promise", "TPOT planned, ms", "measured, ms", "load average", "seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A promise, and on what it may be kept."""

    gpus: str
    rate: float
    """Promised, requests per second; of CPU engines, times what one of them keeps up."""
    headroom: float = 20.0
    """Per cent."""

    @property
    def is_cpu(self) -> bool:
        return self.gpus.startswith("cpu")


TRIALS = {
    "2 GPUs": Trial(gpus="a10g=1,l4=1", rate=3.1),
    "3 GPUs": Trial(gpus="a10g=1,l4=2", rate=5.1),
    "6 GPUs": Trial(gpus="a10g=2,l4=4", rate=11.6),
    "1 CPU engine": Trial(gpus="cpu=1", rate=0.4, headroom=40.0),
    "2 CPU engines": Trial(gpus="cpu=2", rate=0.85, headroom=40.0),
}
"""With these rates no smaller fleet keeps the promise with its headroom."""

SEARCH = ["--tp", "1", "--repeats", "2", "--candidates", "4", "--jobs", "2", "--disable-tqdm"]
GPU_LOAD = [
    *("--model", "meta-llama/Llama-3.1-8B", "--max-num-seqs", "4", "--max-model-len", "4096"),
    *("--dataset-name", "random", "--input-len", "200", "--output-len", "32"),
    *("--slo-ttft-ms", "1500", "--slo-tbt-ms", "150"),
]
CPU_LIMITS = ["--max-num-seqs", "8", "--max-model-len", "2048"]
CPU_LOAD = [
    *("--model", DEFAULT_MODEL, "--step-time", "fitted", *CPU_LIMITS),
    *("--dataset-name", "random", "--input-len", "100", "--output-len", "32"),
    *("--slo-ttft-ms", "2000", "--slo-tbt-ms", "200"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a load test said of a promise."""

    share: float
    """Of good requests, per cent."""
    interval: str
    num_requests: int
    tpot: float
    """Mean of the requests, ms."""


def onbeat(*flags: str | Path) -> tuple[str, bool]:
    """Run a command and show what it says; return that, and whether a promise can be kept, or was."""
    print("$ onbeat", *flags, flush=True)
    command = [*ONBEAT, *map(str, flags)]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE)
    print(done.stdout, flush=True)
    if done.returncode not in (0, BROKEN):
        raise SystemExit(f"onbeat {flags[0]} ended with {done.returncode}")
    return done.stdout, done.returncode == 0


class Checks:
    """Carries out trials in a folder.

    Parameters
    ----------
    seconds : of each check.
    """

    def __init__(self, folder: Path, *, seconds: float, port: int) -> None:
        self._folder = folder
        self._seconds = seconds
        self._port = port
        self._profile = folder / "cpu.profile.json"
        self._prices = folder / "cpu.prices.yaml"
        self._one_cpu: float | None = None
        """What one CPU engine keeps up, requests/s."""

    def run(self, name: str, trial: Trial) -> list[str]:
        """Return the row of a trial."""
        begun = time.monotonic()
        rate = trial.rate * (self._rate_of_one_cpu() if trial.is_cpu else 1.0)
        bare, plan = (self._folder / f"{name.replace(' ', '-')}{kind}.yaml" for kind in (".bare", ""))
        overhead = 0.0
        is_feasible = self._plan(bare, trial, rate, overhead)
        if is_feasible:
            short = self._check(bare, trial, rate, min(SHORT_SECONDS, self._seconds), seed=1)
            overhead = max(0.0, short.tpot - section(bare)["verified"]["mean-tpot-ms"])
            is_feasible = self._plan(plan, trial, rate, overhead)
        if not is_feasible:
            row = [name, "INFEASIBLE", f"{rate:.2f}", f"{overhead:.2f}"]
            return row + ["-"] * (len(HEADER) - len(row))
        before = os.getloadavg()[0]
        check = self._check(plan, trial, rate, self._seconds, seed=2)
        loads = f"{before:.1f} to {os.getloadavg()[0]:.1f}"
        return [name, *cells(section(plan), check, overhead), loads, f"{time.monotonic() - begun:.0f}"]

    def _plan(self, plan: Path, trial: Trial, rate: float, overhead: float) -> bool:
        """Write a plan; return whether there is one."""
        flags = [*(self._cpu_load() if trial.is_cpu else GPU_LOAD), *SEARCH, "--gpus", trial.gpus]
        flags += ["--rate", f"{rate:.3f}", "--headroom", f"{trial.headroom:g}", "-o", plan]
        flags += ["--num-prompts", str(self._size(rate, self._seconds))]
        return onbeat("plan", *flags, "--host-overhead-ms", f"{overhead:.3f}")[1]

    def _check(self, plan: Path, trial: Trial, rate: float, seconds: float, *, seed: int) -> Check:
        """Serve a plan and send its load."""
        tokenizer = resolve_model(DEFAULT_MODEL).path
        flags: list[str | Path] = ["--load-format", "stand-in", "--device", "l4", "--tokenizer", tokenizer]
        if trial.is_cpu:
            flags = ["--threads", "1", "--step-time-profile", self._profile]
        test = ["--num-prompts", str(self._size(rate, seconds)), "--seed", str(seed), "--disable-tqdm"]
        details: list[str | Path] = ["--json", plan.with_suffix(".json"), "--save-detailed"]
        arguments = ["--config", str(plan), *map(str, flags)]
        with serving(arguments, self._port, log=plan.with_suffix(".log")) as fleet:
            said, _ = onbeat("bench", "serve", "--check-plan", plan, "--base-url", fleet.url, *test, *details)
        return read_check(said)

    def _size(self, rate: float, seconds: float) -> int:
        return max(FEWEST, round(rate * seconds))

    def _cpu_load(self) -> list[str | Path]:
        """Return the load of a CPU engine, and how long its steps take."""
        if not self._prices.exists():
            self._prices.write_text("cpu: {usd_per_hour: 0.05, watts: 30, date: 2026-11, source: made up}\n")
        if not self._profile.exists():
            flags = [*CPU_LIMITS, "--threads", "1", "--seconds", "15", "--quiet"]
            onbeat("profile", DEFAULT_MODEL, *flags, "--output", self._profile)
        precision = json.loads(self._profile.read_text())["key"]["precision"]
        return [
            *CPU_LOAD,
            "--dtype",
            precision["weights"],
            "--profile",
            self._profile,
            "--prices",
            self._prices,
        ]

    def _rate_of_one_cpu(self) -> float:
        if self._one_cpu is None:
            plan = self._folder / "one-cpu.yaml"
            if not self._plan(plan, Trial(gpus="cpu=1", rate=1.0, headroom=0.0), 0.5, 0.0):
                raise SystemExit("one CPU engine does not keep up half a request per second")
            self._one_cpu = float(section(plan)["verified"]["capacity"][0])
        return self._one_cpu


def section(plan: Path) -> dict[str, Any]:
    """Return what a plan file says of its promise."""
    found: dict[str, Any] = yaml.safe_load(plan.read_text())["plan"]
    return found


def read_check(said: str) -> Check:
    """Return what `--check-plan` has said."""
    good = re.search(r"([\d.]+) % of ([\d,]+) requests were good \(([\d.]+ to [\d.]+) at", said)
    pace = re.search(r"mean TPOT ([\d.]+) ms", said)
    if good is None or pace is None:
        raise SystemExit("the load test said nothing of the promise")
    return Check(
        share=float(good[1]),
        num_requests=int(good[2].replace(",", "")),
        interval=good[3],
        tpot=float(pace[1]),
    )


def cells(plan: dict[str, Any], check: Check, overhead: float) -> list[str]:
    """Return what a row says of a plan and its check."""
    planned, low, high = (share * 100 for share in plan["verified"]["attainment"])
    promise = plan["promise"]
    missed = promise["attainment"] * 100 - check.share
    return [
        plan["fleet"],
        f"{promise['request-rate']:g}",
        f"{overhead:.2f}",
        f"{promise['headroom']:g} %",
        f"{planned:.1f} %",
        f"{low:.1f} to {high:.1f}",
        f"{check.share:.1f} % of {check.num_requests}",
        check.interval,
        f"broken by {missed:.1f} points" if missed > 0 else "kept",
        f"{plan['verified']['mean-tpot-ms']:.2f}",
        f"{check.tpot:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="plans, logs, runs, table")
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--seconds", type=float, default=CHECK_SECONDS, help="of each check")
    parser.add_argument("--port", type=int, default=8973)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    checks = Checks(args.out, seconds=args.seconds, port=args.port)
    rows = []
    for name in args.only:
        rows.append(checks.run(name, TRIALS[name]))
        text = f"{machine()}, commit {git_commit()}\n\n{markdown_table(HEADER, rows)}\n"
        (args.out / "table.md").write_text(text, encoding="utf-8")
        print(text, flush=True)


if __name__ == "__main__":
    main()
