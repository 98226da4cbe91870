"""What the machine offers, looked at once at start: device, floating type, threads, memory."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.engine.container import FreeMemory, host_memory, numa_advice, read_text, usable_cores
from onbeat.engine.dtypes import BFLOAT16, DTYPES, FLOAT32
from onbeat.perfmodel.device_spec import is_gpu

_ADDRESSES_OF_THREADS = 256 * 2**20
"""Stacks and heaps of threads take addresses, little of them memory."""
_NAMES = re.compile(r"cpu|cuda(?::(\d+))?")
_SIGNS_OF_GPUS = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")))
"""Of the drivers of NVIDIA, of WSL and of AMD; without one, torch need not be asked."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Device:
    """What a model runs on."""

    type: Literal["cpu", "cuda"]
    index: int | None = None
    """Of a CUDA device; None takes the current one."""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where and how a model runs."""

    device: Device
    dtype: np.dtype[Any]
    num_threads: int
    """CPU threads of a forward pass."""


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
    MissingExtra : a CUDA device is asked for, but torch is not installed.
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
    return numa_advice(os.sched_getaffinity(0), device.num_threads) if device.device.type == "cpu" else None


def missed_gpu() -> str | None:
    """Return what a GPU that is here lacks to be used; None where none is here, or torch is."""
    if has_gpu() and find_spec("torch") is None:
        return "this machine has a GPU, but torch is not installed: pip install 'onbeat[gpu]' to serve on it"
    return None


def device_name(device: DeviceConfig) -> str:
    """Return what the device calls itself."""
    if device.device.type == "cuda":
        return str(_cuda().get_device_name(str(device.device)))
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown CPU"


def compute_capability(device: Device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    major, minor = _cuda().get_device_capability(str(device))
    return major, minor


def free_memory(device: Device) -> FreeMemory:
    """Return how much memory is free now: of the device, or of this machine, container or process."""
    if device.type == "cuda":
        return FreeMemory(_cuda().mem_get_info(str(device))[0], f"the device {device}")
    found = [host_memory()]
    if (in_process := _address_space_left()) is not None:
        found.append(FreeMemory(in_process, "the limit of this process (ulimit -v or -d)"))
    return min(found)


def has_gpu() -> bool:
    """Return whether a driver of GPUs is here, usable by torch or not."""
    return any(sign.exists() for sign in _SIGNS_OF_GPUS)


def wait_for(device: Device) -> None:
    """Return when a device has done all that was queued for it: before and after whatever is timed on it."""
    if device.type == "cuda":
        _cuda().synchronize(str(device))


def _cuda(purpose: str = "a CUDA device") -> Any:
    """Return `torch.cuda`, imported now."""
    return require("torch", extra="gpu", purpose=purpose).cuda


def _resolve_device(name: str) -> Device:
    if name == "auto":
        is_usable = has_gpu() and find_spec("torch") is not None and _cuda().is_available()
        return Device("cuda") if is_usable else CPU
    if is_gpu(name):
        return _planned_gpu(name)
    found = _NAMES.fullmatch(name)
    if found is None:
        raise ConfigError(f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return CPU
    index = None if found[1] is None else int(found[1])
    count = _cuda(f"the device {name!r}").device_count()
    if (index or 0) >= count:
        raise ConfigError(
            f"device {name!r} is not there: this machine has {count} CUDA devices usable by torch"
        )
    return Device("cuda", index)


def _planned_gpu(device_id: str) -> Device:
    """Return the GPU that a plan was made for."""
    cuda = _cuda(f"the device {device_id!r}") if has_gpu() else None
    if cuda is None or not cuda.is_available():
        found = "no CUDA device that torch can use"
    else:
        found = cuda.get_device_name()
        if device_id.partition("-")[0] in re.split(r"\W+", found.lower()):
            return Device("cuda")
    raise ConfigError(
        f"device {device_id!r} is not there: this machine has {found}. --device auto serves on what there "
        "is, --load-format stand-in without any"
    )


def _default_dtype(device: Device) -> np.dtype[Any]:
    if device.type == "cuda":
        return BFLOAT16 if _cuda().is_bf16_supported() else FLOAT32
    return BFLOAT16 if multiplies_bfloat16() else FLOAT32


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16 (AVX-512 BF16)."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    return any("avx512_bf16" in line.split() for line in lines if line.startswith("flags"))


def _address_space_left() -> int | None:
    """Return what the limits of this process leave of its address space, or None where there are none."""
    pages = Path("/proc/self/statm").read_text().split()
    left = []
    for limit, num_pages in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left.append(soft - int(num_pages) * resource.getpagesize() - _ADDRESSES_OF_THREADS)
    return max(min(left), 0) if left else None


def run_apart(work: Callable[[], ResultT]) -> ResultT:
    """Return what some work does, which runs in a thread of its own that ends with it.

    OpenMP keeps threads for each thread that has used it. Once all of them outnumber the cores they no longer
    spin between two parts of a step, and a step may take twice as long: what loads a model must not keep any.
    """
    done: Future[ResultT] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=run, name="onbeat-load", daemon=True)
    thread.start()
    thread.join()
    return done.result()
