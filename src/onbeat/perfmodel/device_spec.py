"""What a device can do: memory, bandwidth, arithmetic and links, from data sheets or from a measurement.

The CPU of this machine is measured with numpy alone, in under two seconds. Its matrix products of few rows
may run by other instructions than those of many, so that each number of rows has a rate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf, log2
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.files import packaged, read
from onbeat.perfmodel.precision import BYTES
from onbeat.typed import NotNegative, Positive, Size, Table, Text


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Degrees of tensor and pipeline parallelism.

    Raises
    ------
    ConfigError : a degree below 1.
    """

    tensor: int = 1
    """Devices that share every layer (TP)."""
    pipeline: int = 1
    """Stages that the layers are cut into (PP)."""

    def __post_init__(self) -> None:
        for name, degree in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if degree < 1:
                raise ConfigError(f"the {name}-parallel degree is {degree}; it must be at least 1")

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}"


ROW_COUNTS = tuple(2**power for power in range(10))
"""Rows of the products that are measured; one of more rows computes at the rate of the last."""

ProductRates = tuple[tuple[Size, Positive], ...]
"""(rows, operations per second), rows ascending."""

SMOOTHNESS = 3.0
"""That of the roofline's soft maximum, of which the arithmetic is one part: `(a^p + b^p)^(1/p)`."""


def product_rates(
    seconds: Mapping[int, float], *, flops_per_row: float, reading_seconds: float, peak: float
) -> ProductRates:
    """Return the rates of arithmetic alone, such that no product takes less time than one of fewer rows.

    Measured times are too long where something else had the processor, never too short. So what is less
    counts: the time of more rows, of which fewer could be made by padding; and that of fewer rows as often as
    it takes to make more of them.

    Parameters
    ----------
    seconds : measured, by number of rows.
    flops_per_row : operations of a product for each row.
    reading_seconds : what reading the weights takes where no cache holds them; the time of one row tells.
    peak : the rate that none exceeds, operations per second.
    """
    rows = sorted(seconds)
    taken = np.array([seconds[num_rows] for num_rows in rows])
    least = np.array(rows) * (flops_per_row / peak)
    reading = reading_seconds if reading_seconds <= taken[0] else 0.0
    # What the soft maximum of both makes the measured time again.
    arithmetic = np.maximum(taken**SMOOTHNESS - reading**SMOOTHNESS, 0.0) ** (1 / SMOOTHNESS)
    per_row = np.minimum.accumulate(np.maximum(arithmetic, least) / rows)
    smooth = np.minimum.accumulate((per_row * rows)[::-1])[::-1]
    return tuple(
        (num_rows, num_rows * flops_per_row / float(value))
        for num_rows, value in zip(rows, smooth, strict=True)
    )


def best_rates(first: ProductRates, second: ProductRates) -> ProductRates:
    """Return the higher rate of two measurements, for each number of rows that one of them has."""
    found = dict(first)
    for num_rows, rate in second:
        found[num_rows] = max(rate, found.get(num_rows, 0.0))
    return tuple(sorted(found.items()))


def row_costs(rates: ProductRates, peak: float) -> Sequence[float]:
    """Return for 0, 1, ... rows how many rows at the peak rate take as long as these.

    Between the measured numbers of rows, time is linear on logarithmic scales; the last entry is that of the
    most rows measured, beyond which costs are proportional. Empty where nothing was measured.
    """
    if not rates:
        return ()
    knots = np.log([num_rows for num_rows, _ in rates])
    costs = np.log([num_rows * peak / rate for num_rows, rate in rates])
    rows = np.arange(1, rates[-1][0] + 1)
    return (0.0, *np.exp(np.interp(np.log(rows), knots, costs)).tolist())


_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATRIX_SIZE = 1024
_BUDGET_SECONDS = 0.5
_ROWS_SECONDS = 0.04
"""For the products of each number of rows."""


@cache
def measure_cpu() -> DeviceSpec:
    """Return this machine, by its read bandwidth and the rates of matrix products of numpy's linear algebra.

    Of float32, and measured once a process: the best of what fits in about 1.5 s, not the mean, as another
    program can only take time away.
    """
    values = np.ones(_READ_BYTES // 4, dtype=np.float32)
    left = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    out = np.empty_like(left)
    # A dot product reads both operands once; one array twice would be read from cache the second time.
    half = len(values) // 2
    read = shortest(lambda: np.dot(values[:half], values[half:]))
    product = shortest(lambda: np.matmul(left, left, out=out))
    by_rows = {
        rows: shortest(partial(np.matmul, left[:rows], left, out=out[:rows]), _ROWS_SECONDS)
        for rows in ROW_COUNTS
    }
    bandwidth, flops_per_row = _READ_BYTES / read, 2.0 * _MATRIX_SIZE**2
    peak = max(_MATRIX_SIZE / product, *(rows / seconds for rows, seconds in by_rows.items())) * flops_per_row
    return cpu_device(
        memory_bandwidth=bandwidth,
        peak_flops=peak,
        product_rates=product_rates(
            by_rows, flops_per_row=flops_per_row, reading_seconds=left.nbytes / bandwidth, peak=peak
        ),
    )


def shortest(work: Callable[[], object], budget: float = _BUDGET_SECONDS, *, least_runs: int = 1) -> float:
    """Return the seconds of the quickest of several runs; the first, which warms up, does not count.

    Parameters
    ----------
    budget : seconds, which more than `least_runs` keep to.
    """
    work()
    best, num_runs, deadline = inf, 0, perf_counter() + budget
    while num_runs < least_runs or perf_counter() < deadline:
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
        num_runs += 1
    return best


def memory_bytes_of_machine() -> float:
    """Return the machine's main memory, bytes.

    Raises
    ------
    ConfigError : the operating system does not tell.
    """
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError) as error:
        raise ConfigError("the operating system does not tell its memory size") from error


CPU = "cpu"
PCIE_HOP_US, PCIE_LEFT = 3.0, 0.73
"""Of devices that say nothing of their own (`data/devices.yaml` has the sources)."""
_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]")


Rate = Annotated[float, Meta(gt=0, le=1e12)]


class _Sheet(Table, kw_only=True):
    """An entry of `data/devices.yaml`, or a file of a user."""

    name: Text | None = None
    aliases: tuple[str, ...] = ()
    architecture: Text = "gpu"
    memory_gib: Rate
    memory_bandwidth_gb_s: Rate
    peak_tflops: Annotated[dict[str, Rate], Meta(min_length=1)]
    nvlink_gb_s: Rate | None = None
    pcie_gb_s: Rate | None = None
    nvlink_devices: Rate | None = None
    pcie_hop_us: Rate = PCIE_HOP_US
    pcie_left: Rate = PCIE_LEFT
    tdp_watts: Rate | None = None
    sources: dict[str, Text] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.peak_tflops if name not in BYTES]:
            raise ConfigError(
                f"peak_tflops has the number format {unknown[0]!r}; known are {', '.join(BYTES)}"
            )

    def device(self, device_id: str) -> DeviceSpec:
        """Return the device of this id."""
        return DeviceSpec(
            id=device_id,
            name=self.name or device_id,
            architecture=self.architecture,
            memory_bytes=self.memory_gib * 2**30,
            memory_bandwidth=self.memory_bandwidth_gb_s * 1e9,
            peak_flops=MappingProxyType({name: tera * 1e12 for name, tera in self.peak_tflops.items()}),
            nvlink_bandwidth=None if self.nvlink_gb_s is None else self.nvlink_gb_s * 1e9,
            pcie_bandwidth=None if self.pcie_gb_s is None else self.pcie_gb_s * 1e9,
            nvlink_devices=self.nvlink_devices,
            pcie_hop_us=self.pcie_hop_us,
            pcie_left=self.pcie_left,
            tdp_watts=self.tdp_watts,
            sources=MappingProxyType(self.sources),
        )


class Link(NamedTuple):
    """What joins devices of a replica: bytes per second to another one, and the start of an all-reduce."""

    bandwidth: float
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Limits of one device. Rates are peaks; what of them can be reached is the roofline's matter."""

    id: str
    name: str
    architecture: str
    memory_bytes: Positive
    memory_bandwidth: Positive
    """Bytes per second."""
    peak_flops: Mapping[str, Positive]
    """Number format -> dense floating-point operations per second."""
    product_rates: ProductRates = ()
    """Measured, of matrix products by their rows; empty: all sizes reach one share of the peak."""
    nvlink_bandwidth: NotNegative | None = None
    """Bytes per second of one device, both directions together; None without such links."""
    pcie_bandwidth: NotNegative | None = None
    """Bytes per second, both directions together."""
    nvlink_devices: NotNegative | None = None
    """How many devices such links join, more talk over PCIe; None: all."""
    pcie_hop_us: NotNegative = PCIE_HOP_US
    """Microseconds that an all-reduce over PCIe takes to start, for each of its devices."""
    pcie_left: NotNegative = PCIE_LEFT
    """Share of the PCIe bandwidth that is left when two devices become four, or four eight."""
    tdp_watts: NotNegative | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Return the peak arithmetic rate in a number format, operations per second.

        Raises
        ------
        ConfigError : the device has no arithmetic of this format.
        """
        try:
            return self.peak_flops[dtype]
        except KeyError:
            known = ", ".join(self.peak_flops)
            raise ConfigError(
                f"{self.name} does not compute in {dtype}; it has {known}: choose one of these "
                "(--dtype), or another device"
            ) from None

    def link(self, num_devices: int) -> Link | None:
        """Return what joins so many devices of one replica; None where nothing does."""
        if self.nvlink_bandwidth and num_devices <= (self.nvlink_devices or inf):
            return Link(self.nvlink_bandwidth / 2, 0.0)
        if not self.pcie_bandwidth:
            return None
        left = self.pcie_left ** (log2(num_devices) - 1)
        return Link(self.pcie_bandwidth / 2 * left, self.pcie_hop_us * 1e-6 * num_devices)


def is_spec_file(name: str) -> bool:
    """Return whether a name is that of a file, and not of something in the package."""
    return name.lower().endswith((".yaml", ".yml"))


def device_ids() -> tuple[str, ...]:
    """Return the ids that `find_device` takes, beside files."""
    return (*_table(), CPU)


def known_device(name: str) -> str | None:
    """Return the id of a GPU's data sheet by any of its names, the driver's too; None where there is none."""
    return _names().get(_plain(name))


def _plain(name: str) -> str:
    return _MAKERS.sub("", name.lower())


def is_gpu(device_id: str) -> bool:
    """Whether an id is one of the table: any but that of this machine's CPU."""
    return device_id in _table()


def find_device(device_id: str) -> DeviceSpec:
    """Return a device by its id; `cpu` is this machine, measured once a process (under 2 s).

    Parameters
    ----------
    device_id : one of `device_ids`, or the path of a YAML file with the fields of an entry of
        `data/devices.yaml`, of which the id of the device is then the path.

    Raises
    ------
    ConfigError : an unknown id, near matches are named; or a file that is not there or says something wrong.
    """
    if device_id == CPU:
        return measure_cpu()
    if is_spec_file(device_id):
        return read(_Sheet, Path(device_id), "the device in").device(device_id)
    if known := known_device(device_id):
        return _table()[known]
    name = device_id.lower()
    near = [each for each in device_ids() if name and each.startswith(name)]
    near = near or list(filter(None, [likely_meant(name, device_ids())]))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"unknown device {device_id!r}: {hint}known are {', '.join(device_ids())}, or a file of your own, "
        "FILE.yaml"
    )


def cpu_device(
    *,
    memory_bandwidth: float,
    peak_flops: float | Mapping[str, float],
    memory_bytes: float | None = None,
    product_rates: ProductRates = (),
    architecture: str = CPU,
) -> DeviceSpec:
    """Return this machine as a device with measured limits.

    Parameters
    ----------
    memory_bandwidth : bytes per second that all used threads together read.
    peak_flops : operations per second of a matrix product, of every number format or by format.
    memory_bytes : of the machine if not given.
    product_rates : of matrix products by their rows; without them the peak is the rate of all.
    architecture : what computes there, `cpu` or `cpu-native`: whose default parameters the roofline takes.
    """
    rates = peak_flops if isinstance(peak_flops, Mapping) else dict.fromkeys(BYTES, peak_flops)
    return DeviceSpec(
        id=CPU,
        name="this CPU",
        architecture=architecture,
        memory_bytes=memory_bytes if memory_bytes is not None else memory_bytes_of_machine(),
        memory_bandwidth=memory_bandwidth,
        peak_flops=MappingProxyType(dict(rates)),
        product_rates=product_rates,
        sources={"all": "measured on this machine"},
    )


@cache
def _entries() -> Mapping[str, _Sheet]:
    return packaged(dict[str, _Sheet], "onbeat.perfmodel", "devices.yaml")


@cache
def _table() -> Mapping[str, DeviceSpec]:
    return MappingProxyType({id_: entry.device(id_) for id_, entry in _entries().items()})


@cache
def _names() -> Mapping[str, str]:
    """Every name of a device, as `_plain` makes it -> its id."""
    return {
        _plain(name): id_
        for id_, entry in _entries().items()
        for name in (id_, entry.name or id_, *entry.aliases)
    }
