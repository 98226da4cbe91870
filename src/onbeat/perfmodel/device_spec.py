"""What a device can do: memory, bandwidth, arithmetic and links, from data sheets or from a measurement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import inf, log2
from types import MappingProxyType
from typing import Any, NamedTuple

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
_SHARED = ("nvlink_devices", "pcie_hop_us", "pcie_left")
_OTHERS = ("name", "aliases", "architecture", *_LINKS, *_SHARED, "tdp_watts", "sources")
PCIE_HOP_US, PCIE_LEFT = 3.0, 0.73
"""Of devices that say nothing of their own (`data/devices.yaml` has the sources)."""
_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]")


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
    nvlink_devices: float | None = None
    """How many devices such links join, more talk over PCIe; None: all."""
    pcie_hop_us: float = PCIE_HOP_US
    """Microseconds that an all-reduce over PCIe takes to start, for each of its devices."""
    pcie_left: float = PCIE_LEFT
    """Share of the PCIe bandwidth that is left when two devices become four, or four eight."""
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

    def link(self, num_devices: int) -> Link | None:
        """Return what joins so many devices of one replica; None where nothing does."""
        if self.nvlink_bandwidth and num_devices <= (self.nvlink_devices or inf):
            return Link(self.nvlink_bandwidth / 2, 0.0)
        if not self.pcie_bandwidth:
            return None
        left = self.pcie_left ** (log2(num_devices) - 1)
        return Link(self.pcie_bandwidth / 2 * left, self.pcie_hop_us * 1e-6 * num_devices)


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
        return _measured_cpu()
    if is_spec_file(device_id):
        return _from_yaml(device_id, read_fields(device_id, "device"), device_id)
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
def _entries() -> Mapping[str, Any]:
    content = files("onbeat.perfmodel").joinpath("data", "devices.yaml").read_text("utf-8")
    return MappingProxyType(yaml.safe_load(content))


@cache
def _table() -> Mapping[str, DeviceSpec]:
    return MappingProxyType({id_: _from_yaml(id_, entry, id_) for id_, entry in _entries().items()})


@cache
def _names() -> Mapping[str, str]:
    """Every name of a device, as `_plain` makes it -> its id."""
    return {
        _plain(name): id_
        for id_, entry in _entries().items()
        for name in (id_, entry["name"], *entry["aliases"])
    }


def _from_yaml(device_id: str, entry: Any, where: str) -> DeviceSpec:
    """Return the device of an entry; `where` tells in errors which it is."""
    check_fields(entry, where, needed=_NEEDED, others=_OTHERS)
    numbers: dict[str, Any] = {
        name: positive(entry[name], f"{name} of {where}")
        for name in (*_NEEDED[:2], *_LINKS, *_SHARED, "tdp_watts")
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
        **{name: numbers[name] for name in _SHARED if name in numbers},
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
