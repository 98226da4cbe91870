"""What a newer vLLM changes: host time of a row, fitted to its steps, and loads that no fit has seen.

    python -m benchmarks.check.engine_versions          # the errors on the loads, by version of the terms
    python -m benchmarks.check.engine_versions --fit    # the host time of a row

Steps (`engine_steps.csv`): decode steps of vLLM 0.20.1 with Qwen3-32B on B300, medians of what the repository
ai-dynamo/aiconfigurator publishes (`fpm_golden_runs`, Apache-2.0). Their time is taken to be a constant of
each degree, a share of the KV that is read on a device, one of the rows per device, and the host time of the
rows, which no degree divides: least squares on the relative error. Only the last number is used, so that the
device, whose bandwidth is in the others, need not be known.

Loads (`engine_loads.csv`): means over open-loop loads of vLLM 0.15.1 on H100, A100 and L40S; the README
beside the file says whence. Nothing of a TPOT is fitted to them. A TPOT is (latency - TTFT) / (output -
1) and is predicted as a decode step of rate x (latency - TTFT) requests at their mean context. What
prompts add is left out: some 45 of them come again and again, so that each but the first of its kind is
in the prefix cache. Left out are loads of long outputs, of which the one looked at had most requests time
out.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.check.engine_rows import engine_seconds
from benchmarks.harness.pages import REPOSITORY
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.engines import EngineTerms, find_engine
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import roofline_seconds
from onbeat.perfmodel.shapes import shape_matrix

DATA = REPOSITORY / "benchmarks" / "data"
VERSIONS = ("vllm@0.6", "vllm")


@dataclass(frozen=True)
class Load:
    """One load, as in the file; times in seconds."""

    model: str
    device: str
    weights: str
    tensor: int
    name: str
    rate: float
    input_tokens: int
    output_tokens: int
    latency: float
    ttft: float

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def decoding(self) -> float:
        """Requests that decode at once."""
        return self.rate * (self.latency - self.ttft)

    @property
    def context(self) -> float:
        """Mean of a request while it decodes, tokens."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def spec(self) -> ModelSpec:
        return find_model_spec(self.model)

    def predict(self, terms: EngineTerms | None) -> float:
        """Return the TPOT with the terms of an engine, or from data sheets alone."""
        fewer = int(self.decoding)
        shapes = [BatchShape.of_decodes(n, round(n * self.context)) for n in (fewer, fewer + 1)]
        parallelism, precision = Parallelism(self.tensor), Precision(*(self.weights,) * 3)
        matrix, device = shape_matrix(shapes), find_device(self.device)
        target = FitTarget(model=self.spec, device=device, parallelism=parallelism, precision=precision)
        found = roofline_seconds(matrix, target) if terms is None else engine_seconds(matrix, terms, target)
        low, high = found
        return float(low + (self.decoding - fewer) * (high - low))

    def error(self, terms: EngineTerms | None) -> float:
        """Return (predicted - measured) / measured."""
        return self.predict(terms) / self.tpot - 1


def read_loads() -> list[Load]:
    found = []
    with (DATA / "engine_loads.csv").open(newline="") as file:
        for cells in csv.DictReader(file):
            found.append(
                Load(
                    model=cells["model"],
                    device=cells["device"],
                    weights=cells["weights"],
                    tensor=int(cells["tensor"]),
                    name=cells["load"],
                    rate=float(cells["rate"]),
                    input_tokens=round(float(cells["input_tokens"])),
                    output_tokens=int(cells["output_tokens"]),
                    latency=float(cells["latency_ms"]) / 1e3,
                    ttft=float(cells["ttft_ms"]) / 1e3,
                )
            )
    return found


def fit_row_seconds() -> tuple[float, float]:
    """Return the host time of a row of the newer vLLM and its standard error, seconds."""
    with (DATA / "engine_steps.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    model = find_model_spec(cells[0]["model"])
    tensor, batch, context, seconds = (
        np.array([float(each[name]) for each in cells]) for name in ("tensor", "batch", "context", "seconds")
    )
    kv_bytes = batch * context * model.kv_bytes_per_token(Precision()) / tensor
    degrees = [(tensor == degree).astype(float) for degree in np.unique(tensor)]
    columns = np.column_stack([batch, kv_bytes, batch / tensor, *degrees]) / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    found, *_ = np.linalg.lstsq(columns / scale, np.ones(len(seconds)), rcond=None)
    residuals = columns / scale @ found - 1
    spread = residuals @ residuals / (len(seconds) - len(found))
    error = np.sqrt(np.linalg.inv((columns / scale).T @ (columns / scale))[0, 0] * spread)
    return float(found[0] / scale[0]), float(error / scale[0])


def errors(loads: Iterable[Load], terms: EngineTerms | None) -> NDArray[np.float64]:
    return np.array([load.error(terms) for load in loads])


def print_loads(loads: list[Load]) -> None:
    """Print every load, and the means of dense models and of those with experts."""
    found = [None, *(find_engine(name) for name in VERSIONS)]
    heads = ["data sheets", *(f"`{name}`" for name in VERSIONS)]
    print(f"| model | device | TP | load | requests/s | decoding | TPOT, ms | {' | '.join(heads)} |")
    print("|---|---|---:|---|---:|---:|---:|" + "---:|" * len(heads))
    for load in loads:
        cells = [f"{100 * load.error(terms):+.1f}" for terms in found]
        print(
            f"| {load.model} | {load.device} | {load.tensor} | {load.name} | {load.rate:g} | "
            f"{load.decoding:.0f} | "
            f"{1e3 * load.tpot:.2f} | {' | '.join(cells)} |"
        )
    of: dict[str, Callable[[Load], bool]] = {
        "dense, H100": lambda load: not load.spec.is_moe and load.device == "h100-sxm",
        "experts, H100": lambda load: load.spec.is_moe,
        "dense, A100": lambda load: load.device == "a100-80-sxm",
        "dense, L40S": lambda load: load.device == "l40s",
    }
    for name, chosen in of.items():
        some = [load for load in loads if chosen(load)]
        cells = [
            f"{100 * np.abs(all_).mean():.1f} ({100 * all_.mean():+.1f})"
            for all_ in (errors(some, terms) for terms in found)
        ]
        print(f"| **{name}**, mean size (bias) | | | {len(some)} loads | | | | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        seconds, error = fit_row_seconds()
        print(f"row_seconds: {seconds:.3g} (standard error {error:.2g})")
        return
    print_loads(read_loads())


if __name__ == "__main__":
    main()
