"""The objectives of requests, and how the server is told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.bench.bench_config import BenchConfig, SendSLO, SLOTransport, check_transport, choose_transport
from onbeat.bench.bench_load import BenchLoad, PromptTools, RunConfig
from onbeat.bench.record import PayloadBuilder, SentRequest
from onbeat.bench.session import RequestOffer
from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.prompts import PromptWriter, estimated_pool
from onbeat.workload.slo_classes import SLOClass

TIGHT = SLOClass(name="tight", slo=SLO(ttft=0.25, tbt=0.05), share=0.25)
LOOSE = SLOClass(name="loose", slo=SLO(e2e=60.0), share=0.75)


def record(own: SLOClass | None = None, index: int = 0) -> SentRequest:
    made = SentRequest(index=index, num_prompt_tokens=4, max_tokens=4)
    if own is not None:
        made.slo, made.request_class = own.slo, own.name
    return made


def offered(*classes: SLOClass, size: int = 1, seed: int = 0) -> OfferedLoad:
    lengths = np.full(size, 2)
    load = OfferedLoad(name="test", num_prompt_tokens=lengths, num_output_tokens=lengths)
    return load.with_classes(classes, seed=seed) if classes else load


def test_the_body_names_class_and_objectives_in_milliseconds() -> None:
    transport = SLOTransport(how="body", asks_to_shed=True)

    assert transport.body(record(TIGHT)) == {
        "slo": {"ttft_ms": 250.0, "tbt_ms": 50.0, "class": "tight", "shed": True}
    }
    assert transport.headers(record(TIGHT)) == {}


def test_a_weight_is_sent_where_it_is_not_one() -> None:
    heavy = SLOClass(name="heavy", slo=SLO(ttft=0.5), weight=3.0)
    made = SentRequest.of(offered(heavy), 0)

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
    made = SentRequest.of(offered(own), 0)

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
    with pytest.raises(ConfigError, match=r"--shed .*onbeat"):
        choose_transport("auto", is_onbeat=False, asks_to_shed=True)


@pytest.mark.parametrize(
    ("send", "classes", "sheds", "message"),
    [
        ("auto", (), True, "--shed needs objectives"),
        ("body", (), False, "has nothing to send"),
        ("headers", (TIGHT, LOOSE), True, "--shed goes in the body"),
        ("headers", (TIGHT, LOOSE), False, "cannot carry e2e objectives or weights"),
    ],
)
def test_what_cannot_be_told_is_refused(
    send: SendSLO, classes: tuple[SLOClass, ...], sheds: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_transport(send, classes, asks_to_shed=sheds)


def test_runs_are_refused_before_a_server_is_asked() -> None:
    for wrong in ({"shed": True}, {"dataset_name": "agents", "backend": "openai-embeddings"}):
        with pytest.raises(ConfigError, match=r"--shed|--backend"):
            make(BenchConfig, **wrong).runs()
    [run] = make(BenchConfig, ttft=0.5, shed=True).runs()
    assert [each.slo.ttft for each in run.classes] == [0.5]


def test_classes_are_shared_out_exactly_and_by_the_seed() -> None:
    def names(seed: int) -> list[str | None]:
        load = offered(TIGHT, LOOSE, size=20, seed=seed)
        return [SentRequest.of(load, row).request_class for row in range(20)]

    assert names(1).count("tight") == 5
    assert names(1) == names(1) != names(2)


def test_a_class_with_a_trace_sends_prompts_as_long_as_that(tmp_path: Path) -> None:
    trace, custom = tmp_path / "code.csv", tmp_path / "custom.jsonl"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n40,7\n")
    custom.write_text('{"prompt": "one text", "output_tokens": 2}\n' * 20)
    tools = PromptTools(
        writer=PromptWriter(estimated_pool(), "salt"), count_tokens=lambda text: len(text.split())
    )
    classes = (TIGHT, replace(LOOSE, trace=trace))
    asked = BenchLoad(dataset_name="custom", dataset_path=custom)
    mixed = RequestOffer.make(RunConfig(load=asked, classes=classes), tools)
    lengths = mixed.load.num_output_tokens.tolist()
    assert sorted(lengths) == [2] * 5 + [7] * 15
    for index, length in enumerate(lengths):
        prompt = mixed.prompts(index)
        assert (prompt == "one text") == (length == 2)
        if length == 7:
            assert mixed.load.num_prompt_tokens[index] == 40
            assert len(prompt.split()) > 20
    assert lengths == offered(*classes, size=20).num_output_tokens.tolist()


def test_traces_of_classes_do_not_go_with_prompts_of_blocks(tmp_path: Path) -> None:
    load = replace(offered(), block_ids=((1,),))
    own = SLOClass(name="own", slo=SLO(ttft=0.5), trace=tmp_path / "code.csv")
    with pytest.raises(ConfigError, match="share blocks"):
        load.with_classes([own], seed=0)
