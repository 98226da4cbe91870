"""Whether a promise was kept, and how sure that is; the load of a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.promise import check_promise, compare_pace
from onbeat.cli.bench import with_planned_load
from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.planner.plan_file import Promise
from tests.pure.planner.fakes import make_record
from tests.told import numbers


def records(flags: str) -> list[Any]:
    """Return requests in order, of which those marked 1 were in time."""
    return [make_record([0.1 if flag == "1" else 9.0], slo=SLO(ttft=1.0)) for flag in flags]


def test_a_share_that_is_reached_is_kept() -> None:
    kept = check_promise(records("1111111110" * 20), promised=0.85)
    assert kept.is_kept
    assert kept.is_certain
    assert kept.low == kept.high == kept.share == 0.9
    assert "promise kept" in str(kept)
    assert numbers(kept)[:3] == [5, 90, 200]


def test_misses_that_come_together_leave_doubt() -> None:
    kept = check_promise(records("1" * 150 + "0" * 50), promised=0.9)
    assert not kept.is_kept
    assert not kept.is_certain
    assert kept.low < 0.5
    assert re.search(r"broken .* 15\.0 points, .*interval", str(kept))


def test_too_few_requests_say_nothing() -> None:
    with pytest.raises(ConfigError, match="10 requests"):
        check_promise(records("1" * 10), promised=0.9)


def test_tokens_that_take_longer_than_planned_are_told() -> None:
    slow = [make_record([0.1, 0.2, 0.3], slo=SLO(ttft=1.0)) for _ in range(3)]
    assert numbers(compare_pace(slow, 0.08)) == [100, 80, 25]
    assert "nothing tells" in compare_pace(records("111"), 0.08)


def promise(**load: Any) -> Promise:
    return Promise(path=Path("plan.yaml"), share=0.9, mode="gap", fleet="2 l4", load=load, mean_tpot=None)


def test_a_load_test_takes_the_load_of_its_plan() -> None:
    load = {"input-len": 300, "output-len": 20, "slo-ttft-ms": 500, "request-rate": 12, "num-prompts": 120}
    options = with_planned_load(BenchConfig(), promise(**load))
    assert options.load.input_len == 300
    assert options.load.slo.ttft == 0.5
    assert options.load.request_rate == 12
    assert options.load.num_prompts == 120
    assert options.slo_mode == "gap"
    assert options.sampling.ignore_eos


def test_a_load_test_may_be_longer_but_of_no_other_load() -> None:
    longer = with_planned_load(make(BenchConfig, num_prompts=900), promise(**{"num-prompts": 120}))
    assert longer.load.num_prompts == 900
    with pytest.raises(ConfigError, match="--request-rate"):
        with_planned_load(make(BenchConfig, request_rate=3.0), promise(**{"request-rate": 12}))
    for other in ({"sweep_rate": (1.0, 2.0)}, {"output_len": 5}, {"tbt": 0.1}):
        with pytest.raises(
            ConfigError,
            match=rf"--{'slo-tbt-ms' if 'tbt' in other else next(iter(other)).replace('_', '-')}\b",
        ):
            with_planned_load(make(BenchConfig, **other), promise(**{"request-rate": 12}))
    with pytest.raises(ConfigError, match="--slo-mode"):
        with_planned_load(make(BenchConfig, slo_mode="mean"), promise())
    with pytest.raises(ConfigError, match=r"49 requests.*send 50"):
        with_planned_load(make(BenchConfig, num_prompts=49), promise(**{"num-prompts": 120}))
    with pytest.raises(ConfigError, match="'spin'"):
        with_planned_load(BenchConfig(), promise(spin=1))
