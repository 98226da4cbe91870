"""What the machine offers, looked at once at start: device, floating type, threads, memory."""

from __future__ import annotations

import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from onbeat.core.errors import ConfigError
from onbeat.engine import numa
from onbeat.engine.container import FreeMemory, host_memory, usable_cores
from onbeat.perfmodel.device_spec import is_gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_ADDRESSES_OF_THREADS = 256 * 2**20
"""Stacks and heaps of threads take addresses, little of them memory."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where and how a model runs."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int
    """CPU threads of a forward pass."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def detect_device(device: str = "auto", dtype: str = "auto", num_threads: int | None = None) -> DeviceConfig:
    """Resolve what the user left open.

    Parameters
    ----------
    device : `auto` (cuda where there is one), `cpu`, `cuda`, `cuda:N`, or a GPU as plans name it, such as
        `h100-sxm`: cuda, which must be that.
    dtype : `auto` (bfloat16 where the device multiplies it natively, else float32) or a key of `DTYPES`.
    num_threads : CPU threads; None takes one for each core that this process may run on, and no more than
        whole cores' worth of time that its container has: a step waits for its slowest thread.

    Raises
    ------
    ConfigError : the device is not there, or the type is unknown.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    resolved = _resolve_device(device)
    return DeviceConfig(
        resolved,
        _default_dtype(resolved) if dtype == "auto" else DTYPES[dtype],
        num_threads or usable_cores(),
    )


def thread_advice(device: DeviceConfig) -> str | None:
    """Return what would be better of the cores that threads run on; None where all is well."""
    return numa.advice(os.sched_getaffinity(0), device.num_threads) if device.device.type == "cpu" else None


def device_name(device: DeviceConfig) -> str:
    """Return what the device calls itself."""
    if device.device.type == "cuda":
        return torch.cuda.get_device_name(device.device)
    lines = _read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown CPU"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def free_memory(device: torch.device) -> FreeMemory:
    """Return how much memory is free now: of the device, or of this machine, container or process."""
    if device.type == "cuda":
        return FreeMemory(torch.cuda.mem_get_info(device)[0], f"the device {device}")
    found = [host_memory()]
    if (in_process := _address_space_left()) is not None:
        found.append(FreeMemory(in_process, "the limit of this process (ulimit -v or -d)"))
    return min(found)


def allocate_zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose memory is taken only as it is written, where the system can do that.

    On a CPU the system's zero pages serve (NumPy's `zeros`); torch would write every byte at once, which for
    a KV cache of gigabytes costs seconds at start and memory that may never be needed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_gpu(name):
        return _planned_gpu(name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device {name!r} is not there: this machine has {count} CUDA devices usable by torch"
            )
    return device


def _planned_gpu(device_id: str) -> torch.device:
    """Return the GPU that a plan was made for."""
    if not torch.cuda.is_available():
        found = "no CUDA device that torch can use"
    else:
        found = torch.cuda.get_device_name()
        if device_id.partition("-")[0] in re.split(r"\W+", found.lower()):
            return torch.device("cuda")
    raise ConfigError(
        f"device {device_id!r} is not there: this machine has {found}. --device auto serves on what there "
        "is, --load-format stand-in without any"
    )


def wait_for(device: torch.device) -> None:
    """Return when a device has done all that was queued for it: before and after whatever is timed on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _default_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def _address_space_left() -> int | None:
    """Return what the limits of this process leave of its address space, or None where there are none."""
    pages = Path("/proc/self/statm").read_text().split()
    left = []
    for limit, num_pages in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left.append(soft - int(num_pages) * resource.getpagesize() - _ADDRESSES_OF_THREADS)
    return max(min(left), 0) if left else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
