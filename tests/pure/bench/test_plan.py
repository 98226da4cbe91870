from __future__ import annotations

import math
from pathlib import Path

import pytest

from onbeat.bench.bench_config import DatasetConfig, LoadConfig, RampConfig, RunConfig, TargetConfig
from onbeat.bench.plan import MlcStudy, concurrency_sweep, rate_sweep
from onbeat.core.errors import ConfigError

BASE = RunConfig(
    dataset=DatasetConfig(),
    load=LoadConfig(request_rate=1.0, burstiness=0.5, max_concurrency=9),
    title="x",
)


def test_a_concurrency_sweep_is_closed_loops() -> None:
    runs = concurrency_sweep(BASE, [1, 4])

    assert [(run.title, run.load.max_concurrency, run.load.is_scheduled) for run in runs] == [
        ("x c=1", 1, False),
        ("x c=4", 4, False),
    ]


def test_a_rate_sweep_keeps_the_rest_of_the_load() -> None:
    [run] = rate_sweep(BASE, [2.5])

    assert (run.title, run.load.request_rate, run.load.burstiness) == ("x 2.5 req/s", 2.5, 0.5)
    assert run.load.max_concurrency == 9


def test_the_study_has_every_level_of_every_data_set() -> None:
    runs = MlcStudy().runs(scale=1.0, sharegpt=None)

    assert len(runs) == 3 * (8 + 5)
    assert [r.load.max_concurrency for r in runs[:8]] == [1, 4, 8, 10, 16, 20, 30, 64]
    assert [r.load.request_rate for r in runs[8:13]] == [1, 2, 4, 8, 16]
    assert {r.num_prompts for r in runs} == {500}
    assert [(r.dataset.name, r.dataset.input_len, r.dataset.output_len) for r in runs[::13]] == [
        ("conversation", 306, 500),
        ("random", 100, 500),
        ("random", 1000, 500),
    ]


def test_scaling_shrinks_counts_and_lengths_but_no_level() -> None:
    runs = MlcStudy().runs(scale=0.1, sharegpt=None)

    assert {r.load.max_concurrency for r in runs if not r.load.is_scheduled} == {1, 4, 8, 10, 16, 20, 30, 64}
    assert runs[0].num_prompts == 50
    assert runs[7].num_prompts == 128  # at least twice the concurrency
    assert {r.dataset.length_scale for r in runs} == {0.1}


def test_a_sharegpt_file_takes_the_place_of_drawn_lengths() -> None:
    runs = MlcStudy().runs(scale=0.1, sharegpt=Path("s.json"))

    assert runs[0].dataset == DatasetConfig(name="sharegpt", path=Path("s.json"))


@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_a_scale_outside_its_range_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="preset-scale"):
        MlcStudy().runs(scale=scale, sharegpt=None)


RAMP = RampConfig(shape="linear", start_rate=1.0, end_rate=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 0.0}, "request-rate"),
        ({"request_rate": math.nan}, "request-rate"),
        ({"max_concurrency": 0}, "max-concurrency"),
        ({"burstiness": 0.5}, "--burstiness shapes"),
        ({"burstiness": 0.5, "arrivals": "constant", "request_rate": 1.0}, "--burstiness shapes"),
        ({"arrivals": "constant"}, "finite --request-rate"),
        ({"arrivals": "replay", "request_rate": 2.0, "rate_scale": 3.0}, "rate-scale"),
        ({"arrivals": "burst"}, "finite --request-rate"),
        ({"arrivals": "poisson", "burstiness": 0.5, "request_rate": 1.0}, "--burstiness shapes"),
        ({"arrivals": "steps"}, "--rate-steps"),
        ({"ramp": RAMP, "request_rate": 2.0}, "ramp-up"),
    ],
)
def test_contradictory_loads_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sharegpt"}, "needs a file"),
        ({"path": Path("x")}, "reads no file"),
        ({"length_scale": 0}, "scale"),
    ],
)
def test_contradictory_data_sets_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_with_and_without_version(base: str) -> None:
    assert TargetConfig(base_url=base).url == "http://h:1/v1/completions"
    assert TargetConfig(base_url=base, api="chat").url == "http://h:1/v1/chat/completions"


def test_a_base_url_without_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://"):
        TargetConfig(base_url="localhost:8000")
