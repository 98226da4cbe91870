"""What the host does for each decode step of the GPU engine, measured on a CPU: no GPU is needed.

    PYTHONPATH=src:. python -m benchmarks.gpu_check.launch_cost [--profile]

The device does nothing: graphs replay nothing, and nothing is drawn. What is left is the host's part.

- `loop`: a step in the engine process's own loop under `slo`, with two steps in flight. `wall` and
  `processor` are all of it, by the clock and in all threads. `schedule` and `update` are parts of it.
- `launch`: `ModelRunner.launch`, one step at a time, and its parts.

Medians in microseconds; of the processor, the mean. To compare two versions, give the `src` of each in
PYTHONPATH, in turns.
"""

from __future__ import annotations

import cProfile
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import zmq

from benchmarks.gpu_check.timing import BLOCK_SIZE, host_us, runner_of, times_of_parts
from onbeat.core.request import Request, SamplingParams
from onbeat.core.settled_memory import settled_memory
from onbeat.core.slo import SLO
from onbeat.core.step import StepStats
from onbeat.engine.core import EngineCore
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.messages import AddRequest, Ready, Shutdown, encode
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.process import EngineLink, StepWait, _EngineLoop
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.virtual_replica import make_scheduler
from tests.cpu.engine.reference_kernels import ReferenceKernels

MAX_ROWS, MAX_LEN, MAX_TOKENS, CONTEXT, NUM_STEPS = 128, 2048, 512, 512, 300
NUM_BLOCKS = MAX_ROWS * 2 * CONTEXT // BLOCK_SIZE
ENDPOINT, READY = "inproc://engine", Ready(None, None)  # type: ignore[arg-type]
TEMPERATURES = {"greedy": 0.0, "drawn": 0.8}
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


class _NoDraws(ReferenceKernels):
    """Takes what was found as the most likely token."""

    def draw(self, *args: Any) -> None:
        """Do nothing."""


def make_runner() -> ModelRunner:
    """Return what launches decode steps whose layers are not computed."""
    weights = load_weights(DummyCheckpoint(MODEL), torch.float32, torch.device("cpu"))
    options = CudaOptions(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
    )
    forward = CudaForward(weights, _NoDraws(kernel_sizes(weights, options)), _NoGraphs(), options)
    return runner_of(forward, num_blocks=NUM_BLOCKS, max_rows=MAX_ROWS, max_len=MAX_LEN)


class _Laps:
    """Takes the time at the end of each step that decodes all rows, and stops the engine after some."""

    def __init__(self, rows: int, stop: Callable[[], object]) -> None:
        self._rows, self._stop = rows, stop
        self.walls: list[float] = []
        self.processors: list[float] = []
        self.steps: list[StepStats] = []

    def judge(self, stats: StepStats) -> None:
        """Take the time; that of the processor, which takes long, at the first and the last that count."""
        if stats.shape.num_decodes < self._rows or stats.shape.num_chunks:
            return
        self.walls.append(time.perf_counter())
        self.steps.append(stats)
        if len(self.steps) in (NUM_STEPS // 4, NUM_STEPS):
            self.processors.append(time.process_time())
        if len(self.steps) == NUM_STEPS:
            self._stop()


def loop_us(rows: int, temperature: float) -> dict[str, float]:
    """Serve requests by an engine process's loop, and return what a decode step takes."""
    context = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind(ENDPOINT)
    far.connect(ENDPOINT)
    laps = _Laps(rows, lambda: far.send(encode(Shutdown())))
    config = SchedulerConfig(
        policy="slo",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
    )
    step_time = resolve(Deployment(model="meta-llama/Llama-3.1-8B", device="h100-sxm")).step_time
    scheduler = make_scheduler(config, step_time)
    core = EngineCore(scheduler, ThreadExecutor(make_runner()), max_in_flight_steps=2, judge=laps)
    for row in range(rows):
        request = Request(
            request_id=f"request-{row}",
            prompt_token_ids=tuple((row + place) % MODEL.vocab_size for place in range(CONTEXT)),
            sampling=SamplingParams(temperature=temperature, top_p=0.95, seed=row, max_tokens=CONTEXT),
            arrival=time.monotonic(),
            slo=SLO(ttft=60.0, tbt=0.05),
        )
        far.send(encode(AddRequest(request)))
    with settled_memory():  # as an engine process does
        _EngineLoop(core, StepWait(near), EngineLink(endpoint=ENDPOINT), READY).serve()
    context.destroy(linger=0)
    first, steps = NUM_STEPS // 4, laps.steps[NUM_STEPS // 4 :]
    seconds = {
        "wall": statistics.median(after - before for before, after in pairwise(laps.walls[first:])),
        "processor": (laps.processors[1] - laps.processors[0]) / len(steps),
        "schedule": statistics.median(each.schedule_seconds for each in steps),
        "update": statistics.median(each.update_seconds for each in steps),
    }
    return {name: each * 1e6 for name, each in seconds.items()}


def launch_us(rows: int) -> dict[str, float]:
    """Return what one launch takes, and its parts."""
    runner = make_runner()
    forward: Any = runner.forward
    parts = {
        "prepare": (runner.batch, "prepare"),
        "pack": (forward._packer, "pack"),
        "queue": (forward, "_queue"),
        "taking the tokens": (runner, "_finish"),
    }
    whole = host_us(runner, rows, CONTEXT, NUM_STEPS)
    assert whole is not None, "it launches ahead"
    return {"launch": whole, **times_of_parts(runner, rows, CONTEXT, parts, NUM_STEPS)}


def show(name: str, times: dict[str, float]) -> None:
    """Print times."""
    print(f"{name}: {', '.join(f'{part} {took:.0f}' for part, took in times.items())}", flush=True)


def main() -> int:
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-4)  # as an engine with steps in flight
    for rows in (1, 32, MAX_ROWS):
        show(f"{rows} rows", launch_us(rows))
        for name, temperature in TEMPERATURES.items():
            show(f"{rows} rows, {name}, loop", loop_us(rows, temperature))
    if "--profile" in sys.argv:
        cProfile.runctx(f"launch_us({MAX_ROWS})", globals(), {}, sort="tottime")
    return 0


if __name__ == "__main__":
    sys.exit(main())
