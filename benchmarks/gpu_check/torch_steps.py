"""Stage T: steps of Llama-3.1-8B's shapes on the reference engine (`TorchForward`), with random weights."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.gpu_check.models import floor_ms, model_config
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, keep_step, note, seconds_left
from benchmarks.gpu_check.timing import (
    BLOCK_SIZE,
    KernelTimes,
    decodes,
    kernel_times,
    loop_ms,
    prompt,
    runner_of,
    step_timer,
    wall_ms,
)
from onbeat.engine.models.model import build_model
from onbeat.engine.torch_backend import TorchForward
from onbeat.engine.weights.dummy import DummyCheckpoint

CASES = (
    *(("decode", rows, 512) for rows in (1, 8, 32, 128)),
    *(("decode", rows, 2048) for rows in (1, 32)),
    *(("prompt", 1, length) for length in (512, 2048, 8192)),
)


def main() -> int:
    config = model_config("8b")
    cases = (
        [(kind, min(rows, 8), min(length, 128)) for kind, rows, length in CASES] if IS_REHEARSAL else CASES
    )
    start = time.monotonic()
    model = build_model(DummyCheckpoint(config), dtype=torch.bfloat16, device=torch.device(DEVICE))
    num_blocks = 1 + max(rows * (-(-length // BLOCK_SIZE) + 3) for _, rows, length in cases)
    forward = TorchForward(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    note("torch: making the model", time.monotonic() - start, "s")
    max_len = max(length for _, _, length in cases) + 64
    runner = runner_of(forward, num_blocks=num_blocks, max_rows=128, max_len=max_len)
    runner.warm_up()
    print("warm", flush=True)
    for rows in dict.fromkeys(rows for kind, rows, _ in cases if kind == "decode"):
        context = 64 if IS_REHEARSAL else 512
        took = loop_ms(runner, rows, context, 20)
        note(f"torch: decode {rows} x {context}: a step in the loop", took, "ms", shown=True)
    with step_timer(runner, num_blocks) as timer:
        for kind, rows, length in dict.fromkeys(cases):
            if seconds_left() < 6:
                note("torch: not measured, for want of time", f"{kind} {rows} x {length}")
                continue
            batch = decodes(rows, length) if kind == "decode" else prompt(length)
            took = wall_ms(timer, batch)
            kernels = kernel_times(timer, batch, 1)
            floor = floor_ms(config, rows, length) if kind == "decode" else float("nan")
            note(f"torch: {kind} {rows} x {length}", took, "ms", shown=True)
            if kernels is not None:
                _describe(kind, rows, length, kernels)
            keep_step(
                engine="torch",
                kind=kind,
                rows=rows,
                context=length,
                wall_ms=round(took, 3),
                device_ms="" if kernels is None else round(kernels.device_ms, 3),
                floor_ms=round(floor, 3),
                note="" if kernels is None else f"{kernels.num_kernels:.0f} kernels",
            )
    if not IS_REHEARSAL:
        note("torch: most memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return 0


def _describe(kind: str, rows: int, length: int, kernels: KernelTimes) -> None:
    note(f"torch: {kind} {rows} x {length}: kernels' time", kernels.device_ms, "ms")
    for name, took, calls in kernels.largest[:6]:
        print(f"    {took:8.3f} ms  {calls:6.0f} calls  {name[:110]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
