"""What kernels reach of the data sheets' peaks: the numbers of `perfmodel/data/architectures.yaml`.

    python -m benchmarks.check.operators

`benchmarks/data/operators.csv.gz` holds measured times of single kernels, of vLLM, SGLang, TensorRT-LLM
and NCCL. The numbers of a device are medians over its engines, those of an architecture means over its
devices. None is fitted to a time of a whole step or a whole engine.

* Products of 8 rows read their weights: time = start + bytes / (share x bandwidth), by least squares on
  the relative error. Products of 4,096 rows compute: their share of the peak is the median.
* Decode attention that would read KV for 0.1 ms or more at the peak, and takes longer than that: the
  median share. Times below the peak's come from a cache. Its start is the median time of one request's.
* Prompts of 2,048 tokens and more: the median share of 16-bit arithmetic, causal.
* An all-reduce's start is the time of 2 KB; its bandwidth is that of 512 MB, as bytes that cross each
  device's link in one direction.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from benchmarks.harness.pages import REPOSITORY
from onbeat.perfmodel.device_spec import DeviceSpec, find_device
from onbeat.perfmodel.precision import bytes_of

DATA = REPOSITORY / "benchmarks" / "data" / "operators.csv.gz"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of all attention in the file."""
FEW_ROWS, MANY_ROWS = 8, 4096
LONG_READ = 1e-4
SMALL_KERNELS = 4e-6
"""Norms, rotation and activation of a layer: four kernels of 1 us."""
PRODUCTS = 4
"""Of a layer: queries, keys and values; output; gate and up; down."""


class Kernel(NamedTuple):
    """A row of the file.

    `rows`, `width`, `depth` are m, n, k of a product; requests and context; devices and bytes.
    """

    device: str
    engine: str
    operator: str
    format: str
    rows: int
    width: int
    depth: int
    seconds: float


def read_kernels() -> list[Kernel]:
    with gzip.open(DATA, "rt", newline="") as file:
        return [
            Kernel(
                row["device"],
                row["engine"],
                row["operator"],
                row["format"],
                *(int(row["rows"] or 0), int(row["width"] or 0), int(row["depth"] or 0)),
                seconds=float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]


def reached(device: DeviceSpec, kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return an architecture's fields as one engine's kernels have them; those of `narrow` say so."""
    of: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        of[kernel.operator, kernel.format].append(kernel)
    starts, shares = {}, {}
    for dtype in ("bf16", "fp8"):
        if products := of["product", dtype]:
            few = [each for each in products if each.rows <= FEW_ROWS]
            starts[dtype], shares[dtype] = _reading(device, few)
    decode, prompt = of["decode", "bf16"], of["prompt", "bf16"]
    first = median(each.seconds for each in decode if each.rows == 1)
    reads = [(_kv_seconds(device, each), each.seconds) for each in decode]
    kept = [ideal / real for ideal, real in reads if LONG_READ <= ideal < real]
    found = {
        "weight_bandwidth_efficiency": shares["bf16"],
        "gemm_efficiency": _computing(device, of["product", "bf16"]),
        "attention_efficiency": median(_prompt_share(device, each) for each in prompt),
        "layer_seconds": PRODUCTS * max(starts["bf16"], 0.0) + first + SMALL_KERNELS,
    }
    if kept:
        found["kv_bandwidth_efficiency"] = median(kept)
    if "fp8" in shares:
        found["narrow weight_bandwidth_efficiency"] = shares["fp8"]
        found["narrow gemm_efficiency"] = _computing(device, of["product", "fp8"])
    return found


def _reading(device: DeviceSpec, products: Iterable[Kernel]) -> tuple[float, float]:
    pairs = [(k.width * k.depth * bytes_of(k.format) / device.memory_bandwidth, k.seconds) for k in products]
    ideal, real = np.array(pairs).T
    columns = np.column_stack([np.ones_like(ideal), ideal]) / real[:, None]
    (start, slope), *_ = np.linalg.lstsq(columns, np.ones_like(real), rcond=None)
    return float(start), float(1 / slope)


def _computing(device: DeviceSpec, products: Iterable[Kernel]) -> float:
    return median(
        2 * k.rows * k.width * k.depth / k.seconds / device.peak(k.format)
        for k in products
        if k.rows >= MANY_ROWS
    )


def _kv_seconds(device: DeviceSpec, decode: Kernel) -> float:
    return decode.rows * decode.width * 2 * KV_HEADS * HEAD_DIM * 2 / device.memory_bandwidth


def _prompt_share(device: DeviceSpec, prompt: Kernel) -> float:
    pairs = prompt.rows * prompt.width**2 / 2
    return 4 * pairs * HEADS * HEAD_DIM / prompt.seconds / device.peak("bf16")


def by_architecture() -> Mapping[str, Mapping[str, float]]:
    """Return the numbers of every architecture in the file."""
    engines: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in read_kernels():
        if kernel.engine != "nccl":
            engines[kernel.device, kernel.engine].append(kernel)
    devices: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (name, _), kernels in engines.items():
        devices[name].append(reached(find_device(name), kernels))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, each in devices.items():
        fields = set().union(*each)
        found[find_device(name).architecture].append(
            {key: median(one[key] for one in each if key in one) for key in sorted(fields)}
        )
    return {name: {key: fmean(one[key] for one in each) for key in each[0]} for name, each in found.items()}


def all_reduces() -> list[tuple[str, int, float, float]]:
    """Return device, number of devices, start in seconds and bandwidth in bytes per second."""
    times = {(k.device, k.rows, k.width): k.seconds for k in read_kernels() if k.operator == "all-reduce"}
    small, large = min(size for _, _, size in times), max(size for _, _, size in times)
    return [
        (device, num, times[device, num, small], 2 * (num - 1) / num * large / times[device, num, large])
        for device, num, size in sorted(times)
        if size == small
    ]


def main() -> None:
    print("| architecture | field | reached |\n|---|---|---:|")
    for name, found in by_architecture().items():
        for field, value in found.items():
            print(f"| {name} | {field} | {value:.3g} |")
    print("\n| device | devices | start, us | GB/s | share of the link |\n|---|---:|---:|---:|---:|")
    for device, num, start, rate in all_reduces():
        spec = find_device(device)
        peak = (spec.nvlink_bandwidth or spec.pcie_bandwidth or 0.0) / 2
        print(f"| {device} | {num} | {1e6 * start:.1f} | {rate / 1e9:.1f} | {rate / peak:.2f} |")


if __name__ == "__main__":
    main()
