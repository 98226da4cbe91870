from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.bench_load import BenchLoad
from onbeat.core.errors import ConfigError

BASE = BenchLoad(request_rate=1.0, burstiness=0.5)


def test_a_concurrency_sweep_is_closed_loops() -> None:
    runs = BenchLoad(trace=Path("t.csv"), sweep_concurrency=(1, 4)).runs("x")

    assert [(run.title, run.load.max_concurrency, run.load.timing) for run in runs] == [
        ("x c=1", 1, None),
        ("x c=4", 4, None),
    ]
    with pytest.raises(ConfigError, match="leave out --request-rate"):
        replace(BASE, sweep_concurrency=(1,)).runs("x")


def test_a_rate_sweep_keeps_the_rest_of_the_load() -> None:
    load = BenchLoad(sweep_rate=(2.5,), arrivals="constant", max_concurrency=9)
    [run] = load.runs("x")

    assert (run.title, run.load.timing) == ("x 2.5 req/s", ("constant", 2.5))
    assert run.load.max_concurrency == 9
    with pytest.raises(ConfigError, match="--sweep-rate"):
        replace(BASE, sweep_rate=(1.0,)).runs("x")
    closed, opened = BenchLoad(sweep_concurrency=(3,), sweep_rate=(2.0,), arrivals="constant").runs("x")
    assert (closed.load.timing, opened.load.timing) == (None, ("constant", 2.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"burstiness": 0.5}, "--burstiness"),
        ({"burstiness": 0.5, "arrivals": "constant", "request_rate": 1.0}, "--burstiness"),
        ({"arrivals": "constant"}, "finite --request-rate"),
        ({"arrivals": "replay", "request_rate": 2.0, "rate_scale": 3.0}, "rate-scale"),
        ({"arrivals": "poisson", "burstiness": 0.5, "request_rate": 1.0}, "--burstiness"),
        ({"arrivals": "steps"}, "--rate-steps"),
        ({"random_long_share": 1.0}, "random_long_share"),
        ({"sweep_concurrency": (4, 0)}, "sweep_concurrency"),
    ],
)
def test_contradictory_loads_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchLoad(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "sharegpt"}, "needs a file"),
        ({"dataset_path": Path("x")}, "reads no file"),
        ({"random_prefix_len": 3, "dataset_name": "conversation"}, "--random-prefix-len"),
        ({"prefix_repetition_suffix_len": 3}, "--prefix-repetition-suffix-len"),
    ],
)
def test_contradictory_data_sets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchLoad(**options).named()


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_with_and_without_version(base: str) -> None:
    assert TargetConfig(base_url=base).url == "http://h:1/v1/completions"
    assert TargetConfig(base_url=base, backend="openai-chat").url == "http://h:1/v1/chat/completions"


def test_a_base_url_without_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://"):
        TargetConfig(base_url="localhost:8000")
