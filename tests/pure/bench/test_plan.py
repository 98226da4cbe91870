from __future__ import annotations

import math
from pathlib import Path

import pytest

from onbeat.bench.bench_config import DatasetConfig, LoadConfig, RampConfig, RunConfig, TargetConfig
from onbeat.bench.plan import concurrency_sweep, rate_sweep
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
