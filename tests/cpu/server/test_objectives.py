"""Which of all statements about a request's objectives counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.server.middleware import HttpContext
from onbeat.server.objectives import ObjectiveFields, RequestObjectives, request_objectives
from onbeat.server.server_config import ServerConfig
from onbeat.server.slo_defaults import ClassDefaults, KeyDefaults, SLODefaults, built_in_classes, key_digest
from tests.many_cases import each_case

KEY = key_digest("secret")
DEFAULTS = SLODefaults(
    classes=built_in_classes()
    | {
        "chat": ClassDefaults(slo=SLO(ttft=0.3, tbt=0.03, e2e=30.0), weight=4.0, shed=ShedMode.REJECT),
        "slow": ClassDefaults(slo=SLO(e2e=60.0)),
    },
    slo=SLO(ttft=9.0, tbt=0.9),
    keys={key_digest("secret"): KeyDefaults(slo_class="chat", weight=7.0)},
)
PLAIN = SLODefaults()


def held_to(
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    key: str | None = None,
    defaults: SLODefaults = PLAIN,
) -> RequestObjectives:
    fields = ObjectiveFields.model_validate(body or {})
    context = HttpContext("id", "/v1/completions", key_digest=key)
    return request_objectives(fields, Headers(headers or {}), context, defaults)


ALL_BODY = {"slo": {"ttft_ms": 100, "tbt_ms": 10, "e2e_ms": 1000}}
HEADERS = {"x-llm-d-slo-ttft-ms": "400", "x-llm-d-slo-tpot-ms": "40"}


@each_case(
    ("body", "headers", "key", "slo"),
    [
        (ALL_BODY, HEADERS, KEY, SLO(ttft=0.1, tbt=0.01, e2e=1.0)),
        ({}, HEADERS, None, SLO(ttft=0.4, tbt=0.04)),
        ({}, {}, KEY, SLO(ttft=0.3, tbt=0.03, e2e=30.0)),
        ({}, {}, None, SLO(ttft=9.0, tbt=0.9)),
        # field by field: each comes from the first that states it
        ({"slo": {"ttft_ms": 100}}, HEADERS, KEY, SLO(ttft=0.1, tbt=0.04, e2e=30.0)),
        ({"slo": {"e2e_ms": 1000}}, {"x-llm-d-slo-ttft-ms": "500"}, KEY, SLO(ttft=0.5, tbt=0.03, e2e=1.0)),
        ({"slo": {"e2e_ms": 1000}}, {"x-slo-ttft-ms": "500"}, KEY, SLO(ttft=0.5, tbt=0.03, e2e=1.0)),
        ({"slo": {"tbt_ms": 10}}, {}, None, SLO(ttft=9.0, tbt=0.01)),
        # a class gives what nobody states, wherever it is named; server defaults then stay out
        ({"slo": {"class": "slow"}}, {}, None, SLO(e2e=60.0)),
        ({"slo": {"class": "slow"}}, HEADERS, None, SLO(ttft=0.4, tbt=0.04, e2e=60.0)),
        ({"slo": {"class": "batch", "ttft_ms": 100}}, {}, KEY, SLO(ttft=0.1, tbt=0.5)),
        # an empty object and nulls state nothing
        ({"slo": {}}, {}, None, SLO(ttft=9.0, tbt=0.9)),
        ({"slo": {"ttft_ms": None, "class": None}}, {}, None, SLO(ttft=9.0, tbt=0.9)),
    ],
)
def test_objectives_by_precedence(
    body: dict[str, Any], headers: dict[str, str], key: str | None, slo: SLO
) -> None:
    assert held_to(body, headers, key, DEFAULTS).slo == slo


@each_case(
    ("body", "key", "name"),
    [
        ({"slo": {"class": "batch"}, "service_tier": "priority"}, KEY, "batch"),
        ({"service_tier": "priority"}, KEY, "interactive"),
        ({"service_tier": "default"}, None, "standard"),
        ({"service_tier": "flex"}, None, "batch"),
        ({"service_tier": "auto"}, KEY, "chat"),
        ({"service_tier": "scale"}, None, None),
        ({}, KEY, "chat"),
        ({}, key_digest("other"), None),
        ({}, None, None),
    ],
)
def test_the_class_by_precedence(body: dict[str, Any], key: str | None, name: str | None) -> None:
    result = held_to(body, {}, key, DEFAULTS)
    assert result.slo_class == name
    assert result.slo == (DEFAULTS.classes[name].slo if name else DEFAULTS.slo)


def test_the_default_class_fills_what_the_default_objectives_leave() -> None:
    defaults = SLODefaults(slo=SLO(ttft=1.0), slo_class="batch")
    assert held_to(defaults=defaults) == RequestObjectives(
        slo=SLO(ttft=1.0, tbt=0.5), slo_class="batch", shed=ShedMode.RELEGATE
    )
    assert held_to({"service_tier": "default"}, defaults=defaults).slo == SLO_CLASSES["standard"]


def test_without_objectives_there_is_no_slo() -> None:
    result = held_to({"slo": {"weight": 0.3}})
    assert (result.slo, result.slo_class, result.weight, result.tenant) == (None, None, 0.3, None)


@pytest.mark.parametrize(
    ("body", "key", "weight"),
    [
        ({"slo": {"weight": 2.5}}, KEY, 2.5),
        ({"slo": {"class": "chat"}}, KEY, 7.0),
        ({"slo": {"class": "chat"}}, None, 4.0),
        ({"slo": {"class": "slow"}}, None, 1.0),
    ],
)
def test_weight_by_precedence(body: dict[str, Any], key: str | None, weight: float) -> None:
    assert held_to(body, {}, key, DEFAULTS).weight == weight


OF_KEYS = SLODefaults(
    classes={
        **DEFAULTS.classes,
        "light": ClassDefaults(slo=SLO(ttft=1.0), weight=0.5),
        "heavy": ClassDefaults(slo=SLO(ttft=1.0), weight=100.0),
    },
    keys={
        "weighty": KeyDefaults(weight=7.0),
        "of light": KeyDefaults(slo_class="light"),
        "of slow": KeyDefaults(slo_class="slow"),
    },
)


@each_case(
    ("key", "slo", "weight"),
    [
        # without a word of the owner a caller is worth 1 at most, with keys and without
        (None, {"weight": 1}, 1.0),
        (None, {"weight": 1.01}, None),
        ("nobody's", {"weight": 1000}, None),
        # what the owner lets a class be worth, its requests may be
        (None, {"weight": 4, "class": "chat"}, 4.0),
        (None, {"weight": 4.5, "class": "chat"}, None),
        ("of slow", {"weight": 4, "class": "chat"}, 4.0),
        # a key's weight bounds its holder, whatever class is named
        ("weighty", {"weight": 7}, 7.0),
        ("weighty", {"weight": 7.5, "class": "heavy"}, None),
        ("weighty", {"class": "heavy"}, 7.0),
        # so does the weight of a key's class
        ("of light", {"weight": 0.6}, None),
        ("of light", {"class": "heavy"}, 0.5),
        ("of light", {"class": "slow"}, 0.5),
        ("of light", {"weight": 0.1, "class": "heavy"}, 0.1),
    ],
)
def test_nobody_claims_more_weight_than_the_owner_gives(
    key: str | None, slo: dict[str, Any], weight: float | None
) -> None:
    if weight is None:
        with pytest.raises(InvalidRequest, match=f"slo.weight is {slo['weight']:g}; .* most") as caught:
            held_to({"slo": slo}, key=key, defaults=OF_KEYS)
        assert caught.value.param == "slo.weight"
    else:
        assert held_to({"slo": slo}, key=key, defaults=OF_KEYS).weight == weight


@pytest.mark.parametrize("default", list(ShedMode))
def test_shed_by_precedence(default: ShedMode) -> None:
    defaults = SLODefaults(classes=DEFAULTS.classes, shed=default)
    assert held_to({"slo": {"shed": True}}, defaults=defaults).shed is ShedMode.REJECT
    assert held_to({"slo": {"shed": False, "class": "chat"}}, defaults=defaults).shed is ShedMode.RELEGATE
    assert held_to({"slo": {"class": "chat"}}, defaults=defaults).shed is ShedMode.REJECT
    assert held_to({"slo": {"class": "slow"}}, defaults=defaults).shed is default


def test_tenant_by_precedence() -> None:
    gateway = {"x-llm-d-inference-fairness-id": "team-a"}
    assert held_to({"user": "u"}, gateway).tenant == "team-a", "without keys all callers are the owner's"
    trusted = SLODefaults(keys={KEY: KeyDefaults(names_tenants=True)})
    assert held_to({"user": "u"}, gateway, KEY, trusted).tenant == "team-a"
    assert held_to({"user": "u"}, {}, KEY, trusted).tenant == held_to({}, {}, KEY).tenant
    of_key = held_to({"user": "u"}, {}, KEY).tenant
    of_user = held_to({"user": "u"}).tenant
    assert of_key is not None
    assert of_user is not None
    assert of_key.startswith("key:")
    assert of_user.startswith("user:")
    assert of_user != held_to({"user": "v"}).tenant
    assert held_to({"user": ""}).tenant is None


@given(name=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128))
def test_a_key_holder_is_one_tenant_whatever_it_calls_itself(name: str) -> None:
    named = held_to({"user": name}, {"x-llm-d-inference-fairness-id": name}, KEY, DEFAULTS)
    assert named.tenant == held_to(key=KEY, defaults=DEFAULTS).tenant


def test_neither_keys_nor_users_can_be_read_from_a_tenant() -> None:
    for tenant in (held_to(key=KEY).tenant, held_to({"user": "secret"}).tenant):
        assert tenant is not None
        assert "secret" not in tenant


@given(milliseconds=st.floats(1, 86_400_000))
def test_every_objective_in_range_arrives(milliseconds: float) -> None:
    expected = milliseconds / 1e3
    assert held_to({"slo": {"ttft_ms": milliseconds}}).slo == SLO(ttft=expected)
    assert held_to(headers={"x-llm-d-slo-ttft-ms": repr(milliseconds)}).slo == SLO(ttft=expected)


OUT_OF_RANGE = st.floats(max_value=0.999) | st.floats(min_value=86_400_001) | st.integers(max_value=0)


@given(value=OUT_OF_RANGE | st.just(float("nan")))
def test_no_header_out_of_range_becomes_an_objective(value: float) -> None:
    with pytest.raises(InvalidRequest, match="x-llm-d-slo-tpot-ms"):
        held_to(headers={"x-llm-d-slo-tpot-ms": repr(value)})


@each_case(
    "text",
    [
        *(
            "",
            " ",
            "fast",
            "NaN",
            "inf",
            "-5",
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
    with pytest.raises(InvalidRequest, match="header x-llm-d-slo-ttft-ms") as refused:
        held_to(headers={"x-llm-d-slo-ttft-ms": text})
    assert (refused.value.param, refused.value.code) == ("x-llm-d-slo-ttft-ms", "invalid_value")


def test_a_wrong_header_is_refused_even_where_the_body_goes_before_it() -> None:
    with pytest.raises(InvalidRequest, match="-1"):
        held_to({"slo": {"ttft_ms": 100}}, {"x-llm-d-slo-ttft-ms": "-1"})


@pytest.mark.parametrize(
    "fields",
    [
        {"slo_class": "chta"},
        {"keys": {key_digest("k"): KeyDefaults(slo_class="chta")}},
        {"mode": "median"},
    ],
)
def test_defaults_that_name_what_does_not_exist_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'chta'|'median'"):
        SLODefaults(**fields)


def test_defaults_of_a_key_that_opens_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="opens nothing"):
        ServerConfig(api_keys=("a",), slo=SLODefaults(keys={key_digest("b"): KeyDefaults(weight=2.0)}))


@each_case("weight", [0.0, -1.0, 1000.5, float("nan"), float("inf")])
def test_weights_have_a_range(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight is"):
        ClassDefaults(slo=SLO(ttft=1.0), weight=weight)
    with pytest.raises(ConfigError, match="weight is"):
        KeyDefaults(weight=weight)
