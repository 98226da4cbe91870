"""Stage F: times of steps of Llama-3.1-8B's shapes on the GPU engine, against the floor and against gates."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.gpu_check import timing
from benchmarks.gpu_check.ceilings import milliseconds
from benchmarks.gpu_check.models import floor_ms, model_config
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, expect, keep_rows, keep_step, note, seconds_left
from onbeat.core.request import SamplingParams
from onbeat.engine.backends.base import warm_up
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.device import Device, free_memory
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.gpu.engines import on_gpu_engine

MAX_ROWS = 8 if IS_REHEARSAL else 128
MAX_TOKENS = 512 if IS_REHEARSAL else 8192
MAX_LEN = 256 if IS_REHEARSAL else 16640
CONTEXT = 64 if IS_REHEARSAL else 512
DECODES = {(1, 512): 6.3, (8, 512): 6.5, (16, 512): 6.7, (32, 512): 7.2, (64, 512): 8.7, (128, 512): 10.7}
"""Rows and context: the most milliseconds, 1.25 (from 64 rows on 1.35) times the floor."""
LONGER = ((128, 2048),)
MIXED = "2 decodes + 20 of a prompt" if IS_REHEARSAL else "31 decodes + 481 of a prompt"
"""The step of `mixed_steps` whose kernels are kept, one by one and in pieces."""
PROMPTS = {512: 12.2, 2048: 46.4, 8192: 206.0}
MOST_HOST_US = 300.0
WAYS_TO_CHOOSE = {
    "greedy": timing.GREEDY,
    "drawn": SamplingParams(temperature=1.0),
    "log-probabilities": SamplingParams(temperature=0.0, num_logprobs=0),
}


def make_runner(
    weights: TorchWeights,
    num_blocks: int,
    *,
    max_len: int = MAX_LEN,
    max_rows: int = MAX_ROWS,
    **options: Any,
) -> ModelRunner:
    """Return what runs steps on the GPU engine."""
    make = on_gpu_engine(
        weights,
        fast=not IS_REHEARSAL,
        max_num_seqs=max_rows,
        max_model_len=max_len,
        max_num_batched_tokens=MAX_TOKENS,
        **options,
    )
    forward = make(num_blocks=num_blocks, block_size=timing.BLOCK_SIZE)
    runner = timing.runner_of(forward, num_blocks=num_blocks, max_rows=max_rows, max_len=max_len)
    warm_up(runner)
    return runner


def make_noted(name: str, weights: TorchWeights, num_blocks: int, **options: Any) -> ModelRunner:
    """Return what runs steps; note the time that it took to make, and its memory beside the KV cache."""
    gc.collect()  # a forward pass and its graphs refer to each other
    empty_cache()
    start, free = time.monotonic(), free_memory(Device(DEVICE)).num_bytes
    runner = make_runner(weights, num_blocks, **options)
    note(f"{name}: made and warm", time.monotonic() - start, "s", shown=True)
    empty_cache()
    forward: Any = runner.forward
    kv_bytes = sum(part.nbytes for layer in forward._state.kv for part in layer)
    taken = free - free_memory(Device(DEVICE)).num_bytes - kv_bytes
    note(f"{name}: memory beside the KV cache", taken / 2**30, "GiB", shown=True)
    return runner


def empty_cache() -> None:
    """Give back what is not used any more."""
    if not IS_REHEARSAL:
        torch.cuda.empty_cache()


def note_failure(name: str, error: Exception) -> None:
    """Note that one way of several fails, which is a finding about itself."""
    traceback.print_exception(error)
    expect(f"{name} run", passed=False, text=f"{type(error).__name__}: {error}"[:300])


def note_host_parts(runner: ModelRunner, rows: int, context: int) -> None:
    """Note what the parts of a launch take."""
    forward: Any = runner.forward
    parts = {
        "prepare": (runner.batch, "prepare"),
        "pack": (forward._packer, "pack"),
        "copy, graph and copy": (forward, "_queue"),
        "graph": (forward._graphs, "replay"),
        "mark": (forward._stream, "mark"),
    }
    for name, took in timing.times_of_parts(runner, rows, context, parts).items():
        note(f"decode {rows} x {context}: host, {name}", took, "us", shown=True)


def time_decodes(runner: ModelRunner, rows: int, context: int) -> None:
    """Time one size of decode steps: one after the other, and what of it the device and the host take."""
    loop = timing.loop_ms(runner, rows, context)
    device = _device_ms(runner, rows)
    host = timing.host_us(runner, rows, context)
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
    return milliseconds(lambda: graphs.replay(GraphKey(min(sizes))), 10) if sizes and graphs else float("nan")


def time_batch(timer: StepTimer, name: str, batch: MeasuredBatch, *, at_most: float | None = None) -> None:
    """Time a step that is no plain decode."""
    took = timing.wall_ms(timer, batch, seconds=0.5)
    note(name, took, "ms", at_most=at_most, shown=True)
    keep_step(engine="cuda", kind=name, wall_ms=round(took, 3))


def show_kernels(timer: StepTimer, name: str, batch: MeasuredBatch) -> None:
    """Keep where the time of a step goes, and print the most of it."""
    kernels = timing.kernel_times(timer, batch)
    keep_rows("kernels.csv", ("case", *timing.KernelTime._fields), [(name, *each) for each in kernels])
    note(f"{name}: kernels' time", sum(each.ms for each in kernels), "ms")
    note(f"{name}: kernels", sum(each.calls for each in kernels))
    for each in kernels[:12]:
        print(f"    {each.ms:8.3f} ms  {each.calls:6.0f} calls  {each.name[:110]}", flush=True)


def time_others(runner: ModelRunner, num_blocks: int, prompts: dict[int, float | None]) -> None:
    """Time prompts, skewed and mixed steps, and show where the time of some goes."""
    with timing.step_timer(runner, num_blocks) as timer:
        for length, most in prompts.items():
            if seconds_left() > 6:
                time_batch(timer, f"prompt {length}", timing.prompt(length), at_most=most)
        few, long = (4, 200) if IS_REHEARSAL else (31, 16384)
        skewed = MeasuredBatch((*timing.decodes(few, 512 // (16384 // long)).rows, BatchRow(long - 1, 1)))
        time_batch(timer, f"decode {few} x 512 + 1 x {long}", skewed)
        mixed = MeasuredBatch((*timing.decodes(few, 64).rows, BatchRow(0, min(512, long))))
        time_batch(timer, f"{few} decodes + prompt {min(512, long)}", mixed)
        for rows in (1, MAX_ROWS // 4, MAX_ROWS):
            if seconds_left() > 8:
                show_kernels(timer, f"decode {rows} x {CONTEXT}", timing.decodes(rows, CONTEXT))
        if seconds_left() > 8:
            show_kernels(timer, "prompt", timing.prompt(64 if IS_REHEARSAL else 2048))


def mixed_steps() -> dict[str, MeasuredBatch]:
    """Return small steps that are no pure decodes."""
    if IS_REHEARSAL:
        return {
            "2 decodes + 20 of a prompt": MeasuredBatch((*timing.decodes(2, 64).rows, BatchRow(0, 20))),
            "2 rows verify 3 drafts": MeasuredBatch((BatchRow(60, 4, num_drafts=3),) * 2),
        }
    found = {"prompt 64": timing.prompt(64), "prompt 256": timing.prompt(256)}
    for rows, chunk in ((8, 56), (31, 97), (31, 225), (31, 481)):
        name = f"{rows} decodes + {chunk} of a prompt"
        found[name] = MeasuredBatch((*timing.decodes(rows, 512).rows, BatchRow(0, chunk)))
    for rows in (1, 8, 31):
        found[f"{rows} rows verify 3 drafts"] = MeasuredBatch((BatchRow(512, 4, num_drafts=3),) * rows)
    return found


def time_mixed(weights: TorchWeights, runner: ModelRunner, num_blocks: int) -> None:
    """Time small steps with prompts and drafts, operator by operator and in pieces."""
    for way in ("one by one", "in pieces"):
        try:
            if way == "in pieces":
                num_blocks = 32_000 // timing.BLOCK_SIZE  # the other runner's are still there
                runner = make_noted("graphs and pieces", weights, num_blocks, pieces=True, max_rows=32)
            for how, sampling in WAYS_TO_CHOOSE.items():
                with timing.step_timer(runner, num_blocks, sampling) as timer:
                    for name, batch in mixed_steps().items():
                        if seconds_left() > 6 and (sampling == timing.GREEDY or "verify" in name):
                            time_batch(timer, f"{name}, {way}, {how}", batch)
                    # What kernels and copies leave of the time of the last one is launches and the host.
                    if seconds_left() > 8 and way == "one by one":
                        show_kernels(timer, f"{name}, {way}, {how}", batch)
                    if seconds_left() > 8 and sampling == timing.GREEDY:
                        show_kernels(timer, f"{MIXED}, {way}", mixed_steps()[MIXED])
        except Exception as error:
            note_failure(f"steps {way}", error)


def main() -> int:
    config = model_config("8b")
    start = time.monotonic()
    weights = load_weights(DummyCheckpoint(config), torch.bfloat16, torch.device(DEVICE))
    note("making the weights", time.monotonic() - start, "s")
    decode_cases = [(2, 64), (5, 96)] if IS_REHEARSAL else [*DECODES, *LONGER]
    prompts: dict[int, float | None] = {64: None} if IS_REHEARSAL else {**PROMPTS}
    # The skewed case takes 31 x 512 and 1 x 16,384 tokens, the largest one some more.
    num_blocks = 1 + max(
        rows * (-(-context // timing.BLOCK_SIZE) + 5) for rows, context in [*decode_cases, (1, 16384)]
    )
    runner = make_noted("graphs", weights, num_blocks)
    for rows, context in decode_cases:
        if seconds_left() > 6:
            time_decodes(runner, rows, context)
    for rows in (1, MAX_ROWS):
        note_host_parts(runner, rows, CONTEXT)
    time_others(runner, num_blocks, prompts)
    time_mixed(weights, runner, num_blocks)  # pieces may spoil the device for what comes behind
    _prompts_by_fa3(weights, prompts)
    if not IS_REHEARSAL:
        note("most memory", torch.cuda.max_memory_reserved() / 2**30, "GiB", shown=True)
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        note("memory that torch keeps unused", unused / 2**30, "GiB", shown=True)
    expect("all sizes were timed", seconds_left() > 6)
    return 0


def _prompts_by_fa3(weights: TorchWeights, prompts: dict[int, float | None]) -> None:
    """Time prompts by FlashAttention-3, whose kernel not every machine has."""
    try:
        runner = make_runner(weights, 600, max_rows=1, chunk_backend="fa3")
        with timing.step_timer(runner, 600) as timer:
            for length in prompts:
                if seconds_left() > 6:
                    time_batch(timer, f"prompt {length} by fa3", timing.prompt(length))
    except Exception as error:
        note_failure("prompts by fa3", error)


if __name__ == "__main__":
    sys.exit(main())
