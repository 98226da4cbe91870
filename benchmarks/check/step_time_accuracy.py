"""How well step-time models predict what they have not seen: published measurements, in Markdown tables.

    python -m benchmarks.check.step_time_accuracy --shared DIRECTORY [--only grid sarathi cost]

DIRECTORY (or the variable ONBEAT_SHARED) has `data/profiles` with

- `sarathi/`: batches of microsoft/sarathi-serve (Agrawal et al., OSDI 2024), Yi-34B on two A100,
- `aic_step_grid.csv`: step times of 19 deployments as NVIDIA's aiconfigurator computes them.

Errors are absolute and relative. Every split is drawn by a stated seed; nothing is tuned to a split.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.check.roofline_accuracy import DEVICES, MODELS
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import DeviceSpec, Parallelism, find_device
from onbeat.perfmodel.fitted import FitErrors, FitTarget, make_form
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import OnlineCorrection, Predictor, ResidualModel
from onbeat.perfmodel.recent import DriftAlarm
from onbeat.perfmodel.roofline import make_roofline, roofline_seconds
from onbeat.perfmodel.shapes import ShapeRange, shape_matrix

SEEDS = range(5)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table."""

    label: str
    errors: FitErrors


# The roofline against a grid of 19 deployments


@dataclass(frozen=True, slots=True)
class GridCase:
    """One deployment of the grid."""

    label: str
    model: ModelSpec
    device: DeviceSpec
    parallelism: Parallelism
    precision: Precision
    matrix: NDArray[np.float64]
    seconds: NDArray[np.float64]


def grid_cases(profiles: Path) -> Iterator[GridCase]:
    """Read the grid, without the batches that would not fit into the device's memory."""
    with (profiles / "aic_step_grid.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["fits"] == "1"]
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in ("model", "precision", "gpu", "tp", "backend"))].append(row)
    for (model, precision, gpu, tensor, backend), group in groups.items():
        yield GridCase(
            label=f"{model} {precision} {gpu} TP {tensor} {backend}",
            model=find_model_spec(MODELS[model]),
            device=find_device(DEVICES[gpu]),
            parallelism=Parallelism(tensor=int(tensor)),
            precision=Precision("fp8", "fp8", "fp8") if precision == "fp8" else Precision(),
            matrix=shape_matrix(grid_shape(row) for row in group),
            seconds=np.array([float(row["latency_ms"]) / 1e3 for row in group]),
        )


def grid_shape(row: dict[str, str]) -> BatchShape:
    """Return the batch of one row."""
    shape = BatchShape()
    for _ in range(int(row["prefill_seqs"])):
        shape.add(int(row["prefill_prefix"] or 0), int(row["prefill_tokens_per_seq"]), samples=True)
    for _ in range(int(row["decode_seqs"])):
        shape.add(int(row["decode_context"]) - 1, 1, samples=True)
    return shape


def grid_lines(profiles: Path) -> tuple[list[Line], list[Line]]:
    """Return the errors by deployment, from data sheets and calibrated on a tenth (pooled over the seeds)."""
    uncalibrated, calibrated = [], []
    for case in grid_cases(profiles):
        target = FitTarget(
            model=case.model, device=case.device, parallelism=case.parallelism, precision=case.precision
        )
        form, sheet = make_form("roofline", target), roofline_seconds(case.matrix, target)
        uncalibrated.append(Line(case.label, FitErrors.of(sheet, case.seconds)))
        predicted, measured = [], []
        for seed in SEEDS:
            order = np.random.default_rng(seed).permutation(len(case.seconds))
            train, test = np.split(order, [round(0.1 * len(order))])
            parameters = form.fit(case.matrix[train], case.seconds[train])
            predicted.append(form.predict(case.matrix[test], parameters))
            measured.append(case.seconds[test])
        errors = FitErrors.of(np.concatenate(predicted), np.concatenate(measured))
        calibrated.append(Line(case.label, errors))
    return uncalibrated, calibrated


# Sarathi-Serve's batches


@dataclass(frozen=True, slots=True)
class Batch:
    """One measured batch and its predictions, seconds."""

    label: str
    measured: float
    uncalibrated: float
    calibrated: float


_DECODE_CONTEXT = 1024  # not published; a tenth of a millisecond of these steps hangs on it


def sarathi_batches(profiles: Path) -> list[Batch]:
    """Predict Table 2 of Yi-34B on two A100, calibrated on its two pure batches; the hybrid one is held back.

    The repository has a sweep of sizes too (`figure-2`), but of another run: there 4 decodes take 48.8 ms,
    here 68.1 ms, so that no model can meet both.
    """
    path = profiles / "sarathi" / "yi34b_tp2_a100_table-2_results.csv"
    columns = ("batch_num_prefill_tokens", "batch_num_decode_tokens")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    sizes = [tuple(int(row[column]) for column in columns) for row in rows]
    matrix = shape_matrix(_hybrid(num_prefill, num_decodes) for num_prefill, num_decodes in sizes)
    measured = np.array([float(row["batch_execution_time"]) / 1e3 for row in rows])
    model, device, parallelism = find_model_spec("Yi-34B"), find_device("a100-80-sxm"), Parallelism(tensor=2)
    target = FitTarget(model=model, device=device, parallelism=parallelism)
    form = make_form("roofline", target)
    sheet = roofline_seconds(matrix, target)
    is_pure = np.array([0 in size for size in sizes])
    fitted = form.predict(matrix, form.fit(matrix[is_pure], measured[is_pure]))
    return [
        Batch(f"{size[0]} prompt tokens, {size[1]} decodes", *(float(value) for value in values))
        for size, *values in zip(sizes, measured, sheet, fitted, strict=True)
    ]


def _hybrid(num_prefill: int, num_decodes: int) -> BatchShape:
    shape = BatchShape()
    if num_prefill:
        shape.add(0, num_prefill, samples=True)
    for _ in range(num_decodes):
        shape.add(_DECODE_CONTEXT - 1, 1, samples=True)
    return shape


# What a prediction costs


def costs_us() -> dict[str, float]:
    """Return microseconds of one call on this machine, the fastest of seven thousand-fold repeats."""
    closure = make_roofline(FitTarget(model=find_model_spec("Llama-3.1-8B"), device=find_device("h100-sxm")))
    shape = _hybrid(256, 64)
    predictor = Predictor(
        closure,
        ResidualModel([0.9, 1.0, 1.1]),
        ShapeRange.of([_hybrid(2048, 256)]),
        OnlineCorrection(),
        DriftAlarm(),
    )
    for _ in range(20):
        predictor.observe(shape, 1.1 * closure(shape))
    calls: dict[str, Callable[[], object]] = {
        "roofline": lambda: closure(shape),
        "step_time, everything on": lambda: predictor.step_time(shape, 0.9),
        "observe": lambda: predictor.observe(shape, 0.02),
        "max_chunk_tokens, 20 ms": lambda: predictor.max_chunk_tokens(shape, 500, 0.02, 0.9),
        "max_chunk_tokens, 60 ms": lambda: predictor.max_chunk_tokens(shape, 500, 0.06, 0.9),
    }
    return {
        name: min(timeit.repeat(call, number=1000, repeat=7)) / 1000 * 1e6 for name, call in calls.items()
    }


# Tables


def main() -> None:
    args = parse_args()
    profiles = args.shared / "data" / "profiles"
    for name in args.only:
        print(f"\n### {name}\n")
        TABLES[name](profiles)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = os.environ.get("ONBEAT_SHARED")
    parser.add_argument("--shared", type=Path, default=shared, required=shared is None)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    args = parser.parse_args()
    if not (args.shared / "data" / "profiles").is_dir():
        sys.exit(f"{args.shared} has no data/profiles")
    return args


def print_grid(profiles: Path) -> None:
    uncalibrated, calibrated = grid_lines(profiles)
    print("| deployment | data sheet: median / p90 % | calibrated on 10 %: median / p90 % |\n|---|---:|---:|")
    for before, after in zip(uncalibrated, calibrated, strict=True):
        print(f"| {before.label} | {_pair(before.errors)} | {_pair(after.errors)} |")
    medians = [
        f"{100 * float(np.median([getattr(line.errors, name) for line in lines])):.1f}"
        for lines in (uncalibrated, calibrated)
        for name in ("p50", "p90")
    ]
    print("| **median of deployments** | {} / {} | {} / {} |".format(*medians))


def _pair(errors: FitErrors) -> str:
    return f"{100 * errors.p50:.1f} / {100 * errors.p90:.1f}"


def print_sarathi(profiles: Path) -> None:
    print("| batch | measured ms | data sheet ms | calibrated ms |\n|---|---:|---:|---:|")
    for batch in sarathi_batches(profiles):
        times = (batch.measured, batch.uncalibrated, batch.calibrated)
        print(f"| {batch.label} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in times)} |")


def print_cost(_: Path) -> None:
    print("| call | us |\n|---|---:|")
    for name, microseconds in costs_us().items():
        print(f"| {name} | {microseconds:.1f} |")


TABLES: dict[str, Callable[[Path], None]] = {
    "grid": print_grid,
    "sarathi": print_sarathi,
    "cost": print_cost,
}

if __name__ == "__main__":
    main()
