"""What the machine offers, looked at once at start: device, floating type, threads, memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from onbeat.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


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
    device : `auto` (cuda where there is one), `cpu`, `cuda` or `cuda:N`.
    dtype : `auto` (bfloat16 where the device multiplies it natively, else float32) or a key of `DTYPES`.
    num_threads : CPU threads; None takes one for each core this process may run on.

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
        num_threads or len(os.sched_getaffinity(0)),
    )


def available_memory_bytes(device: torch.device) -> int:
    """Return how much memory is free now: of the device, or of this machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = _read_text(Path("/proc/meminfo"))
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    return min(machine, _container_memory_bytes() or machine)


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


def _default_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def _container_memory_bytes() -> int | None:
    """Return what a control group leaves of its memory limit, or None where there is no limit."""
    for limit_path, usage_path in (
        (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
        (
            Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
            Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        ),
    ):
        limit, usage = _read_text(limit_path).strip(), _read_text(usage_path).strip()
        if limit.isdigit() and usage.isdigit():
            return max(int(limit) - int(usage), 0)
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
