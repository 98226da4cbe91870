"""What a vLLM server's owner sets for onbeat, and what requests of its engine are then held to."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.slo import SLO, ShedMode
from onbeat.server.objectives import RequestObjectives
from onbeat.server.slo_defaults import SLODefaults
from onbeat.vllm.objectives import PluginConfig, as_extra_args, read, read_config

CLASSES = """
classes:
  - {name: chat, ttft_ms: 800, tbt_ms: 60, weight: 2, shed: true}
"""


@pytest.fixture
def defaults(tmp_path) -> SLODefaults:
    path = tmp_path / "classes.yaml"
    path.write_text(CLASSES)
    return read_config({"onbeat": {"classes": str(path), "class": "standard", "e2e_ms": 9000}}, {})[1]


def test_nothing_need_be_set():
    assert read_config(None, {}) == read_config({"other": 1}, {}) == (PluginConfig(), SLODefaults())


def test_all_can_be_set(tmp_path, defaults):
    stated = {"ttft_ms": 500, "shed": "reject", "mode": "gap", "telemetry": "tcp://127.0.0.1:5557"}
    config, own = read_config(
        {"onbeat": stated | {"calibrate": "off", "profile": "p", "max_body_bytes": 9}}, {}
    )
    assert (own.slo, own.shed, own.mode) == (SLO(ttft=0.5), ShedMode.REJECT, "gap")
    assert (config.telemetry, config.calibrate) == ("tcp://127.0.0.1:5557", "off")
    assert (config.profile, config.max_body_bytes) == ("p", 9)
    assert defaults.classes["chat"].weight == 2


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"tft_ms": 5}, "mean ttft_ms"),
        ({"ttft_ms": "5"}, "a number"),
        ({"ttft_ms": True}, "a number"),
        ({"ttft_ms": -5}, r"between 1 .* 24"),
        ({"mode": "best"}, "must be one of "),
        ({"shed": "maybe"}, "shed is 'maybe';"),
        ({"class": "gold"}, "class 'gold'"),
        ({"classes": 7}, "a text"),
        ({"telemetry": "5557"}, "ZeroMQ address"),
        ({"calibrate": "soon"}, "calibrate"),
        ({"max_body_bytes": 0}, "at least 1"),
        ([], "a mapping"),
    ],
)
def test_what_is_wrong_is_named(stated, words):
    with pytest.raises(ConfigError, match=words):
        read_config({"onbeat": stated}, {})


def test_what_a_client_states_goes_before_the_defaults(defaults):
    own = read({"slo_ttft_ms": 100, "slo_class": "chat", "temperature": 3}, defaults)
    assert own.slo == SLO(ttft=0.1, tbt=0.06)
    assert (own.slo_class, own.weight, own.shed) == ("chat", 2.0, ShedMode.REJECT)
    assert read(None, defaults).slo == SLO(ttft=2.0, tbt=0.1, e2e=9.0)
    assert read({"slo_shed": "reject"}, defaults).shed is ShedMode.REJECT
    assert read({"slo_shed": False}, defaults).shed is ShedMode.RELEGATE


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        ({"slo_ttft_ms": 0}, "ttft_ms"),
        ({"slo_ttft_ms": [1]}, "ttft_ms"),
        ({"slo_class": "gold"}, "class 'gold'"),
        ({"slo_ttl_ms": 5}, "did you mean"),
        ({"slo_weight": 3}, "at most 1"),
        ({"slo_id": "x"}, "slo_held"),
        ({"slo_id": "x", "slo_held": 5}, "slo_held"),
        ({"slo_id": "x", "slo_held": '{"shed": "never"}'}, "slo_held"),
        ({"slo_id": "x", "slo_held": '{"tenant": 5}'}, "slo_held"),
        ({"slo_id": "x", "slo_held": '{"weight": -1}'}, "weight"),
        ({"slo_id": "x", "slo_held": '{"slo": {"ttft": 0}}'}, "slo_held"),
        ({"slo_id": "x", "slo_held": '{"job": {"job_id": "j"}}'}, "job"),
    ],
)
def test_wrong_objectives_are_named(extra_args, words, defaults):
    with pytest.raises(InvalidRequest, match=words):
        read(extra_args, defaults)


def test_what_the_middleware_has_worked_out_comes_through_as_it_is(defaults):
    for own in (
        RequestObjectives(),
        RequestObjectives(slo=SLO(tbt=0.05), slo_class="chat", weight=2.0, tenant="t", shed=ShedMode.REJECT),
    ):
        assert read(as_extra_args(own, "abc"), defaults) == own


def test_a_client_that_feigns_the_middleware_gets_no_more_weight_than_anybody_may_have(defaults):
    assert read({"slo_id": "x", "slo_held": '{"weight": 999}'}, defaults).weight == 2.0
    assert read({"slo_weight": 1, "slo_tenant": "boss"}, defaults).tenant is None


def test_limits_of_keys_are_the_servers(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text("api_keys: [{key_env: KEY, tokens_per_minute: 5}]")
    with pytest.raises(ConfigError, match="API key"):
        read_config({"onbeat": {"classes": str(path)}}, {"KEY": "secret"})
