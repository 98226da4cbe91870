"""Fuzz the API from its own description: no 5xx, nothing undocumented, answers as described."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaLoad, ReplicaView
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.server.server_config import ServerConfig
from tests.cpu.server.running import make_app
from tests.fakes_engine import VOCAB_SIZE, FakeEngine


class FakeFleet(FakeEngine):
    """An engine that shows itself as a fleet of one replica and does nothing that it is asked to."""

    num_waiting = 0
    is_ready = True
    seconds_to_ready = None
    scaling = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.counts = FleetCounts()

    def replicas(self) -> Sequence[ReplicaView]:
        load = ReplicaLoad(time=0.0, num_taken=0)
        return [ReplicaView(replica="r0", state="ready", limits=self.info.limits, load=load)]

    def drain(self, replica: str, *, seconds: float, restarts: bool) -> None:
        if replica != "r0":
            raise InvalidRequest(f"there is no replica {replica!r}", param="replica")

    def scale(self, num_replicas: int) -> None:
        """Nothing starts or ends."""

    def autoscale(self, least: int, most: int) -> None:
        """Nothing starts or ends."""

    def restart(self) -> None:
        """Nothing ends."""


KEY = "of the fleet"
CONFIG = ServerConfig(log_requests=False, max_n=4, fleet_key=KEY)
APP = make_app(FakeFleet(max_model_len=256), CONFIG, has_fleet=True)
# each case would start and end the application, and what has ended does not start again
APP.router.lifespan_context = lambda _: nullcontext()
CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]

schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
schema.config.generation.update(modes=list(GenerationMode))


@schema.hook
def map_body(context: Any, body: Any) -> Any:
    """Ask for the model that is served, or else every request would end at a 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "fake/model"
    return body


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_api_keeps_its_description(case: Any) -> None:
    # a header that nobody knows counts as wrong, but any client and proxy may send one
    assume(not any("unknown-property" in name for name in case.headers or {}))
    case.call_and_validate(checks=CHECKS, headers={"authorization": f"Bearer {KEY}"})


def test_the_description_names_all_endpoints() -> None:
    from onbeat.server.app import ENDPOINTS

    # one path for the bodies of five others, which have descriptions of their own
    untold = {"/docs", "/openapi.json", "/invocations"}
    assert {*APP.openapi()["paths"], *untold} == ENDPOINTS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_description_is_honest_about_errors(path: str) -> None:
    responses = APP.openapi()["paths"][path]["post"]["responses"]
    assert responses.keys() == {"200", "400", "401", "404", "413", "429", "500", "503", "504"}
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    for status in responses.keys() - {"200"}:
        reference = responses[status]["content"]["application/json"]["schema"]["$ref"]
        assert reference == "#/components/schemas/ErrorBody"


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("CompletionRequest", {"prompt": []}),
        ("CompletionRequest", {"prompt": [VOCAB_SIZE]}),
        ("CompletionRequest", {"prompt": [[1], [-1]]}),
        ("CompletionRequest", {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}),
        ("CompletionRequest", {"prompt": "a", "allowed_token_ids": []}),
        ("CompletionRequest", {"prompt": "a", "logit_bias": {"a": 1}}),
        ("ChatCompletionRequest", {"messages": []}),
        ("ChatCompletionRequest", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
        ("ChatCompletionRequest", {"messages": CHAT, "top_logprobs": -2}),
        ("ChatCompletionRequest", {"messages": [{"role": "", "content": "hi"}]}),
        ("ChatCompletionRequest", {"messages": CHAT, "logprobs": "yes"}),
        ("ChatCompletionRequest", {"messages": CHAT, "max_tokens": "5.5"}),
        ("ChatCompletionRequest", {"messages": CHAT, "temperature": True}),
        ("TokenizeRequest", {}),
        ("TokenizeRequest", {"prompt": None, "messages": None}),
        ("TokenizeRequest", {"prompt": "a", "messages": CHAT}),
        ("DetokenizeRequest", {"tokens": [-1]}),
        ("DetokenizeRequest", {"tokens": [VOCAB_SIZE]}),
    ],
    ids=str,
)
def test_the_description_excludes_what_is_refused(model: str, body: dict[str, Any]) -> None:
    assert not is_described(model, body)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("CompletionRequest", {"prompt": [[1], [VOCAB_SIZE - 1]], "logit_bias": {"7": 1}, "max_tokens": 5.0}),
        ("ChatCompletionRequest", {"messages": CHAT, "top_logprobs": 0, "slo": None}),
        ("ChatCompletionRequest", {"messages": CHAT, "logprobs": "true", "max_tokens": "5"}),
        ("ChatCompletionRequest", {"messages": [{"role": "critic", "content": "hi"}], "top_p": "0.5"}),
        ("TokenizeRequest", {"prompt": "a", "messages": None}),
        ("TokenizeRequest", {"messages": CHAT}),
        ("DetokenizeRequest", {"tokens": []}),
    ],
    ids=str,
)
def test_the_description_includes_what_is_taken(model: str, body: dict[str, Any]) -> None:
    assert is_described(model, body)


def is_described(model: str, body: dict[str, Any]) -> bool:
    components = {"components": APP.openapi()["components"]}
    return jsonschema_rs.is_valid({**components, "$ref": f"#/components/schemas/{model}"}, body)
