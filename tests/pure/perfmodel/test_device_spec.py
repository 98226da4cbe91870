"""Devices: every id, dense rates, sources, and the measured CPU."""

import pytest

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import cpu_device, device_ids, find_device

IDS = [
    "a100-40-sxm",
    "a100-80-sxm",
    "h100-sxm",
    "h100-pcie",
    "h200",
    "b200",
    "l4",
    "a10g",
    "l40s",
    "a40",
    "v100",
    "cpu",
]


def test_all_ids_are_there():
    assert device_ids() == tuple(IDS)


@pytest.mark.parametrize("device_id", IDS[:-1])
def test_entries_are_whole_and_plausible(device_id):
    device = find_device(device_id)
    assert device.sources["all"]
    assert 2**34 < device.memory_bytes < 2**38
    assert 2e11 < device.memory_bandwidth < 1e13
    assert device.peak("fp16") > device.peak("fp32")
    assert device.link_bandwidth is not None


@pytest.mark.parametrize(
    ("device_id", "tera"), [("h100-sxm", 989.4), ("l4", 121), ("a100-80-sxm", 312), ("a10g", 70)]
)
def test_rates_are_dense(device_id, tera):
    assert find_device(device_id).peak("bf16") == pytest.approx(tera * 1e12)


def test_format_that_the_device_lacks():
    with pytest.raises(ConfigError, match=r"V100.* does not compute in bf16; it has fp32, fp16"):
        find_device("v100").peak("bf16")


def test_unknown_device_names_near_ones():
    with pytest.raises(ConfigError, match=r"unknown device 'h100-smx': did you mean h100-sxm"):
        find_device("h100-smx")


def test_link_is_one_direction_of_the_fastest():
    assert find_device("h100-sxm").link_bandwidth == 450e9
    assert find_device("l4").link_bandwidth == 32e9


def test_cpu_device_takes_measured_limits():
    device = cpu_device(memory_bandwidth=2e10, peak_flops={"fp32": 1e11, "bf16": 2e11}, memory_bytes=2**34)
    assert (device.id, device.peak("bf16"), device.link_bandwidth) == ("cpu", 2e11, None)
    assert cpu_device(memory_bandwidth=2e10, peak_flops=1e11).peak("int8") == 1e11
    with pytest.raises(ConfigError, match="must be above 0"):
        cpu_device(memory_bandwidth=0.0, peak_flops=1e11)
