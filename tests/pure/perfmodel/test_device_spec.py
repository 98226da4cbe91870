"""Devices: every id, dense rates, sources, and the measured CPU."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import cpu_device, device_ids, find_device, known_device

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
    "a30",
    "l40",
    "h20",
    "h100-nvl",
    "gh200-96",
    "gh200-144",
    "b300",
    "gb200",
    "gb300",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "rtx-pro-6000-workstation",
    "mi300x",
    "mi325x",
    "mi355x",
    "cpu",
]


def test_all_ids_are_there():
    assert device_ids() == tuple(IDS)


@pytest.mark.parametrize("device_id", IDS[:-1])
def test_entries_are_whole_and_plausible(device_id):
    device = find_device(device_id)
    assert device.sources["all"]
    assert 2**34 < device.memory_bytes < 2**39
    assert 2e11 < device.memory_bandwidth < 1e13
    assert device.peak("fp16") > device.peak("fp32")
    assert device.link(2) is not None


@pytest.mark.parametrize(
    ("device_id", "tera"), [("h100-sxm", 989.4), ("l4", 121), ("a100-80-sxm", 312), ("a10g", 70)]
)
def test_rates_are_dense(device_id, tera):
    assert find_device(device_id).peak("bf16") == pytest.approx(tera * 1e12)


def test_format_that_the_device_lacks():
    with pytest.raises(ConfigError, match=r"V100.*bf16.*fp32.*fp16"):
        find_device("v100").peak("bf16")


def test_unknown_device_names_near_ones():
    for name in ("cuda", "tpu-v5e", "gaudi3"):  # alike in letters only
        with pytest.raises(ConfigError, match=f"device '{name}': known"):
            find_device(name)
    with pytest.raises(ConfigError, match=r"'h100-smx'.*h100-sxm"):
        find_device("h100-smx")


@pytest.mark.parametrize(
    ("name", "device_id"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100_SXM", "h100-sxm"),
        ("H100 NVL", "h100-nvl"),
        ("a100-80gb", "a100-80-sxm"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx5090", "rtx-5090"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB200 NVL72", "gb200"),
        ("NVIDIA GH200 480GB", "gh200-96"),
    ],
)
def test_a_device_goes_by_the_names_that_people_and_drivers_use(name: str, device_id: str) -> None:
    assert find_device(name).id == known_device(name) == device_id


def test_a_name_of_several_devices_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"h100-sxm.*h100-pcie.*h100-nvl"):
        find_device("h100")


def test_link_is_one_direction_of_the_fastest_that_joins_so_many():
    assert find_device("h100-sxm").link(8) == (450e9, 0.0)
    assert find_device("l4").link(2) == (32e9, pytest.approx(6e-6))
    assert find_device("l4").link(4) == (32e9 * 0.73, pytest.approx(12e-6))
    assert find_device("h100-nvl").link(2) == (300e9, 0.0)  # a bridge joins a pair
    assert find_device("h100-nvl").link(4) == (64e9 * 0.73, pytest.approx(12e-6))
    assert find_device("l40s").link(8) == (pytest.approx(32e9 * 0.26**2), pytest.approx(24e-6))


def test_cpu_device_takes_measured_limits():
    device = cpu_device(memory_bandwidth=2e10, peak_flops={"fp32": 1e11, "bf16": 2e11}, memory_bytes=2**34)
    assert (device.id, device.peak("bf16"), device.link(2)) == ("cpu", 2e11, None)
    assert cpu_device(memory_bandwidth=2e10, peak_flops=1e11).peak("int8") == 1e11


MINE = {"memory_gib": 24, "memory_bandwidth_gb_s": 300, "peak_tflops": {"fp32": 30.3, "bf16": 121}}


def written(tmp_path: Path, content: object) -> str:
    """Return the path of a file of a device."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_device_may_come_from_a_file(tmp_path: Path) -> None:
    name = written(tmp_path, MINE)
    device = find_device(name)
    assert (device.id, device.name) == (name, name)
    assert device.memory_bytes == 24 * 2**30
    assert device.memory_bandwidth == 300e9
    assert device.peak("bf16") == 121e12
    assert (device.link(2), device.tdp_watts) == (None, None)


def test_a_file_with_the_fields_of_an_entry_is_that_device(tmp_path: Path) -> None:
    entries = yaml.safe_load(files("onbeat.perfmodel").joinpath("data", "devices.yaml").read_text())
    name = written(tmp_path, entries["h100-sxm"])
    assert find_device(name) == replace(find_device("h100-sxm"), id=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_gb": 24}, r"'memory_gb': .* memory_gib"),
        ({"memory_gib": "much"}, "memory_gib is 'much';"),
        ({"memory_gib": 1e300}, "memory_gib is 1e\\+300;"),
        ({"memory_gib": 0}, "memory_gib is 0;"),
        ({"memory_gib": None}, "memory_gib is None;"),
        ({"memory_bandwidth_gb_s": True}, "memory_bandwidth_gb_s is True;"),
        ({"memory_bandwidth_gb_s": float("inf")}, "memory_bandwidth_gb_s is inf;"),
        ({"nvlink_gb_s": -600}, "nvlink_gb_s is -600;"),
        ({"peak_tflops": 312}, "peak_tflops is 312;"),
        ({"peak_tflops": None}, "peak_tflops is None"),
        (
            {"peak_tflops": {"bf17": 312}},
            r"peak_tflops .* 'bf17'; .* fp32, bf16",
        ),
        ({"peak_tflops": {"bf16": "fast"}}, "peak_tflops.bf16 is 'fast';"),
        ({"name": 3}, "name is 3;"),
        ({"sources": {"all": 3}}, "sources.all is 3;"),
    ],
)
def test_wrong_fields_of_a_file_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_device(written(tmp_path, {**MINE, **fields}))
    assert "mine.yaml" in str(caught.value)


def test_a_file_that_lacks_numbers_or_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml.*memory_bandwidth_gb_s"):
        find_device(written(tmp_path, {"memory_gib": 24}))
    for content in ([MINE], "h100-sxm", None):
        with pytest.raises(ConfigError, match=r"mine\.yaml"):
            find_device(written(tmp_path, content))
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        find_device(str(tmp_path / "none.yaml"))


def test_an_unknown_device_is_told_of_files() -> None:
    with pytest.raises(ConfigError, match=r"FILE\.yaml"):
        find_device("gaudi")
