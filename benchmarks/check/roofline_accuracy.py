"""Error of the uncalibrated roofline against a published grid of step times, a configuration a line.

    python -m benchmarks.check.roofline_accuracy --shared DIR

The grid (data/profiles/aic_step_grid.csv) was computed with aiconfigurator-core 0.12 (Apache-2.0) from
measured operators. Rows whose KV cache would not fit are left out. Also prints the cost of one prediction.
"""

from __future__ import annotations

import argparse
import csv
import os
import timeit
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import DeviceSpec, Parallelism, find_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import make_roofline, roofline_seconds
from onbeat.perfmodel.shapes import shape_matrix

MODELS = {
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-70B": "Llama-3.1-70B",
    "Llama-3.1-70B-Instruct-FP8": "Llama-3.1-70B",
}
DEVICES = {
    "a100_sxm": "a100-80-sxm",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "l40s": "l40s",
}
PRECISIONS = {"bf16": Precision(), "fp8": Precision("fp8", "fp8", "fp8")}


class Configuration(NamedTuple):
    """One model on one kind of device, as the grid names them."""

    model: str
    precision: str
    gpu: str
    tp: int
    backend: str

    @property
    def model_spec(self) -> ModelSpec:
        return find_model_spec(MODELS[self.model])

    @property
    def device_spec(self) -> DeviceSpec:
        return find_device(DEVICES[self.gpu])


class Steps(NamedTuple):
    """The grid's rows of one configuration."""

    kinds: list[str]
    matrix: NDArray[np.float64]
    seconds: NDArray[np.float64]


def read_grid(path: Path) -> dict[Configuration, Steps]:
    """Return the rows that fit the device's memory, by configuration."""
    shapes: dict[Configuration, list[tuple[str, BatchShape, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["fits"] == "1":
                key = Configuration(
                    row["model"], row["precision"], row["gpu"], int(row["tp"]), row["backend"]
                )
                shapes[key].append((row["kind"], shape_of(row), float(row["latency_ms"]) / 1e3))
    return {
        key: Steps(
            [kind for kind, _, _ in rows],
            shape_matrix(shape for _, shape, _ in rows),
            np.array([seconds for _, _, seconds in rows]),
        )
        for key, rows in shapes.items()
    }


def shape_of(row: dict[str, str]) -> BatchShape:
    """Return the batch of a row.

    In `mixed` rows the chunk belongs to a prompt as long as the decodes' context: where it is shorter than
    that prompt it stands for the average of the prompt's chunks, where it is longer for several prompts.
    """
    shape = BatchShape()
    context, chunk = int(row["decode_context"]), int(row["prefill_tokens_per_seq"])
    for _ in range(int(row["decode_seqs"])):
        shape.add(context, 1, samples=True)
    if row["kind"] == "mixed":
        whole, rest = divmod(chunk, context) if chunk > context else (0, chunk)
        for _ in range(whole):
            shape.add(0, context, samples=True)
        if rest:
            cached = (context - rest) // 2 if not whole else 0
            shape.add(cached, rest, samples=False)
        return shape
    for _ in range(int(row["prefill_seqs"])):
        shape.add(int(row["prefill_prefix"]), chunk, samples=True)
    return shape


def relative_errors(key: Configuration, steps: Steps) -> NDArray[np.float64]:
    """Return (predicted - published) / published of every row."""
    target = FitTarget(
        model=key.model_spec,
        device=key.device_spec,
        parallelism=Parallelism(key.tp),
        precision=PRECISIONS[key.precision],
    )
    predicted = roofline_seconds(steps.matrix, target)
    return np.asarray(predicted / steps.seconds - 1)


def seconds_a_prediction() -> float:
    """Return what one call of the scalar function costs, seconds (the best of five rounds)."""
    predict = make_roofline(FitTarget(model=find_model_spec("Llama-3.1-8B"), device=find_device("h100-sxm")))
    shape = BatchShape()
    shape.add(512, 512, samples=False)
    for _ in range(32):
        shape.add(2048, 1, samples=True)
    return min(timeit.repeat(lambda: predict(shape), number=50_000, repeat=5)) / 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared DIR or set ONBEAT_SHARED: the directory that holds data/")
    grid = read_grid(Path(args.shared) / "data" / "profiles" / "aic_step_grid.csv")
    print("| configuration | points | median % | p90 % | bias % | decode | prefill | mixed |")
    print("|---|---|---|---|---|---|---|---|")
    medians, tails = [], []
    for key, steps in grid.items():
        errors = 100 * relative_errors(key, steps)
        kinds = np.array(steps.kinds)
        medians.append(np.median(np.abs(errors)))
        tails.append(np.quantile(np.abs(errors), 0.9))
        by_kind = " | ".join(
            f"{np.median(np.abs(errors[kinds == kind])):.1f} ({np.median(errors[kinds == kind]):+.1f})"
            for kind in ("decode", "prefill", "mixed")
        )
        print(
            f"| {key.model} {key.precision} {key.gpu} TP{key.tp} {key.backend} | {len(errors)} "
            f"| {medians[-1]:.1f} | {tails[-1]:.1f} | {np.median(errors):+.1f} | {by_kind} |"
        )
    print(
        f"| **median of {len(grid)}** | | **{np.median(medians):.1f}** | **{np.median(tails):.1f}** | | | | |"
    )
    print(f"\none scalar prediction: {seconds_a_prediction() * 1e6:.2f} us")


if __name__ == "__main__":
    main()
