"""Stage B: what the device reaches at best; other stages are compared with it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, note

NUM_KERNELS = 1000


def milliseconds(work: Callable[[], object], num_runs: int = 20) -> float:
    """Return the median time of some runs, by events of the device; by the clock where it is a CPU."""
    for _ in range(3):
        work()
    if DEVICE == "cpu":
        return statistics.median(_on_cpu(work) for _ in range(num_runs))
    pairs = []
    for _ in range(num_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def graph_milliseconds(work: Callable[[], object], num_calls: int = 10) -> float:
    """Return the time of a call inside a captured graph, where the host's time does not count."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            work()
    return milliseconds(graph.replay) / num_calls


def _on_cpu(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


@torch.inference_mode()
def main() -> int:
    num_bytes = 2**24 if IS_REHEARSAL else 2**31
    size = 256 if IS_REHEARSAL else 8192
    source = torch.randn(num_bytes // 4, device=DEVICE)
    target = torch.empty_like(source)
    note("read bandwidth", num_bytes / milliseconds(lambda: source.sum()) / 1e9, "TB/s", shown=True)
    note(
        "copy bandwidth", 2 * num_bytes / milliseconds(lambda: target.copy_(source)) / 1e9, "TB/s", shown=True
    )
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: left @ right)
    note(f"bf16 product {size}^3", 2 * size**3 / product / 1e9, "TFLOP/s", shown=True)
    _skinny_products()
    if not IS_REHEARSAL:
        _graph_of_kernels()
        pinned = torch.empty(2**16, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(pinned, device=DEVICE)
        note("pinned copy of 64 KB", milliseconds(lambda: there.copy_(pinned, non_blocking=True)) * 1e3, "us")
        note("launch of a kernel", _host_microseconds(lambda: there.zero_()), "us")
    return 0


def _skinny_products() -> None:
    """Time the products of one layer of Llama-3.1-8B, over several copies so that no cache holds them."""
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    num_copies = 1 if IS_REHEARSAL else 8
    for name, (num_out, num_in) in shapes.items():
        if IS_REHEARSAL:
            num_out, num_in = num_out // 64, num_in // 64
        weights = [
            torch.randn(num_out, num_in, device=DEVICE, dtype=torch.bfloat16) for _ in range(num_copies)
        ]
        for num_rows in (1,) if IS_REHEARSAL else (1, 8, 32, 128):
            x = torch.randn(num_rows, num_in, device=DEVICE, dtype=torch.bfloat16)
            took = milliseconds(partial(_products, x, weights)) / num_copies
            note(f"product {name}, {num_rows} rows", num_out * num_in * 2 / took / 1e9, "TB/s")


def _products(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x @ weight.T for weight in weights]


def _graph_of_kernels() -> None:
    small = torch.zeros(32, device=DEVICE)
    small.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_KERNELS):
            small.add_(1)
    took = milliseconds(graph.replay)
    note("a small kernel in a graph", took * 1e3 / NUM_KERNELS, "us", shown=True)
    note("host time of a replay", _host_microseconds(graph.replay, num_runs=20), "us")


def _host_microseconds(work: Callable[[], object], num_runs: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_runs):
        work()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took * 1e6 / num_runs


if __name__ == "__main__":
    sys.exit(main())
