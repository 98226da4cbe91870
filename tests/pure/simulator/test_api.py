"""`onbeat.simulate`: a simulation in a few lines of Python."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onbeat
from onbeat.core.errors import ConfigError
from onbeat.simulator import api

WHERE: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "device": "h100-sxm"}
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def make_load(num_requests: int = 30) -> onbeat.OfferedLoad:
    asked = onbeat.Load(input_len=512, output_len=16, request_rate=8.0, num_prompts=num_requests, seed=1)
    return asked.offered()


def test_the_example_in_its_documentation_is_true() -> None:
    result = doctest.testmod(api, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 5
    assert result.failed == 0


def test_replays_a_trace_in_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    result = onbeat.simulate(**WHERE, trace=path)
    assert result.is_complete
    assert [record.num_output_tokens for record in result.records] == [44, 109]
    assert result.records[1].arrival == pytest.approx(4.314579)


def test_equal_arguments_give_equal_records() -> None:
    first, second = (onbeat.simulate(**WHERE, load=make_load(), replicas=2, seed=3) for _ in range(2))
    assert first.records == second.records


def test_a_load_is_described_or_made() -> None:
    asked = onbeat.Load(
        input_len=512, output_len=16, request_rate=8.0, num_prompts=5, slo=onbeat.SLO(ttft=0.5)
    )
    described, made = (onbeat.simulate(**WHERE, load=each) for each in (asked, asked.offered()))
    assert described.records == made.records
    assert described.records[0].slo == onbeat.SLO(ttft=0.5)


def test_objectives_reach_the_records_and_the_automatic_budget() -> None:
    slo = onbeat.SLO(ttft=0.5, tbt=0.05)
    result = onbeat.simulate(**WHERE, load=make_load(), slo=slo, max_num_batched_tokens="auto")
    assert {record.slo for record in result.records} == {slo}


def test_a_load_with_objectives_of_its_own_has_an_automatic_budget() -> None:
    asked = onbeat.Load(
        input_len=512, output_len=16, request_rate=8.0, num_prompts=5, slo=onbeat.SLO(tbt=0.05)
    )
    first, *others = (
        onbeat.simulate(**WHERE, load=each, max_num_batched_tokens="auto")
        for each in (asked, asked.offered())
    )
    assert [first.records] == [each.records for each in others]


def test_a_closed_loop_needs_no_second_word_for_its_width() -> None:
    asked = onbeat.Load(input_len=512, output_len=16, max_concurrency=2, num_prompts=6)
    told = onbeat.simulate(**WHERE, load=asked.offered(), max_concurrency=2)
    assert onbeat.simulate(**WHERE, load=asked).records == told.records


def test_whom_to_leave_behind_is_the_callers_choice() -> None:
    """A long prompt has just begun when more short ones come than fit beside it."""
    lengths, arrivals = np.array([20_000] + [2_000] * 12), np.array([0.0] + [0.1] * 12)
    load = replace(make_load(13), num_prompt_tokens=lengths, arrivals=arrivals)
    slo = onbeat.SLO(ttft=1.0, tbt=0.5)
    late = {}
    for order in ("most", "longest-wait"):
        result = onbeat.simulate(**WHERE, load=load, slo=slo, shed_order=order)
        waits = [record.first_token - record.arrival for record in result.records if record.first_token]
        late[order] = [wait > 1.0 for wait in waits]
    assert late["most"] == [True] + [False] * 12
    assert not late["longest-wait"][0]
    # The long prompt takes the time of some four; who is late is the same at every step.
    assert late["longest-wait"] == sorted(late["longest-wait"])
    assert 2 <= sum(late["longest-wait"]) <= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polcy": "orca"}, r"'polcy'; .* policy"),
        ({"policy": "orcas"}, "policy 'orcas'"),
        ({"load": None}, "give requests once"),
        ({"trace": "x.csv"}, "give requests once"),
        ({"device": "h100"}, "mean h100-sxm"),
        ({"max_num_batched_tokens": "auto"}, "give --slo-tbt-ms"),
        ({"shed_order": "longest"}, "shed_order 'longest';"),
        ({"shed_order": "longest-wait", "policy": "edf"}, "leave it out, or use policy slo"),
        ({"max_model_len": 100}, "of 100 tokens"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        onbeat.simulate(**{**WHERE, "load": make_load(), **changes})


def test_a_file_without_times_needs_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n")
    with pytest.raises(ConfigError, match="--request-rate"):
        onbeat.simulate(**WHERE, trace=path)


def test_there_is_nothing_else_in_the_package() -> None:
    with pytest.raises(AttributeError, match="'simulat'"):
        onbeat.simulat  # noqa: B018
    assert all(hasattr(onbeat, name) for name in set(dir(onbeat)) - {"LLM"})


def test_words_of_the_command_line_are_taken() -> None:
    load = onbeat.Load(input_len=2000, output_len=20, request_rate=200.0, num_prompts=60)
    where: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "device": "h100-sxm"}
    asked = onbeat.SLO(ttft=0.1)
    rejected = [
        onbeat.simulate(**where, load=load, slo=asked, shed=shed).num_rejected for shed in ("off", "reject")
    ]
    assert rejected[0] == 0 < rejected[1]
    pools = onbeat.simulate(**where, load=load, disaggregate="prefill=1,decode=2")
    assert len(pools.replicas) == 3
    sized = onbeat.simulate(**where, load=load, autoscale="1..2")
    assert sized.sizes
