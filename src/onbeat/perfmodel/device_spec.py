"""What a device can do: memory, bandwidth, arithmetic and links, from data sheets or from a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.perfmodel.measure_cpu import CPULimits, measure_cpu, memory_bytes_of_machine
from onbeat.perfmodel.precision import BYTES
from onbeat.perfmodel.product_rates import ProductRates
from onbeat.perfmodel.spec_file import check_fields, is_spec_file, positive, read_fields, text, texts

CPU = "cpu"
_NEEDED = ("memory_gib", "memory_bandwidth_gb_s", "peak_tflops")
_LINKS = ("nvlink_gb_s", "pcie_gb_s")
_OTHERS = ("name", "architecture", *_LINKS, "tdp_watts", "sources")

GPU_IDS = {
    "A100-SXM4-40GB": "a100-40-sxm",
    "A100-SXM4-80GB": "a100-80-sxm",
    "H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "H200": "h200",
    "B200": "b200",
    "L4": "l4",
    "A10G": "a10g",
    "L40S": "l40s",
    "A40": "a40",
    "V100-SXM2-32GB": "v100",
}
"""Names of the driver, and the data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Limits of one device. Rates are peaks; what of them can be reached is the roofline's matter."""

    id: str
    name: str
    architecture: str
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    peak_flops: Mapping[str, float]
    """Number format -> dense floating-point operations per second."""
    product_rates: ProductRates = ()
    """Measured, of matrix products by their rows; empty where products of all sizes reach one share of the
    peak."""
    nvlink_bandwidth: float | None = None
    """Bytes per second of one device, both directions together; None without such links."""
    pcie_bandwidth: float | None = None
    """Bytes per second, both directions together."""
    tdp_watts: float | None = None
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

    @property
    def link_bandwidth(self) -> float | None:
        """Bytes per second to another device of the same replica, in one direction; None with no link."""
        both = self.nvlink_bandwidth or self.pcie_bandwidth
        return None if both is None else both / 2


def device_ids() -> tuple[str, ...]:
    """Return the ids that `find_device` takes, beside files."""
    return (*_table(), CPU)


def known_device(name: str) -> str | None:
    """Return the id of the data sheet of a GPU by the driver's name for it; None where there is none."""
    return GPU_IDS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))


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
        return _measured_cpu()
    if is_spec_file(device_id):
        return _from_yaml(device_id, read_fields(device_id, "device"), device_id)
    try:
        return _table()[device_id]
    except KeyError:
        name = device_id.lower()
        near = [known for known in device_ids() if name and known.startswith(name)]
        near = near or list(filter(None, [likely_meant(name, device_ids())]))
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(device_ids())
        raise ConfigError(
            f"unknown device {device_id!r}: {hint}known are {known}, or a file of your own, FILE.yaml"
        ) from None


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

    Raises
    ------
    ConfigError : a limit that is not above 0.
    """
    rates = peak_flops if isinstance(peak_flops, Mapping) else dict.fromkeys(BYTES, peak_flops)
    of_products = dict(product_rates)
    if not (memory_bandwidth > 0 and all(rate > 0 for rate in (*rates.values(), *of_products.values()))):
        by_rows = f", by rows {of_products}" if of_products else ""
        raise ConfigError(
            f"CPU limits must be above 0; got {memory_bandwidth:g} bytes/s and {dict(rates)} operations/s"
            f"{by_rows}"
        )
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
def _measured_cpu() -> DeviceSpec:
    limits: CPULimits = measure_cpu()
    return cpu_device(
        memory_bandwidth=limits.memory_bandwidth,
        peak_flops=limits.peak_flops,
        product_rates=limits.product_rates,
    )


@cache
def _table() -> Mapping[str, DeviceSpec]:
    text = files("onbeat.perfmodel").joinpath("data", "devices.yaml").read_text("utf-8")
    return MappingProxyType({id_: _from_yaml(id_, entry, id_) for id_, entry in yaml.safe_load(text).items()})


def _from_yaml(device_id: str, entry: Any, where: str) -> DeviceSpec:
    """Return the device of an entry; `where` tells in errors which it is."""
    check_fields(entry, where, needed=_NEEDED, others=_OTHERS)
    numbers = {
        name: positive(entry[name], f"{name} of {where}")
        for name in (*_NEEDED[:2], *_LINKS, "tdp_watts")
        if entry.get(name) is not None
    }
    if missing := [name for name in _NEEDED if entry[name] is None]:
        raise ConfigError(f"{missing[0]} of {where} is empty; give a number")
    links = {name: numbers[name] * 1e9 if name in numbers else None for name in _LINKS}
    return DeviceSpec(
        id=device_id,
        name=text(entry.get("name", device_id), f"name of {where}"),
        architecture=text(entry.get("architecture", "gpu"), f"architecture of {where}"),
        memory_bytes=numbers["memory_gib"] * 2**30,
        memory_bandwidth=numbers["memory_bandwidth_gb_s"] * 1e9,
        peak_flops=_peaks(entry["peak_tflops"], f"peak_tflops of {where}"),
        nvlink_bandwidth=links["nvlink_gb_s"],
        pcie_bandwidth=links["pcie_gb_s"],
        tdp_watts=numbers.get("tdp_watts"),
        sources=texts(entry.get("sources", {}), f"sources of {where}"),
    )


def _peaks(entry: Any, where: str) -> Mapping[str, float]:
    if not isinstance(entry, dict) or not entry:
        raise ConfigError(f"{where} is {entry!r}; give rates by number format, such as {{bf16: 312}}")
    if unknown := [name for name in entry if name not in BYTES]:
        raise ConfigError(f"{where} has the number format {unknown[0]!r}; known are {', '.join(BYTES)}")
    return MappingProxyType(
        {name: positive(tera, f"{where}, {name},") * 1e12 for name, tera in entry.items()}
    )
