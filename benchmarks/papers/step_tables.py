"""Published step times as tables for `onbeat profile --from`, and how far a calibration by them is off.

    python -m benchmarks.papers.step_tables --shared DIR [--write OUT]

DIR holds `data/profiles`: the performance table of Mutinifni/splitwise-sim (Patel et al., ISCA 2024) and
batches of microsoft/sarathi-serve (Agrawal et al., OSDI 2024). `--write` keeps the tables in a directory.
Each deployment's rows are cut into five folds by batch; each fold is predicted by a fit to the other four.

* Splitwise: `batch_size` prompts of `prompt_size` took `prompt_time`; then each of `token_size` steps took
  `token_time`, at their mean context. Left out: derived rows (h100-80gb-pcap), and TP 2 at batch 64, whose
  prompts take less time than those at batch 32.
* Sarathi-Serve, figure 2: one prompt, or decodes, whose context is not published: 1,024 tokens are assumed.
  Left out: the first batch, which had not been warmed up.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import FitErrors, FitTarget, fit
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.roofline import roofline_seconds
from onbeat.perfmodel.shapes import shape_matrix
from onbeat.perfmodel.step_log import COLUMNS, read_step_table

MODELS = {"bloom-176b": "bloom", "llama2-70b": "Llama-2-70b-hf"}
DEVICES = {"a100-80gb": "a100-80-sxm", "h100-80gb": "h100-sxm"}
SARATHI_CONTEXT = 1024


class Step(NamedTuple):
    """One row, as the columns are named."""

    batch: int
    new_tokens: int
    context: int
    seconds: float


class Table(NamedTuple):
    """The rows of one deployment."""

    name: str
    model: str
    device: str
    tensor: int
    steps: list[Step]


def splitwise_tables(profiles: Path) -> Iterator[Table]:
    """Read Splitwise's measurements, a table a deployment."""
    groups: dict[tuple[str, str, str], list[Step]] = defaultdict(list)
    with gzip.open(profiles / "splitwise" / "perf_model.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["hardware"] not in DEVICES or (row["tensor_parallel"], row["batch_size"]) == ("2", "64"):
                continue
            batch, prompt = int(row["batch_size"]), int(row["prompt_size"])
            group = groups[row["model"], row["hardware"], row["tensor_parallel"]]
            group.append(Step(batch, prompt, 0, float(row["prompt_time"]) / 1e3))
            context = prompt + int(row["token_size"]) // 2
            group.append(Step(batch, 1, context, float(row["token_time"]) / 1e3))
    for (model, hardware, tensor), steps in groups.items():
        name = f"splitwise {model} {hardware} TP {tensor}"
        yield Table(name, MODELS[model], DEVICES[hardware], int(tensor), steps)


def sarathi_table(profiles: Path) -> Table:
    """Read Sarathi-Serve's figure 2."""
    steps = []
    for kind in ("prefill", "decode"):
        path = profiles / "sarathi" / f"yi34b_tp2_a100_figure-2_{kind}.csv"
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if float(row["Batch Id"]) == 0:
                    continue
                seconds = float(row["batch_execution_time"])
                if kind == "prefill":
                    steps.append(Step(1, int(row["batch_num_prefill_tokens"]), 0, seconds))
                else:
                    steps.append(Step(int(row["batch_num_decode_tokens"]), 1, SARATHI_CONTEXT, seconds))
    return Table("sarathi yi-34b a100-80gb TP 2", "Yi-34B", "a100-80-sxm", 2, steps)


def write_table(table: Table, directory: Path) -> Path:
    path = directory / f"{table.name.replace(' ', '_')}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(table.steps)
    return path


def errors_of(table: Table, path: Path) -> tuple[FitErrors, FitErrors]:
    """Return the errors of data sheets alone, and of the calibration on held-back steps."""
    model, device = find_model_spec(table.model), find_device(table.device)
    parallelism = Parallelism(table.tensor)
    measured = read_step_table(path)
    shapes, seconds = [step.shape for step in measured.steps], [step.wall for step in measured.steps]
    target = FitTarget(model=model, device=device, parallelism=parallelism)
    sheet = roofline_seconds(shape_matrix(shapes), target)
    return FitErrors.of(sheet, np.array(seconds)), fit(shapes, seconds, target).errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = os.environ.get("ONBEAT_SHARED")
    parser.add_argument("--shared", type=Path, default=shared, required=shared is None)
    parser.add_argument("--write", type=Path, metavar="OUT")
    args = parser.parse_args()
    profiles = Path(args.shared) / "data" / "profiles"
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.write or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        print("| table | steps | data sheets: median / p90 % | calibrated, held back: median / p90 % |")
        print("|---|---:|---:|---:|")
        for table in [*splitwise_tables(profiles), sarathi_table(profiles)]:
            sheet, held_back = errors_of(table, write_table(table, directory))
            cells = " | ".join(
                f"{100 * errors.p50:.1f} / {100 * errors.p90:.1f}" for errors in (sheet, held_back)
            )
            print(f"| {table.name} | {len(table.steps)} | {cells} |")


if __name__ == "__main__":
    main()
