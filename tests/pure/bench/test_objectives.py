"""The objectives of requests, and how the server is told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.bench.bench_config import BenchConfig, TargetConfig
from onbeat.bench.objectives import RequestObjectives, SendSLO, SLOTransport, choose_transport
from onbeat.bench.payload import PayloadBuilder
from onbeat.bench.record import RequestRecord
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.prompts import BlockPrompts, GivenPrompts, PromptWriter, estimated_pool
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.workload import Workload

TIGHT = SLOClass(name="tight", slo=SLO(ttft=0.25, tbt=0.05), share=0.25)
LOOSE = SLOClass(name="loose", slo=SLO(e2e=60.0), share=0.75)


def record(own: SLOClass | None = None, index: int = 0) -> RequestRecord:
    made = RequestRecord(index=index, num_prompt_tokens=4, max_tokens=4)
    if own is not None:
        made.slo, made.request_class = own.slo, own.name
    return made


def test_the_body_names_class_and_objectives_in_milliseconds() -> None:
    transport = SLOTransport(how="body", asks_to_shed=True)

    assert transport.body(record(TIGHT)) == {
        "slo": {"ttft_ms": 250.0, "tbt_ms": 50.0, "class": "tight", "shed": True}
    }
    assert transport.headers(record(TIGHT)) == {}


def test_a_weight_is_sent_where_it_is_not_one() -> None:
    heavy = SLOClass(name="heavy", slo=SLO(ttft=0.5), weight=3.0)
    made = record()
    RequestObjectives((heavy,), 1, seed=0).note(made)

    assert SLOTransport(how="body").body(made)["slo"] == {"ttft_ms": 500.0, "class": "heavy", "weight": 3.0}


def test_a_class_made_of_flags_has_no_name_for_the_server() -> None:
    own = SLOClass(name="default", slo=SLO(ttft=0.5))

    assert SLOTransport(how="body").body(record(own)) == {"slo": {"ttft_ms": 500.0}}


def test_a_server_that_knows_no_classes_is_told_the_objectives_alone() -> None:
    transport = SLOTransport(how="body", names_classes=False)

    assert transport.body(record(TIGHT)) == {"slo": {"ttft_ms": 250.0, "tbt_ms": 50.0}}


def test_headers_carry_ttft_and_tpot() -> None:
    transport = SLOTransport(how="headers")

    assert transport.headers(record(TIGHT)) == {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "50"}
    assert transport.body(record(TIGHT)) == {}


@pytest.mark.parametrize(("how", "is_sent"), [("body", True), ("headers", True), ("none", False)])
def test_a_tenant_has_a_header_wherever_the_server_is_told(how: str, is_sent: bool) -> None:
    own = SLOClass(name="own", slo=SLO(e2e=9.0), tenant="team a")
    made = record()
    RequestObjectives((own,), 1, seed=0).note(made)

    sent = SLOTransport(how=how).headers(made)  # type: ignore[arg-type]
    assert sent == ({"x-llm-d-inference-fairness-id": "team a"} if is_sent else {})


@pytest.mark.parametrize("how", ["body", "headers", "none"])
def test_a_request_without_objectives_says_nothing(how: str) -> None:
    transport = SLOTransport(how=how)  # type: ignore[arg-type]

    assert (transport.body(record()), transport.headers(record())) == ({}, {})


def test_fields_of_one_request_stand_beside_those_of_all() -> None:
    payload = PayloadBuilder(api="chat", model="m", extra={"temperature": 0.0})

    body = orjson.loads(payload.build("hi", 3, {"slo": {"ttft_ms": 1}}))

    assert (body["slo"], body["temperature"], body["max_tokens"]) == ({"ttft_ms": 1}, 0.0, 3)


@pytest.mark.parametrize(
    ("send", "is_onbeat", "how"),
    [("auto", True, "body"), ("auto", False, "none"), ("headers", True, "headers"), ("body", False, "body")],
)
def test_auto_speaks_only_to_onbeat(send: SendSLO, is_onbeat: bool, how: str) -> None:
    assert choose_transport(send, is_onbeat=is_onbeat, asks_to_shed=False).how == how


def test_shedding_cannot_be_asked_of_a_server_that_is_not_told() -> None:
    with pytest.raises(ConfigError, match="does not say that it is onbeat"):
        choose_transport("auto", is_onbeat=False, asks_to_shed=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asks_to_shed": True}, "--shed needs objectives"),
        ({"send_slo": "body"}, "has nothing to send"),
        (
            {"send_slo": "headers", "asks_to_shed": True, "slo_classes": (TIGHT, LOOSE)},
            "--shed goes in the body",
        ),
        ({"send_slo": "headers", "slo_classes": (TIGHT, LOOSE)}, "cannot carry e2e objectives or weights"),
    ],
)
def test_what_cannot_be_told_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(target=TargetConfig(), **options)  # type: ignore[arg-type]


def test_classes_are_shared_out_exactly_and_by_the_seed() -> None:
    def names(seed: int) -> list[str | None]:
        objectives = RequestObjectives((TIGHT, LOOSE), 20, seed)
        records = [record(index=index) for index in range(20)]
        for each in records:
            objectives.note(each)
        return [each.request_class for each in records]

    assert names(1).count("tight") == 5
    assert names(1) == names(1) != names(2)


def test_a_class_with_a_trace_sends_prompts_as_long_as_that(tmp_path: Path) -> None:
    trace = tmp_path / "code.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n40,7\n")
    usual = ["one text"] * 20
    lengths = np.full(20, 2)
    workload = Workload(
        name="test", prompts=GivenPrompts(usual), num_prompt_tokens=lengths, max_tokens=lengths
    )
    objectives = RequestObjectives((TIGHT, replace(LOOSE, trace=trace)), 20, seed=0)
    mixed = objectives.with_own_traces(workload, PromptWriter(estimated_pool(), "salt"))
    assert sorted(mixed.max_tokens.tolist()) == [2] * 5 + [7] * 15
    for index in range(20):
        request = mixed.request(index)
        assert (request.prompt == "one text") == (request.max_tokens == 2)
        if request.max_tokens == 7:
            assert request.num_prompt_tokens == 40
            assert len(request.prompt.split()) > 20
    simulated = OfferedLoad(name="test", num_prompt_tokens=lengths, num_output_tokens=lengths).with_classes(
        (TIGHT, replace(LOOSE, trace=trace)), seed=0
    )
    assert (simulated.num_output_tokens == mixed.max_tokens).all()


def test_traces_of_classes_do_not_go_with_prompts_of_blocks(tmp_path: Path) -> None:
    writer = PromptWriter(estimated_pool(), "salt")
    lengths = np.full(1, 512)
    prompts = BlockPrompts(writer=writer, num_tokens=[512], block_ids=((1,),), block_size=512)
    workload = Workload(name="test", prompts=prompts, num_prompt_tokens=lengths, max_tokens=lengths)
    own = SLOClass(name="own", slo=SLO(ttft=0.5), trace=tmp_path / "code.csv")
    with pytest.raises(ConfigError, match="share blocks"):
        RequestObjectives((own,), 1, seed=0).with_own_traces(workload, writer)
