"""Which of all that is said about a request counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.server.config import ServerConfig
from onbeat.server.slo_defaults import ClassDefaults, KeyDefaults, SLODefaults, built_in_classes, key_digest
from onbeat.server.slo_fields import PromiseFields
from onbeat.server.slo_terms import Terms, read_terms

KEY = {"authorization": "Bearer secret"}
CONFIG = ServerConfig(
    api_keys=("secret", "other"),
    slo=SLODefaults(
        classes=built_in_classes()
        | {
            "chat": ClassDefaults(slo=SLO(ttft=0.3, tbt=0.03, e2e=30.0), weight=4.0, shed=ShedMode.REJECT),
            "slow": ClassDefaults(slo=SLO(e2e=60.0)),
        },
        slo=SLO(ttft=9.0, tbt=0.9),
        keys={key_digest("secret"): KeyDefaults(slo_class="chat", weight=7.0)},
    ),
)
PLAIN = ServerConfig()


def terms(
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    config: ServerConfig = PLAIN,
) -> Terms:
    return read_terms(PromiseFields.model_validate(body or {}), Headers(headers or {}), config)


ALL_BODY = {
    "slo": {"ttft_ms": 100, "tbt_ms": 10, "e2e_ms": 1000},
    "ttft_slo_ms": 200,
    "tpot_slo_ms": 20,
    "ttlt_slo_ms": 2000,
}
NEW_HEADERS = {"x-llm-d-slo-ttft-ms": "400", "x-llm-d-slo-tpot-ms": "40"}
OLD_HEADERS = {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "50"}


@pytest.mark.parametrize(
    ("body", "headers", "slo"),
    [
        (ALL_BODY, NEW_HEADERS | OLD_HEADERS | KEY, SLO(ttft=0.1, tbt=0.01, e2e=1.0)),
        (ALL_BODY | {"slo": None}, NEW_HEADERS | KEY, SLO(ttft=0.2, tbt=0.02, e2e=2.0)),
        ({}, NEW_HEADERS | OLD_HEADERS, SLO(ttft=0.4, tbt=0.04)),
        ({}, OLD_HEADERS, SLO(ttft=0.5, tbt=0.05)),
        ({}, KEY, SLO(ttft=0.3, tbt=0.03, e2e=30.0)),
        ({}, {}, SLO(ttft=9.0, tbt=0.9)),
        # field by field: each comes from the first that states it
        (
            {"slo": {"ttft_ms": 100}, "tpot_slo_ms": 20},
            NEW_HEADERS | KEY,
            SLO(ttft=0.1, tbt=0.02, e2e=30.0),
        ),
        ({"slo": {"e2e_ms": 1000}}, {"x-slo-ttft-ms": "500"} | KEY, SLO(ttft=0.5, tbt=0.03, e2e=1.0)),
        ({"slo": {"tbt_ms": 10}}, {}, SLO(ttft=9.0, tbt=0.01)),
        # a class gives what nobody states, wherever it is named; server defaults then stay out
        ({"slo": {"class": "slow"}}, {}, SLO(e2e=60.0)),
        ({"slo": {"class": "slow"}}, NEW_HEADERS, SLO(ttft=0.4, tbt=0.04, e2e=60.0)),
        ({"slo": {"class": "batch", "ttft_ms": 100}}, KEY, SLO(ttft=0.1, tbt=0.5)),
        # an empty object and nulls state nothing
        ({"slo": {}}, {}, SLO(ttft=9.0, tbt=0.9)),
        ({"slo": {"ttft_ms": None, "class": None}}, {}, SLO(ttft=9.0, tbt=0.9)),
    ],
)
def test_objectives_by_precedence(body: dict[str, Any], headers: dict[str, str], slo: SLO) -> None:
    assert terms(body, headers, CONFIG).slo == slo


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({"slo": {"class": "batch"}, "service_tier": "priority"}, KEY, "batch"),
        ({"service_tier": "priority"}, KEY, "interactive"),
        ({"service_tier": "default"}, {}, "standard"),
        ({"service_tier": "flex"}, {}, "batch"),
        ({"service_tier": "auto"}, KEY, "chat"),
        ({"service_tier": "scale"}, {}, None),
        ({}, KEY, "chat"),
        ({}, {"authorization": "Bearer other"}, None),
        ({}, {}, None),
    ],
)
def test_the_class_by_precedence(body: dict[str, Any], headers: dict[str, str], name: str | None) -> None:
    result = terms(body, headers, CONFIG)
    assert result.slo_class == name
    assert result.slo == (CONFIG.slo.classes[name].slo if name else CONFIG.slo.slo)


def test_the_default_class_fills_what_the_default_objectives_leave() -> None:
    config = ServerConfig(slo=SLODefaults(slo=SLO(ttft=1.0), slo_class="batch"))
    assert terms({}, {}, config) == Terms(
        slo=SLO(ttft=1.0, tbt=0.5), slo_class="batch", shed=ShedMode.RELEGATE
    )
    assert terms({"service_tier": "default"}, {}, config).slo == SLO_CLASSES["standard"]


def test_a_request_that_nobody_promises_anything_has_no_slo() -> None:
    result = terms({"slo": {"weight": 3}})
    assert (result.slo, result.slo_class, result.weight, result.tenant) == (None, None, 3.0, None)


@pytest.mark.parametrize(
    ("body", "headers", "weight"),
    [
        ({"slo": {"weight": 2.5}}, KEY, 2.5),
        ({"slo": {"class": "chat"}}, KEY, 7.0),
        ({"slo": {"class": "chat"}}, {}, 4.0),
        ({"slo": {"class": "slow"}}, {}, 1.0),
    ],
)
def test_weight_by_precedence(body: dict[str, Any], headers: dict[str, str], weight: float) -> None:
    assert terms(body, headers, CONFIG).weight == weight


@pytest.mark.parametrize("default", list(ShedMode))
def test_shed_by_precedence(default: ShedMode) -> None:
    config = ServerConfig(slo=SLODefaults(classes=CONFIG.slo.classes, shed=default))
    assert terms({"slo": {"shed": True}}, {}, config).shed is ShedMode.REJECT
    assert terms({"slo": {"shed": False, "class": "chat"}}, {}, config).shed is ShedMode.RELEGATE
    assert terms({"slo": {"class": "chat"}}, {}, config).shed is ShedMode.REJECT
    assert terms({"slo": {"class": "slow"}}, {}, config).shed is default


def test_tenant_by_precedence() -> None:
    gateway = {"x-llm-d-inference-fairness-id": "team-a"}
    assert terms({"user": "u"}, gateway | KEY, CONFIG).tenant == "team-a"
    of_key = terms({"user": "u"}, KEY, CONFIG).tenant
    of_user = terms({"user": "u"}, {}, CONFIG).tenant
    assert of_key is not None
    assert of_user is not None
    assert of_key.startswith("key:")
    assert of_user.startswith("user:")
    assert of_user != terms({"user": "v"}, {}, CONFIG).tenant
    assert terms({"user": ""}, {}, CONFIG).tenant is None


def test_neither_keys_nor_users_can_be_read_from_a_tenant() -> None:
    for tenant in (terms({}, KEY, CONFIG).tenant, terms({"user": "secret"}, {}, CONFIG).tenant):
        assert tenant is not None
        assert "secret" not in tenant


def test_without_keys_the_key_that_clients_make_up_is_nobody() -> None:
    assert terms({"user": "u"}, KEY).tenant == terms({"user": "u"}).tenant


@given(milliseconds=st.floats(1, 86_400_000))
def test_every_objective_in_range_arrives(milliseconds: float) -> None:
    expected = milliseconds / 1e3
    assert terms({"slo": {"ttft_ms": milliseconds}}).slo == SLO(ttft=expected)
    assert terms({"tpot_slo_ms": milliseconds}).slo == SLO(tbt=expected)
    assert terms(headers={"x-slo-ttft-ms": repr(milliseconds)}).slo == SLO(ttft=expected)


OUT_OF_RANGE = st.floats(max_value=0.999) | st.floats(min_value=86_400_001) | st.integers(max_value=0)


@given(value=OUT_OF_RANGE | st.just(float("nan")))
def test_no_header_out_of_range_becomes_an_objective(value: float) -> None:
    with pytest.raises(InvalidRequest, match="x-llm-d-slo-tpot-ms"):
        terms(headers={"x-llm-d-slo-tpot-ms": repr(value)})


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "fast",
            "NaN",
            "inf",
            "-5",
            "+5",
            "0x10",
            "1_000",
            "1,5",
            "5 ms",
            ".5",
            "5.",
            "²",
            "0",
            "0.9",
        ),
        *("86400001", "9" * 30, "1e400", "18446744073709551615", "1e-7"),
    ],
)
def test_a_header_that_is_no_number_in_range_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="the header x-slo-ttft-ms is") as refused:
        terms(headers={"x-slo-ttft-ms": text})
    assert (refused.value.param, refused.value.code) == ("x-slo-ttft-ms", "invalid_value")


def test_a_wrong_header_counts_even_where_another_goes_before_it() -> None:
    with pytest.raises(InvalidRequest, match="x-slo-ttft-ms is '-1'"):
        terms({"slo": {"ttft_ms": 100}}, {"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "-1"})


@pytest.mark.parametrize(
    "fields",
    [
        {"slo_class": "chta"},
        {"keys": {key_digest("k"): KeyDefaults(slo_class="chta")}},
        {"mode": "median"},
    ],
)
def test_defaults_that_name_what_does_not_exist_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"known are|choose one of"):
        SLODefaults(**fields)


def test_terms_of_a_key_that_opens_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="opens nothing here"):
        ServerConfig(api_keys=("a",), slo=SLODefaults(keys={key_digest("b"): KeyDefaults(weight=2.0)}))


@pytest.mark.parametrize("weight", [0.0, -1.0, 1000.5, float("nan"), float("inf")])
def test_weights_have_a_range(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight is"):
        ClassDefaults(slo=SLO(ttft=1.0), weight=weight)
    with pytest.raises(ConfigError, match="weight is"):
        KeyDefaults(weight=weight)
