"""Detection of device, type, threads and memory."""

from __future__ import annotations

import os

import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.device import available_memory_bytes, detect_device


def test_cpu_with_given_values() -> None:
    config = detect_device("cpu", "float64", 3)
    assert (config.device, config.dtype, config.num_threads) == (torch.device("cpu"), torch.float64, 3)
    assert config.dtype_name == "float64"


def test_auto_resolves_everything() -> None:
    config = detect_device()
    assert config.device.type in ("cpu", "cuda")
    assert config.dtype in (torch.bfloat16, torch.float32)
    assert config.num_threads == len(os.sched_getaffinity(0))


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert detect_device("cpu").dtype == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert detect_device("cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:99", "cpu:x"])
def test_devices_that_are_not_there_are_errors_that_name_them(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        detect_device(name)


def test_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ConfigError, match="float8"):
        detect_device("cpu", "float8")


def test_memory_is_what_the_machine_has_at_most() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory_bytes(torch.device("cpu")) <= machine
