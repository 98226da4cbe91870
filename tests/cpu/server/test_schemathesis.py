"""Fuzz the API from its own description: no 5xx, nothing undocumented, answers as described."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, cast

import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, assume
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi import checks

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaLoad, ReplicaView
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import Adapter
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.server.embeddings import score_routes
from onbeat.server.paths import ENDPOINTS, RERANK_PATHS, SCORE_PATHS
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import Services
from tests.cpu.server.fake_app import make_app
from tests.examples import examples, part_of
from tests.fakes_engine import VOCAB_SIZE, FakeEngine
from tests.many_cases import Cases, each_case


class FakeFleet(FakeEngine):
    """An engine that shows itself as a fleet of one replica and does nothing that it is asked to."""

    num_waiting = 0
    is_ready = True
    seconds_to_ready = None
    scaling = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.counts = FleetCounts()
        self.adapters: dict[str, Adapter] = {}

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, max_loras=1)

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load nothing."""

    async def unload_adapter(self, name: str) -> None:
        """There is none."""

    def replicas(self) -> Sequence[ReplicaView]:
        load = ReplicaLoad(time=0.0, num_taken=0)
        return [ReplicaView(replica="r0", state="ready", limits=self.info.limits, load=load)]

    async def drain(self, replica: str, *, seconds: float, restarts: bool) -> None:
        if replica != "r0":
            raise InvalidRequest(f"there is no replica {replica!r}", param="replica")

    async def scale(self, num_replicas: int) -> None:
        """Nothing starts or ends."""

    async def autoscale(self, least: int, most: int) -> None:
        """Nothing starts or ends."""

    async def restart(self, *, keeper: bool = False) -> None:
        """Nothing ends."""


KEY = "of the fleet"
CONFIG = ServerConfig(log_requests=False, max_n=4, fleet_key=KEY)
CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@cache
def app() -> FastAPI:
    made = make_app(FakeFleet(max_model_len=256), CONFIG, has_fleet=True)
    # each case would start and end the application, and what has ended does not start again
    made.router.lifespan_context = lambda _: nullcontext()
    return made


@pytest.fixture(scope="module")
def schema() -> Any:
    """The description; its cases take many seconds to make, so that is done where they run."""
    read = schemathesis.openapi.from_asgi("/openapi.json", app())
    read.config.generation.update(modes=list(GenerationMode))
    read.hook(map_body)
    return read


def map_body(context: Any, body: Any) -> Any:
    """Ask for the model that is served, or else every request would end at a 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "fake/model"
    return body


@examples(
    30,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def keeps_its_description(case: Any) -> None:
    # a header that nobody knows counts as wrong, but any client and proxy may send one
    assume(not any("unknown-property" in name for name in case.headers or {}))
    case.call_and_validate(checks=CHECKS, headers={"authorization": f"Bearer {KEY}"})


def part_of_each_kind(cases: Sequence[Any]) -> list[Any]:
    """Of thousands of bodies that differ in one value, an eighth: one or more with each thing wrong."""
    kinds: dict[Any, list[Any]] = {}
    for each in cases:
        case = each.kwargs["case"]
        kinds.setdefault((case.method, case.meta.phase.data.scenario), []).append(each)
    return [each for kind in kinds.values() for each in part_of(part_of(part_of(kind)))]


UNTOLD = {"/", "/docs", "/openapi.json"}
"""Pages."""
ALIASES = {*RERANK_PATHS[1:], *SCORE_PATHS[1:]}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path in ALIASES)) for path in sorted(ENDPOINTS - UNTOLD)],
)
def test_api_keeps_its_description(schema: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No request leaves the process, and a look for proxies in the environment is a third of each.
    monkeypatch.setattr("requests.sessions.get_environ_proxies", lambda *_, **__: {})
    found = Cases()
    made: Any
    for made in get_all_tests(
        schema=schema.include(path=path), test_func=keeps_its_description, settings=None, given_kwargs=None
    ):
        operation, test = made.ok()
        test.hypothesis_explicit_examples = part_of_each_kind(test.hypothesis_explicit_examples)
        with found.trying({"operation": operation.label}):
            test()
    found.end()
    assert found.num_tried > 0


@pytest.mark.parametrize("paths", [RERANK_PATHS, SCORE_PATHS])
def test_what_has_several_paths_is_one_endpoint(paths: Sequence[str]) -> None:
    """So each answers as the first does, whose cases are tried always."""
    routes = [each for each in score_routes(cast(Services, None)).routes if isinstance(each, APIRoute)]
    assert len({route.endpoint for route in routes if route.path in paths}) == 1
    described = [app().openapi()["paths"][path] for path in paths]
    assert all(
        each["post"] == {**described[0]["post"], "operationId": each["post"]["operationId"]}
        for each in described
    )


def test_the_description_names_all_endpoints() -> None:
    assert {*app().openapi()["paths"], *UNTOLD} == ENDPOINTS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_description_is_honest_about_errors(path: str) -> None:
    responses = app().openapi()["paths"][path]["post"]["responses"]
    assert responses.keys() == {"200", "400", "401", "404", "413", "429", "500", "503", "504"}
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    for status in responses.keys() - {"200"}:
        reference = responses[status]["content"]["application/json"]["schema"]["$ref"]
        assert reference == "#/components/schemas/ErrorBody"


CHAT = [{"role": "user", "content": "hi"}]


@each_case(
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
        ("TokenizeRequest", {"prompt": "a", "top_logprobs": 5}),
        ("DetokenizeRequest", {"tokens": []}),
    ],
    ids=str,
)
def test_the_description_includes_what_is_taken(model: str, body: dict[str, Any]) -> None:
    assert is_described(model, body)


def is_described(model: str, body: dict[str, Any]) -> bool:
    components = {"components": app().openapi()["components"]}
    return jsonschema_rs.is_valid({**components, "$ref": f"#/components/schemas/{model}"}, body)
