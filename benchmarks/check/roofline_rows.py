"""How well the roofline alone predicts steps of few and of many rows on this CPU, as a Markdown page.

    python -m benchmarks.check.roofline_rows [--model MODEL] [--rounds 10] [--out FILE]

Three times: with one rate for matrix products of all sizes, a large one's, and what an eager framework costs
beside it; with one rate and what the engine itself costs beside it; and with this and the rates of the
engine's own products by their rows. Each round measures limits, predicts, and runs the steps; the calmest
third of the rounds counts. Nothing is corrected online; the columns "same pace" leave out the one factor by
which all steps together are off, which is the first that the online correction learns.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onbeat.core.options import make
from onbeat.engine.busy import OthersMeter
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.load import LoadedModel, prepare_model
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer, num_blocks_for
from onbeat.engine.profiling.profiler import limits_of
from onbeat.engine.step_time_spec import device_spec_of, model_spec_of, precision_of, profile_key_of
from onbeat.hub.resolve import resolve_model
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.product_rates import ROW_COUNTS
from onbeat.perfmodel.profile import MachineLimits
from onbeat.perfmodel.roofline import default_parameters, make_roofline

CONTEXT = 256
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (64, 128, 256, 512, 1024, 1500)


def main() -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as `onbeat serve` takes it")
    parser.add_argument("--backend", default="auto", help="of the engine")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, not quantized")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file for the page")
    args = parser.parse_args()
    config = make(
        EngineConfig,
        model=resolve_model(args.model),
        backend=args.backend,
        load_format=args.load_format,
        max_num_seqs=max(BATCHES),
    )
    loaded = prepare_model(config).load(lambda _: None)
    page = "\n".join(report(loaded, args)) + "\n"
    print(page)
    if args.out is not None:
        args.out.write_text(page)


def report(loaded: LoadedModel, args: argparse.Namespace) -> list[str]:
    """Return the lines of the page."""
    decodes = [MeasuredBatch((BatchRow(CONTEXT, 1),) * num_rows) for num_rows in BATCHES]
    prompts = [MeasuredBatch((BatchRow(0, num_tokens),)) for num_tokens in PROMPTS]
    batches = [*decodes, *prompts]
    rounds = sorted((measure(loaded, batches) for _ in range(args.rounds)), key=lambda its: its.num_others)
    rounds = rounds[: -(-args.rounds // 3)]
    seconds = np.array([its.seconds for its in rounds])
    predicted = np.array([its.predicted for its in rounds])  # [round, model, batch]
    logs = np.median(np.log(predicted / seconds[:, None, :]), axis=0)
    errors = np.exp(logs) - 1
    shapes = np.exp(logs - logs.mean(axis=1, keepdims=True)) - 1
    settings = ", ".join(f"{name} {value}" for name, value in loaded.runner.forward.settings.items())
    by_rows = ", ".join(
        f"{num_rows}: {np.median(rates) / 1e9:.0f}"
        for num_rows in ROW_COUNTS
        if (rates := [rate for its in rounds for at, rate in its.limits.product_rates if at == num_rows])
    )
    bandwidth = np.median([its.limits.memory_bandwidth for its in rounds]) / 1e9
    peak = np.median([max(its.limits.peak_flops.values()) for its in rounds]) / 1e9
    lines = [
        "# The roofline on a CPU: one rate of matrix products, or rates by their rows",
        "",
        f"{datetime.now(UTC).isoformat(timespec='seconds')}; {os.cpu_count()} cores, "
        f"{loaded.device.num_threads} threads; {loaded.name}, {settings}.",
        "",
        f"    python -m benchmarks.check.roofline_rows --model {args.model} --backend {args.backend} "
        f"--load-format {args.load_format} --rounds {args.rounds}",
        "",
        f"Medians of the {len(rounds)} calmest of {args.rounds} rounds, in which other programs took up to "
        f"{rounds[-1].num_others:.1f} cores. Read {bandwidth:.0f} GB/s; the quickest product {peak:.0f} "
        f"GFLOP/s; the engine's own by rows, GFLOP/s: {by_rows}.",
        "",
        "| step | ms | eager, one rate | one rate | rates by rows | same pace: eager | one rate | by rows |",
        "| --- " + "| ---: " * 7 + "|",
    ]
    for index, batch in enumerate(batches):
        shape = batch.shape
        name = (
            f"{shape.num_decodes} decodes at {CONTEXT}"
            if shape.num_decodes
            else f"prompt of {shape.num_new_tokens}"
        )
        cells = " | ".join(f"{error:+.0%}" for error in (*errors[:, index], *shapes[:, index]))
        lines.append(f"| {name} | {np.median(seconds[:, index]) * 1e3:.1f} | {cells} |")
    means = " | ".join(f"{error:.0%}" for error in np.abs([*errors, *shapes]).mean(axis=1))
    lines.append(f"| mean, absolute | | {means} |")
    return lines


class Round(NamedTuple):
    """What one round found."""

    limits: MachineLimits
    seconds: list[float]
    """Of every batch."""
    predicted: list[list[float]]
    """By each model."""
    num_others: float
    """Cores that other programs took meanwhile."""


def measure(loaded: LoadedModel, batches: list[MeasuredBatch]) -> Round:
    """Measure the limits and every batch, one after the other."""
    key = profile_key_of(loaded, precision(loaded))
    meter = OthersMeter(loaded.device.num_threads)
    limits = limits_of(loaded, key.device, precision(loaded).compute)
    assert limits is not None, "this is for CPUs"
    timer = StepTimer(loaded.runner, num_blocks=num_blocks_for(batches, loaded.limits.block_size))
    seconds = []
    for batch in batches:
        runs = 5 if batch.shape.num_decodes else 3
        seconds.append(float(np.median([timer.time(batch) for _ in range(runs)])))
    timer.close()
    device, spec = device_spec_of(key, limits), model_spec_of(loaded.config, loaded.name)
    one_rate = replace(device, product_rates=())
    eager = replace(one_rate, architecture="cpu")
    models = []
    for its in (eager, one_rate, device):
        formats = precision(loaded)
        tile_tokens = default_parameters(eager, formats).tile_tokens
        parameters = replace(default_parameters(its, formats), tile_tokens=tile_tokens)
        models.append(make_roofline(spec, its, precision=formats, parameters=parameters))
    predicted = [[model(batch.shape) for batch in batches] for model in models]
    others = meter.read()
    return Round(limits, seconds, predicted, 0.0 if others is None else others.num_cores)


def precision(loaded: LoadedModel) -> Precision:
    """Return the engine's number formats."""
    found = precision_of(loaded.device.dtype, loaded.weights_format, loaded.embedding_format)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
