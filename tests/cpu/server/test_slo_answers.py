"""What answers say of their objectives."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request
from onbeat.core.slo import SLO, SLO_MODES, SLOMode
from onbeat.metrics.record import RequestRecord
from onbeat.server.answer_report import slo_report, worst_report
from onbeat.server.choices import Choice
from onbeat.server.slo_defaults import SLODefaults
from tests.cpu.server.predicting_engine import PredictingEngine
from tests.cpu.server.running import HELLO, Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LOOSE = {"ttft_ms": 60_000, "tbt_ms": 30_000}
TIGHT = {"ttft_ms": 1, "tbt_ms": 1}
KEYS = {
    "class",
    "ttft_ms",
    "engine_ttft_ms",
    "tbt_p99_ms",
    "token_attainment",
    "met",
    "predicted_ttft_ms",
    "relegated",
}


@pytest.fixture
def engine() -> PredictingEngine:
    return PredictingEngine()


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})])
async def test_a_whole_answer_says_how_it_went(
    served: Served, engine: PredictingEngine, path: str, body: dict[str, Any]
) -> None:
    engine.predicted_ttft = 0.0125
    answer = await served.post(path, {**body, "slo": LOOSE | {"class": "batch"}})
    slo = answer.json["slo"]
    assert slo.keys() == KEYS
    assert (slo["class"], slo["met"], slo["relegated"]) == ("batch", True, False)
    assert slo["predicted_ttft_ms"] == 12.5
    assert 0 < slo["ttft_ms"] < 60_000
    assert slo["token_attainment"] is None  # its tokens had no deadlines: nobody saw them
    assert answer.headers["x-onbeat-predicted-ttft-ms"] == "12.5"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})])
async def test_the_last_chunk_says_how_it_went(
    served: Served, engine: PredictingEngine, path: str, body: dict[str, Any]
) -> None:
    engine.relegates = True
    events = await served.events(path, {**body, "slo": LOOSE})
    assert events[-1] == "[DONE]"
    assert [("slo" in event) for event in events[:-1]] == [False] * (len(events) - 2) + [True]
    last = events[-2]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["slo"].keys() == KEYS
    assert (last["slo"]["met"], last["slo"]["token_attainment"]) == (True, 1.0)
    assert (last["slo"]["relegated"], last["slo"]["predicted_ttft_ms"]) == (True, None)


@pytest.mark.parametrize("continuous", [False, True])
async def test_with_usage_the_usage_chunk_is_the_last(served: Served, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    events = await served.events(CHAT, {"messages": HELLO, "slo": LOOSE, "stream_options": options})
    assert [("slo" in event) for event in events[:-1]] == [False] * (len(events) - 2) + [True]
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 14


async def test_a_stream_without_objectives_says_nothing(served: Served, engine: PredictingEngine) -> None:
    events = await served.events(CHAT, {"messages": HELLO})
    assert not any("slo" in event for event in events[:-1])


async def test_a_missed_objective_is_not_met(served: Served, engine: PredictingEngine) -> None:
    engine.script.seconds_per_step = 0.02
    events = await served.events(TEXT, {"prompt": "a", "slo": TIGHT})
    slo = events[-2]["slo"]
    assert slo["met"] is False
    assert slo["ttft_ms"] >= 20
    assert slo["tbt_p99_ms"] >= 20
    assert slo["token_attainment"] < 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_predictions_go_in_a_header_even_without_objectives(
    served: Served, engine: PredictingEngine, stream: bool
) -> None:
    engine.predicted_ttft = 0.25
    answer = await served.post(CHAT, {"messages": HELLO, "stream": stream})
    assert answer.headers["x-onbeat-predicted-ttft-ms"] == "250.0"
    assert b'"slo"' not in answer.body


async def test_without_a_prediction_there_is_no_header(served: Served, engine: PredictingEngine) -> None:
    engine.predicted_ttft = float("inf")
    answer = await served.post(CHAT, {"messages": HELLO, "slo": LOOSE})
    assert "x-onbeat-predicted-ttft-ms" not in answer.headers
    assert answer.json["slo"]["predicted_ttft_ms"] is None


async def test_several_choices_say_it_once_on_the_very_last_chunk(served: Served) -> None:
    events = await served.events(CHAT, {"messages": HELLO, "slo": LOOSE, "n": 3})
    assert [("slo" in event) for event in events[:-1]] == [False] * (len(events) - 2) + [True]


async def test_the_official_client_reads_it(served: Served) -> None:
    slo = {"slo": LOOSE}
    whole = await served.client.chat.completions.create(model="fake/model", messages=HELLO, extra_body=slo)
    assert (whole.model_extra or {})["slo"]["met"] is True
    stream = await served.client.chat.completions.create(
        model="fake/model", messages=HELLO, stream=True, extra_body=slo
    )
    chunks = [chunk async for chunk in stream]
    assert (chunks[-1].model_extra or {})["slo"]["met"] is True
    tier = await served.client.chat.completions.create(
        model="fake/model", messages=HELLO, service_tier="flex"
    )
    assert (tier.model_extra or {})["slo"]["class"] == "batch"


@pytest.mark.parametrize("served", [{"slo": SLODefaults(slo=SLO(ttft=30.0))}], indirect=True)
async def test_the_servers_own_objectives_are_answered_too(served: Served) -> None:
    answer = await served.post(CHAT, {"messages": HELLO})
    assert (answer.json["slo"]["met"], answer.json["slo"]["class"]) == (True, None)


def choice(
    times: list[float],
    sizes: list[int] | None = None,
    *,
    slo: SLO | None = None,
    is_streamed: bool = True,
    index: int = 0,
) -> Choice:
    slo = SLO(ttft=1.0, tbt=0.1) if slo is None else slo
    delivery_times = array("d", (100.0 + time for time in times))
    record = RequestRecord(
        request_id=str(index),
        arrival=100.0,
        num_prompt_tokens=1,
        request_class=f"class-{index}",
        slo=slo,
        is_streamed=is_streamed,
        delivery_times=delivery_times,
        delivery_sizes=array("I", sizes or [1] * len(times)),
        finish_reason="length",
        end=delivery_times[-1],
    )
    request = Request(request_id=str(index), prompt_token_ids=(1,), arrival=100.0, slo=slo)
    return Choice(index=index, prompt_index=0, request=request, is_streamed=is_streamed, record=record)


def report(*choices: Choice, mode: SLOMode = "stream") -> dict[str, Any]:
    reports = [slo_report(each, mode) for each in choices]
    result = worst_report([each for each in reports if each is not None])
    assert result is not None
    shown: dict[str, Any] = msgspec.to_builtins(result)
    return shown


def test_a_stream_may_use_its_slack_and_a_gap_may_not() -> None:
    # 0.5 s ahead of the first deadline, then a stall of 0.3 s
    early = choice([0.5, 0.6, 0.9, 1.0])
    assert report(early, mode="stream") | {"predicted_ttft_ms": None} == {
        "class": "class-0",
        "ttft_ms": 500.0,
        "engine_ttft_ms": None,
        "tbt_p99_ms": pytest.approx(296, abs=1e-3),
        "token_attainment": 1.0,
        "met": True,
        "predicted_ttft_ms": None,
        "relegated": False,
    }
    in_gaps = report(early, mode="gap")
    assert (in_gaps["met"], in_gaps["token_attainment"]) == (False, pytest.approx(2 / 3))


def test_late_tokens_are_counted_one_by_one_in_a_delivery() -> None:
    # deadlines 1.0, 1.1, 1.2, 1.3, ...: at 1.15 tokens 0 and 1 are due or past, token 1 is late
    result = report(choice([1.0, 1.15], [1, 3]))
    assert result["token_attainment"] == 0.75
    assert result["met"] is False


def test_without_streaming_tokens_have_no_deadline() -> None:
    result = report(choice([0.5, 9.0], is_streamed=False))
    assert (result["met"], result["token_attainment"]) == (True, None)
    assert result["tbt_p99_ms"] == 8500.0
    late = choice([0.5, 9.0], slo=SLO(ttft=1.0, e2e=5.0), is_streamed=False)
    assert report(late)["met"] is False


def test_a_single_delivery_has_no_gap() -> None:
    result = report(choice([0.5], [7]))
    assert (result["tbt_p99_ms"], result["met"], result["token_attainment"]) == (None, True, 1.0)
    assert report(choice([0.5]), mode="gap")["token_attainment"] == 1.0


def test_of_several_choices_the_worst_counts() -> None:
    good = choice([0.2, 0.3], index=0)
    late_first = choice([1.5, 1.6], index=1)
    late_tokens = choice([0.2, 3.0], index=2)
    slower = choice([0.4, 0.5], index=3)
    assert report(good, slower)["class"] == "class-3"
    assert report(good, late_first, slower)["class"] == "class-1"
    assert report(late_first, late_tokens, good)["class"] == "class-2"


def test_without_objectives_nothing_is_said() -> None:
    empty = choice([0.1], slo=SLO())
    assert slo_report(empty, "stream") is None
    assert worst_report([]) is None


@given(
    gaps=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=60),
    sizes=st.data(),
    tbt=st.floats(0.001, 0.3),
    mode=st.sampled_from(SLO_MODES),
)
def test_attainment_and_verdict_agree(
    gaps: list[float], sizes: st.DataObject, tbt: float, mode: SLOMode
) -> None:
    times = [sum(gaps[: end + 1]) for end in range(len(gaps))]
    counts = sizes.draw(st.lists(st.integers(1, 4), min_size=len(times), max_size=len(times)))
    result = report(choice(times, counts, slo=SLO(ttft=60.0, tbt=tbt)), mode=mode)
    assert 0 <= result["token_attainment"] <= 1
    if mode == "stream":
        # one token in a hundred may be late
        assert result["met"] == (result["token_attainment"] >= 0.99 - 1e-12)
    elif result["token_attainment"] == 1:
        assert result["met"]
