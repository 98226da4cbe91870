"""Profiles as files: round trip, and everything that a file may get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import FitErrors, FittedModel
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import (
    SCHEMA_VERSION,
    MachineLimits,
    Profile,
    ProfileKey,
    find_profile,
    limited_device,
    profile_path,
    read_profile,
    write_profile,
)
from onbeat.perfmodel.shapes import MeasuredStep, ShapeRange
from tests.pure.perfmodel.shapes import batch, decodes

KEY = ProfileKey(
    model="org/Tiny-1B",
    device="cpu",
    device_name="Some CPU @ 2 GHz",
    precision=Precision(),
    parallelism=Parallelism(),
    threads=2,
)
STEPS = (MeasuredStep(decodes(2, 40), 0.011), MeasuredStep(batch([(0, 64), (5, 1)]), 0.035))
PROFILE = Profile(
    key=KEY,
    onbeat_version="0.1.0",
    created="2026-01-02T03:04:05+00:00",
    steps=STEPS,
    fitted=FittedModel(
        method="nnls",
        parameters={"fixed": 0.01},
        errors=FitErrors(mean=0.04, p50=0.03, p90=0.09, p95=0.1, num_points=2),
        ratios=(0.97, 1.03),
        shape_range=ShapeRange.of([step.shape for step in STEPS]),
    ),
    limits=MachineLimits(
        memory_bandwidth=2e10,
        peak_flops={"fp32": 1e11, "bf16": 2e11},
        product_rates=((1, 1e10), (16, 1.5e11)),
    ),
    engine={"block_size": 16, "attention": "torch"},
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_profile(tmp_path / "new" / "profile.json", PROFILE)
    assert read_profile(tmp_path / "new" / "profile.json", KEY) == PROFILE
    without_limits = replace(PROFILE, limits=None, engine={})
    write_profile(tmp_path / "new" / "profile.json", without_limits)
    assert read_profile(tmp_path / "new" / "profile.json") == without_limits
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["profile.json"]


def test_a_profile_of_before_there_were_drafts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    content = json.loads(path.read_text())
    places = [content["columns"].index(name) for name in ("num_draft_tokens", "num_draft_passes")]
    for row in (content["columns"], *content["steps"]):
        for place in reversed(places):
            del row[place]
    path.write_text(json.dumps(content))
    assert read_profile(path, KEY) == PROFILE


def test_a_profile_of_before_rates_went_by_rows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    content = json.loads(path.read_text())
    content["schema_version"] = 2
    del content["limits"]["product_rates"]
    content["engine"]["instruction_set"] = "avx512"
    path.write_text(json.dumps(content))
    profile = read_profile(path, replace(KEY, instruction_set="avx512"))
    assert profile.limits is not None
    assert profile.limits.product_rates == ()
    with pytest.raises(ConfigError, match=r"'avx512'.*'amx'"):
        read_profile(path, replace(KEY, instruction_set="amx"))


def test_a_profile_of_another_instruction_set_is_found_and_refused(tmp_path: Path) -> None:
    key, other = replace(KEY, instruction_set="avx512bf16"), replace(KEY, instruction_set="amx")
    path = profile_path(tmp_path, key)
    write_profile(path, replace(PROFILE, key=key))
    assert find_profile(tmp_path, key) == replace(PROFILE, key=key)
    with pytest.raises(ConfigError, match=r"'avx512bf16'.*'amx'"):
        find_profile(tmp_path, other)


def test_a_profile_knows_the_format_of_the_embedding(tmp_path: Path) -> None:
    key = replace(KEY, precision=Precision(weights="int4", embedding="int8", group=32))
    path = profile_path(tmp_path, key)
    write_profile(path, replace(PROFILE, key=key))
    assert read_profile(path, key).key == key
    assert find_profile(tmp_path, replace(key, precision=Precision(weights="int4"))) is None
    write_profile(path, PROFILE)
    assert list(json.loads(path.read_text())["key"]["precision"]) == ["weights", "kv", "compute"]


def test_a_profile_is_found_by_its_key_only(tmp_path: Path) -> None:
    write_profile(profile_path(tmp_path, KEY), PROFILE)
    assert find_profile(tmp_path, KEY) == PROFILE
    for other in (
        replace(KEY, model="org/Tiny-2B"),
        replace(KEY, device_name="Other CPU"),
        replace(KEY, threads=4),
        replace(KEY, precision=Precision(weights="int8")),
        replace(KEY, parallelism=Parallelism(tensor=2)),
        replace(KEY, backend="native"),
    ):
        assert find_profile(tmp_path, other) is None
    assert find_profile(tmp_path / "absent", KEY) is None


def test_file_names_are_legible_and_safe() -> None:
    name = profile_path(Path(), replace(KEY, model="../Étrange model:7b")).name
    assert name.startswith("trange-model-7b_cpu_bf16_t2_")
    assert "/" not in name


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (replace(KEY, model="org/Other"), r"'org/Tiny-1B', not 'org/Other'"),
        (replace(KEY, device="h100-sxm"), r"'cpu', not 'h100-sxm'"),
        (replace(KEY, backend="native"), r"'torch', not 'native'"),
        (replace(KEY, device_name="Other CPU"), r"device name 'Some CPU @ 2 GHz', not 'Other CPU'"),
        (replace(KEY, threads=8), r"threads '2', not '8'"),
        (replace(KEY, precision=Precision(weights="int8")), r"precision 'bf16 weights.*not 'int8 weights"),
        (replace(KEY, parallelism=Parallelism(tensor=2)), r"parallelism 'TP 1, PP 1', not 'TP 2, PP 1'"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, expected: ProfileKey, message: str) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "p.json", expected)


def test_the_same_model_under_a_shorter_name_is_the_same(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    read_profile(tmp_path / "p.json", replace(KEY, model="tiny-1b"))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema_version=99), rf"schema version 99, but .* 2 and {SCHEMA_VERSION}"),
        (lambda c: c.pop("schema_version"), "schema version None"),
        (lambda c: c.pop("key"), "lacks key"),
        (lambda c: c["key"].pop("precision"), "lacks precision"),
        (lambda c: c["key"].pop("parallelism"), "lacks parallelism"),
        (lambda c: c["key"].update(threads="two"), r"key\.threads is 'two';"),
        (lambda c: c["key"].update(threads=True), r"key\.threads is True"),
        (lambda c: c["key"]["precision"].update(weights="fp3"), "format 'fp3'"),
        (lambda c: c["steps"][1].__setitem__(-1, 0.0), r"steps\[1\] .* 0"),
        (
            lambda c: c["steps"][1].__setitem__(0, -3),
            r"steps\[1\]\[0\] is -3;",
        ),
        (
            lambda c: c["steps"][0].__setitem__(-1, float("nan")),
            r"steps\[0\]\[\d+\] is nan;",
        ),
        (lambda c: c["steps"][0].pop(), r"steps\[0\] is .*16 numbers"),
        (lambda c: c.update(steps=[]), "steps is .*at least one"),
        (lambda c: c["columns"].reverse(), "columns is"),
        (lambda c: c["columns"].remove("num_verify_rows"), "columns is"),
        (lambda c: c.update(columns=7), "columns is 7;"),
        (lambda c: c["fit"].update(method="forest"), r"fit\.method is 'forest';"),
        (lambda c: c["fit"].update(ratios=[1.0, -1.0]), r"fit\.ratios\[1\] is -1.0"),
        (lambda c: c["fit"]["parameters"].update(fixed="big"), r"fit\.parameters\.fixed is 'big'"),
        (lambda c: c["fit"]["errors"].pop("p90"), "fit.errors lacks p90"),
        (lambda c: c["limits"].update(memory_bandwidth=0), r"limits\.memory_bandwidth is 0"),
        (lambda c: c["limits"]["peak_flops"].update(fp32=-1), r"limits\.peak_flops\.fp32 is -1"),
        (lambda c: c["limits"].update(product_rates=[[1, 0]]), r"limits\.product_rates\[0\]\[1\] is 0"),
        (lambda c: c["limits"].update(product_rates=3), r"limits\.product_rates is 3"),
        (lambda c: c.update(engine=[1]), "engine is .*a mapping"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_the_remedy(
    tmp_path: Path, change: Change, message: str
) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_file_that_is_no_profile(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"p\.json.*`onbeat.*MODEL`"):
        read_profile(path)


def test_measured_limits_take_the_place_of_the_data_sheets() -> None:
    device = find_device("h100-sxm")
    limited = limited_device(device, PROFILE.limits)
    assert limited.memory_bandwidth == 2e10
    assert limited.peak("bf16") == 2e11
    assert limited.peak("fp8") == device.peak("fp8")
    assert limited.product_rates == ((1, 1e10), (16, 1.5e11))
    assert limited_device(device, None) is device
