#!/usr/bin/env python3
"""How fast Vidur simulates the trace of simulator_speed.py on this host. Runs in an environment of its own.

    python -m venv vidur && vidur/bin/pip install vidur==0.0.26
    vidur/bin/python benchmarks/papers/vidur_speed.py --trace examples/azure2023_conv.csv.gz

Vidur (Agrawal et al., MLSys 2024) fetches the profiles of its predictor from a model hub. So that it runs
without, and so that none of the time is its predictor's, each step takes a linear time instead: fixed seconds
and seconds a token, near what the roofline says of Llama-3.1-8B on an H100. Its own Sarathi scheduler: 512
tokens and 256 requests a step. No metrics are written.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

import pandas as pd
from vidur._native.entities import ExecutionTime
from vidur.config import SimulationConfig
from vidur.config.config import (
    CacheConfig,
    ClusterConfig,
    MetricsConfig,
    SarathiSchedulerConfig,
    TraceRequestGeneratorConfig,
)
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.simulator import Simulator

FIXED_MS, TOKEN_MS = 6.0, 0.025
NUM_BLOCKS, BLOCK_SIZE = 27_000, 16


class LinearTime:
    """A predictor that costs next to nothing."""

    def __init__(self, **_: object) -> None:
        self._zeros = (0.0,) * 13

    def get_execution_time(self, batch: object, pipeline_stage: int) -> ExecutionTime:  # noqa: ARG002
        return ExecutionTime(1, FIXED_MS + TOKEN_MS * batch.total_num_q_tokens, *self._zeros)


def write_trace(source: Path, num_requests: int | None, path: Path) -> int:
    """Write the trace in the columns that Vidur reads; return how many requests it has."""
    rows = pd.read_csv(source).head(num_requests)
    times = pd.to_datetime(rows["TIMESTAMP"])
    frame = pd.DataFrame(
        {
            "Date": "2023-11-16",
            "Time": (times - times.iloc[0]).dt.total_seconds(),
            "PromptTokenCount": rows["ContextTokens"],
            "CompletionTokenCount": rows["GeneratedTokens"],
        }
    )
    frame.to_csv(path, index=False)
    return len(frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-requests", type=int)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    ExecutionTimePredictorRegistry.get = staticmethod(lambda *_args, **_kwargs: LinearTime())
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        num_requests = write_trace(args.trace, args.num_requests, trace)
        config = SimulationConfig(
            cluster_config=ClusterConfig(
                num_replicas=1,
                cache_config=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
                replica_scheduler_config=SarathiSchedulerConfig(batch_size_cap=256, chunk_size=512),
            ),
            request_generator_config=TraceRequestGeneratorConfig(
                trace_file=str(trace),
                date="2023-11-16",
                prefill_scale_factor=1.0,
                time_scale_factor=1.0,
                max_tokens=16384,
            ),
            metrics_config=MetricsConfig(write_metrics=False, output_dir=folder),
        )
        before = time.process_time()
        simulator = Simulator(config)
        simulator.run()
        seconds = time.process_time() - before
    rate = num_requests / seconds
    print(f"vidur: {num_requests} requests, {seconds:.2f} CPU s, {rate:.0f} requests per CPU s")


if __name__ == "__main__":
    main()
