"""Stage F: times of steps of Llama-3.1-8B's shapes on the GPU engine, against the floor and against gates."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from gpu_check.ceilings import milliseconds
from gpu_check.models import floor_ms, model_config
from gpu_check.record import DEVICE, IS_REHEARSAL, expect, keep_step, note, seconds_left
from gpu_check.timing import (
    BLOCK_SIZE,
    decodes,
    host_us,
    kernel_times,
    loop_ms,
    prompt,
    runner_of,
    step_timer,
    wall_ms,
)
from onbeat.engine.cuda.weights import CudaWeights, load_weights
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.gpu.engines import on_gpu_engine

MAX_ROWS = 8 if IS_REHEARSAL else 128
MAX_TOKENS = 512 if IS_REHEARSAL else 8192
MAX_LEN = 256 if IS_REHEARSAL else 16640
DECODES = {(1, 512): 6.3, (8, 512): 6.5, (16, 512): 6.7, (32, 512): 7.2, (64, 512): 8.7, (128, 512): 10.7}
"""Rows and context: the most milliseconds, 1.25 (from 64 rows on 1.35) times the floor."""
LONGER = ((1, 2048), (8, 2048), (32, 2048), (128, 2048))
PROMPTS = {512: 12.2, 2048: 46.4, 8192: 206.0}
MOST_HOST_US = 300.0


def make_runner(weights: CudaWeights, num_blocks: int, *, graphs: bool = True) -> ModelRunner:
    """Return what runs steps on the GPU engine."""
    make = on_gpu_engine(
        weights,
        graphs=graphs,
        fast=not IS_REHEARSAL,
        max_num_seqs=MAX_ROWS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
    )
    forward = make(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return runner_of(forward, num_blocks=num_blocks, max_rows=MAX_ROWS, max_len=MAX_LEN)


def time_decodes(runner: ModelRunner, rows: int, context: int) -> None:
    """Time one size of decode steps: one after the other, and what of it the device and the host take."""
    loop = loop_ms(runner, rows, context)
    device = _device_ms(runner, rows)
    host = host_us(runner, rows, context)
    floor = floor_ms(runner.forward.config, rows, context)
    name = f"{rows} x {context}"
    note(f"decode {name}: a step in the loop", loop, "ms", at_most=DECODES.get((rows, context)), shown=True)
    note(f"decode {name}: on the device", device, "ms", shown=True)
    note(f"decode {name}: device over floor", device / floor, "x floor")
    if host is not None:
        note(f"decode {name}: host", host, "us", at_most=MOST_HOST_US if rows == MAX_ROWS else None)
    keep_step(
        engine="cuda",
        kind="decode",
        rows=rows,
        context=context,
        device_ms=round(device, 3),
        wall_ms=round(loop, 3),
        host_us="" if host is None else round(host),
        floor_ms=round(floor, 3),
    )


def _device_ms(runner: ModelRunner, rows: int) -> float:
    """Return the device's time for the graph that the last step replayed; NaN where there is none."""
    forward: Any = runner.forward
    sizes = [size for size in getattr(forward, "_sizes", ()) if size >= rows]
    graphs = getattr(forward, "_graphs", None)
    return milliseconds(lambda: graphs.replay(min(sizes)), 10) if sizes and graphs else float("nan")


def time_batch(timer: StepTimer, name: str, batch: MeasuredBatch, *, at_most: float | None = None) -> None:
    """Time a step that is no plain decode."""
    took = wall_ms(timer, batch, seconds=0.5)
    note(name, took, "ms", at_most=at_most, shown=True)
    keep_step(engine="cuda", kind=name, wall_ms=round(took, 3))


def show_kernels(timer: StepTimer, name: str, batch: MeasuredBatch) -> None:
    """Print where the time of a step goes."""
    kernels = kernel_times(timer, batch)
    if kernels is None:
        return
    note(f"{name}: kernels' time", kernels.device_ms, "ms")
    note(f"{name}: kernels", kernels.num_kernels)
    for text, took, calls in kernels.largest:
        print(f"    {took:8.3f} ms  {calls:6.0f} calls  {text[:110]}", flush=True)


def main() -> int:
    config = model_config("8b")
    start = time.monotonic()
    weights = load_weights(DummyCheckpoint(config), torch.bfloat16, torch.device(DEVICE))
    note("making the weights", time.monotonic() - start, "s")
    decode_cases = [(2, 64), (5, 96)] if IS_REHEARSAL else [*DECODES, *LONGER]
    prompts: dict[int, float | None] = {64: None} if IS_REHEARSAL else {**PROMPTS}
    # The skewed case takes 31 x 512 and 1 x 16,384 tokens, the largest one some more.
    num_blocks = 1 + max(
        rows * (-(-context // BLOCK_SIZE) + 5) for rows, context in [*decode_cases, (1, 16384)]
    )
    start = time.monotonic()
    runner = make_runner(weights, num_blocks)
    runner.warm_up()
    note("graphs and first steps", time.monotonic() - start, "s", shown=True)
    for rows, context in decode_cases:
        if seconds_left() > 6:
            time_decodes(runner, rows, context)
    with step_timer(runner, num_blocks) as timer:
        for length, most in prompts.items():
            if seconds_left() > 6:
                time_batch(timer, f"prompt {length}", prompt(length), at_most=most)
        few, long = (4, 200) if IS_REHEARSAL else (31, 16384)
        skewed = MeasuredBatch((*decodes(few, 512 // (16384 // long)).rows, BatchRow(long - 1, 1)))
        time_batch(timer, f"decode {few} x 512 + 1 x {long}", skewed)
        mixed = MeasuredBatch((*decodes(few, 64).rows, BatchRow(0, min(512, long))))
        time_batch(timer, f"{few} decodes + prompt {min(512, long)}", mixed)
        for rows in (2,) if IS_REHEARSAL else (1, 32, 128):
            if seconds_left() > 8:
                show_kernels(timer, f"decode {rows} x 512", decodes(rows, 64 if IS_REHEARSAL else 512))
        if seconds_left() > 8:
            show_kernels(timer, "prompt", prompt(64 if IS_REHEARSAL else 2048))
    if not IS_REHEARSAL:
        note("most memory", torch.cuda.max_memory_reserved() / 2**30, "GiB", shown=True)
        if seconds_left() > 10:
            _without_graphs(weights)
    expect("all sizes were timed", seconds_left() > 6)
    return 0


def _without_graphs(weights: CudaWeights) -> None:
    """Time decodes whose operators are called one by one."""
    runner = make_runner(weights, 2000, graphs=False)
    runner.warm_up()
    for rows in (1, 32):
        note(
            f"decode {rows} x 512 without graphs: a step in the loop",
            loop_ms(runner, rows, 512),
            "ms",
            shown=True,
        )


if __name__ == "__main__":
    sys.exit(main())
