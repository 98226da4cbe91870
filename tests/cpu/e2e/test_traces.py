"""`--otlp-traces-endpoint`: what a collector gets of a request."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import run_program, serving

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAND_IN = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "1024")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes traces, and what came there."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    server.server_close()


def test_a_request_is_a_span_of_its_callers_trace(
    tiny_directory: Path, collector: tuple[str, list[bytes]]
) -> None:
    endpoint, bodies = collector
    with serving(tiny_directory, *STAND_IN, "--otlp-traces-endpoint", endpoint) as server:
        body = {
            "prompt": "one two",
            "max_tokens": 8,
            "ignore_eos": True,
            "slo": {"ttft_ms": 9000, "tbt_ms": 9000},
        }
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
    requests = [ExportTraceServiceRequest.FromString(each) for each in bodies]
    resources = [resource for each in requests for resource in each.resource_spans]
    spans = {
        span.name.partition(" ")[0]: span
        for each in resources
        for part in each.scope_spans
        for span in part.spans
    }
    assert spans.keys() == {"generate", "queue", "prefill", "decode"}
    whole = spans["generate"]
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == CALLER
    found = {attribute.key: attribute.value for attribute in whole.attributes}
    assert found["gen_ai.usage.output_tokens"].int_value == 8
    assert found["onbeat.slo.met"].bool_value
    assert found["onbeat.slo.ttft"].double_value == 9.0
    order = [spans[name] for name in ("queue", "prefill", "decode")]
    for span in order:
        assert span.parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    assert order[0].end_time_unix_nano == order[1].start_time_unix_nano
    assert order[1].end_time_unix_nano == order[2].start_time_unix_nano
    assert [
        each.value.string_value for each in resources[0].resource.attributes if each.key == "service.name"
    ] == ["onbeat"]


def test_an_address_that_is_none_is_refused(tiny_directory: Path) -> None:
    run = run_program("serve", tiny_directory, "--otlp-traces-endpoint", "127.0.0.1:4318")
    assert run.returncode == 2
    assert "--otlp-traces-endpoint" in run.stderr
    assert " http" in run.stderr
