"""The same requests through the engine and through the simulator: how far apart are their latencies?

    python -m benchmarks.check.engine_vs_simulator [MODEL] --rounds 3 --json FILE

First a profile of the model on this machine (or `--profile FILE`), then the capacity: requests a second
while the queue is never empty. Then, round by round, a Poisson load at 60 % and at 85 % of it: each runs live
with a record, then in the simulator with the host overhead of the capacity run and the step times

* `profile`: of the profile as it is;
* `corrected`: of the profile, corrected online by all runs *before* this one, as the model of a server that
  has been up for some minutes is;
* `recorded`: of its own record.

All times are the engine's own. Needs a quiet machine. The exit code is 1 if `corrected` or `recorded` miss.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onbeat.core.options import change, make
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.core import EngineCore
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.profiling.profiler import FULL, profile_model
from onbeat.engine.start import build_engine, prepare
from onbeat.hub.known import DEFAULT_MODEL
from onbeat.hub.resolve import resolve_model
from onbeat.perfmodel.profile import write_profile
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.decisions import Replay, scheduler_config
from onbeat.simulator.replay.forecast import Forecast, forecast_with_model, forecast_with_recorded_times
from onbeat.simulator.replay.history import RunHistory, read_history
from onbeat.simulator.replay.model import learning_model

SHARES = (0.6, 0.85)
TOLERANCES = {
    (0.6, "profile"): {50.0: 0.10, 99.0: 0.25},
    (0.85, "profile"): {50.0: 0.20, 99.0: 0.35},
    (0.6, "corrected"): {50.0: 0.10, 99.0: 0.25},
    (0.85, "corrected"): {50.0: 0.20, 99.0: 0.35},
    (0.6, "recorded"): {50.0: 0.05, 99.0: 0.10},
    (0.85, "recorded"): {50.0: 0.05, 99.0: 0.10},
}
"""(share of capacity, step times) -> percentile -> allowed relative error. Queueing multiplies a small bias
of the step times, the more the higher the load."""
METRICS = {"ttft": "TTFT", "itl": "TBT"}
PROMPT_TOKENS = (100, 600)
OUTPUT_TOKENS = (20, 100)
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Load:
    """Requests in the order of arrival."""

    arrivals: np.ndarray
    num_prompt_tokens: np.ndarray
    num_output_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.arrivals)


def make_load(number: int, rate: float, seed: int) -> Load:
    """Return log-normal lengths, cut to ranges that suit a small machine, and Poisson arrivals."""
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(np.log(220), 0.5, number).clip(*PROMPT_TOKENS).astype(int)
    outputs = rng.lognormal(np.log(45), 0.5, number).clip(*OUTPUT_TOKENS).astype(int)
    gaps = rng.exponential(1 / rate, number) if np.isfinite(rate) else np.zeros(number)
    return Load(gaps.cumsum(), prompts, outputs)


def run_live(config: EngineConfig, load: Load, record: Path, seed: int) -> None:
    """Serve a load in real time, with a record."""
    core, info = build_engine(change(config, record=record), lambda _: None)
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, info.vocab_size, length).tolist()) for length in load.num_prompt_tokens]
    serve(core, load, prompts)
    core.shutdown()


def serve(core: EngineCore, load: Load, prompts: Sequence[tuple[int, ...]]) -> None:
    """Run the step loop as the engine's process does: look for requests, step, sleep when idle."""
    start, next_index = time.monotonic() + 0.1, 0
    while next_index < len(load) or core.has_work:
        now = time.monotonic()
        if not core.has_work and start + load.arrivals[next_index] > now:
            time.sleep(start + load.arrivals[next_index] - now)
            continue
        while next_index < len(load) and start + load.arrivals[next_index] <= now:
            request = Request(
                request_id=str(next_index),
                prompt_token_ids=prompts[next_index],
                sampling=SamplingParams(temperature=0.0, max_tokens=int(load.num_output_tokens[next_index])),
                arrival=start + float(load.arrivals[next_index]),
            )
            core.add(request)
            next_index += 1
        core.step()


def measure_capacity(config: EngineConfig, number: int, directory: Path) -> tuple[float, RunHistory]:
    """Return requests a second while the queue is never empty, and what happened."""
    record = directory / "capacity.gz"
    run_live(config, make_load(number, float("inf"), seed=99), record, seed=99)
    history = read_history(Recording(record))
    ends = sorted(request.record.end for request in history.requests)
    low, high = int(0.15 * number), int(0.8 * number)
    return (high - low) / (ends[high] - ends[low]), history


def step_time_errors(history: RunHistory, model: StepTimeModel) -> dict[str, float]:
    """Return how well a model tells the steps of a run."""
    predicted = np.array([model.step_time(step.shape) for step in history.steps])
    measured = np.array([step.seconds for step in history.steps])
    errors = np.abs(predicted / measured - 1)
    return {
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "bias": float(predicted.sum() / measured.sum() - 1),
    }


def errors_of(forecast: Forecast) -> dict[str, dict[str, float]]:
    return {
        f"{METRICS[error.metric]} P{error.percentile:g}": {
            "measured_ms": error.measured * 1e3,
            "simulated_ms": error.simulated * 1e3,
            "error": error.relative_error,
        }
        for error in forecast.errors
        if error.metric in METRICS
    }


def learn(model: StepTimeModel, history: RunHistory) -> None:
    """Correct a model by the steps of a run."""
    for step in history.steps:
        model.observe(step.shape, step.seconds)


def compare(
    recording: Recording, history: RunHistory, host_overhead: float, corrected: StepTimeModel
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Any]]:
    """Simulate a recorded run; return the errors by source of the step times, and what else is to be told."""
    model = learning_model(recording.header)
    assert model is not None, "the engine had no profile"
    identity = Replay(recording, learning_model(recording.header)).run()
    if not identity.is_identical:
        sys.exit(f"the replay of a record differs: {identity.difference}")
    config = scheduler_config(recording.header)
    recorded = forecast_with_recorded_times(recording, history, config)
    profile = forecast_with_model(recording, history, config, model, host_overhead=host_overhead)
    learned = forecast_with_model(recording, history, config, corrected, host_overhead=host_overhead)
    about = {
        "num_requests": recorded.num_requests,
        "num_steps": identity.num_steps,
        "num_predictions": identity.num_predictions,
        "num_matched_steps": recorded.num_matched_steps,
        "step_time_errors": step_time_errors(history, model),
        "corrected_step_time_errors": step_time_errors(history, corrected),
        "host_overhead_ms": history.host_overhead * 1e3,
    }
    errors = {"profile": profile, "corrected": learned, "recorded": recorded}
    return {source: errors_of(forecast) for source, forecast in errors.items()}, about


def make_profile(config: EngineConfig, path: Path) -> None:
    """Do what `onbeat profile` does."""
    profile = profile_model(prepare(config).load(lambda _: None), FULL).profile
    write_profile(path, profile)
    print(f"profile: {profile.fitted.method} fit, {profile.fitted.errors}", flush=True)


def summarise(rounds: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the median error of each figure over the rounds, and whether all are tolerable."""
    rows = []
    for (share, source), tolerances in TOLERANCES.items():
        runs = [each["errors"][source] for each in rounds if each["share"] == share]
        for name in runs[0]:
            p = float(name.rpartition("P")[2])
            errors = [run[name]["error"] for run in runs]
            error = statistics.median(errors)
            rows.append(
                {
                    "share": share,
                    "step_times": source,
                    "metric": name,
                    "measured_ms": statistics.median(run[name]["measured_ms"] for run in runs),
                    "simulated_ms": statistics.median(run[name]["simulated_ms"] for run in runs),
                    "error": error,
                    "errors": errors,
                    "tolerance": tolerances.get(p),
                    "is_within": p not in tolerances or abs(error) <= tolerances[p],
                }
            )
    return rows, all(row["is_within"] for row in rows if row["step_times"] != "profile")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| load | step times | metric | measured (ms) | simulated (ms) | error | rounds | allowed |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- | ---: |")
    for row in rows:
        spread = ", ".join(f"{error:+.1%}" for error in row["errors"])
        allowed = "" if row["tolerance"] is None else f"{row['tolerance']:.0%}"
        verdict = "" if row["is_within"] else " MISSED"
        print(
            f"| {row['share']:.0%} | {row['step_times']} | {row['metric']} | {row['measured_ms']:.1f} | "
            f"{row['simulated_ms']:.1f} | {row['error']:+.1%} | {spread} | {allowed}{verdict} |"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each live run")
    parser.add_argument("--profile", type=Path, help="of `onbeat profile`; without, one is made")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one round of 15 s, for a look")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=Path, help="directory that keeps the records")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 15.0
    return args


def main() -> int:
    args = parse_args()
    config = make(
        EngineConfig,
        model=resolve_model(args.model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=args.max_num_seqs,
        threads=args.threads,
        policy="sarathi",
        step_time_profile="none",
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.records or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        capacity, history = measure_capacity(config, 24 if args.quick else 60, directory)
        overhead = history.host_overhead
        print(f"capacity {capacity:.3f} requests/s, host overhead {overhead * 1e3:.2f} ms a step", flush=True)
        profile = args.profile or directory / "profile.json"
        if args.profile is None:
            make_profile(config, profile)
        profiled = change(config, step_time_profile=str(profile))
        rounds = []
        corrected: StepTimeModel | None = None
        for index in range(args.rounds):
            for share in SHARES:
                rate = share * capacity
                load = make_load(max(round(rate * args.seconds), 8), rate, seed=index)
                record = directory / f"round-{index}-{share:.0%}.gz"
                run_live(profiled, load, record, seed=index)
                recording = Recording(record)
                run = read_history(recording)
                if corrected is None:
                    corrected = learning_model(recording.header)
                    assert corrected is not None, "the engine had no profile"
                    learn(corrected, history)
                errors, about = compare(recording, run, overhead, corrected)
                learn(corrected, run)
                rounds.append({"round": index, "share": share, "rate": rate, "errors": errors, **about})
                print(f"round {index}, {share:.0%} ({rate:.2f}/s): {about}", flush=True)
    rows, is_within = summarise(rounds)
    print_table(rows)
    if args.json:
        found = {
            "command": shlex.join(["python", *sys.argv]),
            "capacity": capacity,
            "host_overhead_ms": overhead * 1e3,
            "rows": rows,
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
