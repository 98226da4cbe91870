"""What the host does to launch one decode step of the GPU engine, counted on the CPU: no GPU is needed.

    PYTHONPATH=src:. python -m benchmarks.gpu_check.launch_cost

Graphs replay nothing, so that what is left is what Python does for each step: its own calls, those of C
functions, operators of torch, and microseconds of this machine.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.timing import BLOCK_SIZE, DecodeStream, runner_of
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.cuda.weights import load_weights
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.cpu.engine.reference_kernels import ReferenceKernels

MAX_ROWS, MAX_LEN, CONTEXT, NUM_STEPS = 128, 2048, 512, 60
MODEL = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=64,
    max_position_embeddings=MAX_LEN,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
)


class _NoGraphs:
    """Graphs that compute nothing."""

    name = "none"

    def prepare(self, keys: Sequence[GraphKey], *functions: Callable[[GraphKey], None]) -> None:
        """Remember nothing."""

    def replay(self, key: GraphKey) -> None:
        """Do nothing."""


class _Operators(TorchDispatchMode):
    """Counts operators of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def make_runner() -> ModelRunner:
    """Return what launches steps whose layers are not computed."""
    weights = load_weights(DummyCheckpoint(MODEL), torch.float32, torch.device("cpu"))
    num_blocks = MAX_ROWS * (CONTEXT + NUM_STEPS + 1 + BLOCK_SIZE) // BLOCK_SIZE
    options = CudaOptions(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=512,
    )
    kernels = ReferenceKernels(kernel_sizes(weights, options))
    forward = CudaForward(weights, kernels, _NoGraphs(), options)
    return runner_of(forward, num_blocks=num_blocks, max_rows=MAX_ROWS, max_len=MAX_LEN)


def measure(runner: ModelRunner, rows: int) -> None:
    """Print what one launch takes."""
    stream = DecodeStream(runner, rows, CONTEXT, NUM_STEPS)
    runner.launch(stream.enter()).result()
    times = []
    for index in range(NUM_STEPS - 10):
        scheduled = stream.step(index)
        start = time.perf_counter()
        pending = runner.launch(scheduled)
        times.append(time.perf_counter() - start)
        pending.result()
    profile, operators = cProfile.Profile(), _Operators()
    scheduled = stream.step(NUM_STEPS - 10)
    profile.enable()
    pending = runner.launch(scheduled)
    profile.disable()
    pending.result()
    with operators:
        runner.launch(stream.step(NUM_STEPS - 9)).result()
    runner.launch(stream.leave()).result()
    stats: Any = pstats.Stats(profile)
    print(
        f"{rows} rows: {stats.total_calls} calls, {sum(operators.counts.values())} operators of torch "
        f"(with taking the tokens), median {statistics.median(times) * 1e6:.0f} us"
    )
    print(f"    operators: {dict(operators.counts)}")
    if "--profile" in sys.argv:
        stats.sort_stats("ncalls").print_stats(25)


def main() -> int:
    torch.set_num_threads(1)
    runner = make_runner()
    for rows in (1, MAX_ROWS):
        measure(runner, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
