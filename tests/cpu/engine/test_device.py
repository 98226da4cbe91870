"""Detection of device, type, threads and memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from onbeat.core.errors import ConfigError, MissingExtra
from onbeat.engine import container, device
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import CPU, Device, detect_device, free_memory, missed_gpu
from onbeat.engine.dtypes import BFLOAT16, DTYPES, FLOAT32


def test_cpu_with_given_values() -> None:
    config = detect_device("cpu", "float64", 3)
    assert (config.device, config.dtype, config.num_threads) == (CPU, DTYPES["float64"], 3)


def test_auto_resolves_everything() -> None:
    config = detect_device()
    assert config.device.type in ("cpu", "cuda")
    assert config.dtype in (BFLOAT16, FLOAT32)
    assert 1 <= config.num_threads <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (3.9, 3), (0.5, 1), (64.0, 8)])
def test_threads_follow_cores_and_the_quota_of_the_container(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    """A step waits for its slowest thread, so a share of a core is worse than none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(container, "cpu_quota", lambda: quota)
    assert detect_device("cpu").num_threads == expected
    assert detect_device("cpu", num_threads=5).num_threads == 5


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.multiplies_bfloat16() == torch.cpu._is_avx512_bf16_supported()
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    assert detect_device("cpu").dtype == FLOAT32
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    assert detect_device("cpu").dtype == BFLOAT16


def test_cuda_without_torch_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert detect_device("auto").device == CPU
    assert "pip install 'onbeat[gpu]'" in str(missed_gpu())
    for name in ("cuda", "cuda:1", "h100-sxm"):
        with pytest.raises(MissingExtra, match=f"'{name}' needs 'torch'.*onbeat\\[gpu\\]"):
            detect_device(name)


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:99", "cpu:x"])
def test_devices_that_are_not_there_are_errors_that_name_them(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        detect_device(name)


def test_a_planned_gpu_is_cuda_where_it_is_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'h100-sxm'.*--device"):
        detect_device("h100-sxm")
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert detect_device("h100-sxm").device == Device("cuda")
    with pytest.raises(ConfigError, match=r"'l4'.*H100"):
        detect_device("l4")


def test_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ConfigError, match="float8"):
        detect_device("cpu", "float8")


def test_memory_is_what_the_machine_has_at_most() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory(CPU).num_bytes <= machine


def test_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "memory_left", lambda: 12345)
    assert free_memory(CPU) == FreeMemory(12345, "the memory limit of this container")


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_memory_is_what_the_limits_of_the_process_leave(limit: int) -> None:
    pages = [int(word) for word in Path("/proc/self/statm").read_text().split()]
    used = resource.getpagesize() * pages[0 if limit == resource.RLIMIT_AS else 5]
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (used + 2**30, hard))
    try:
        free = free_memory(CPU)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert "(ulimit -v or -d)" in free.limit
    assert 2**29 < free.num_bytes < 2**30
