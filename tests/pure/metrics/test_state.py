"""`GET /state` has the numbers of `/metrics`, by the names that its description has."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

import onbeat
from onbeat.core.errors import SLOUnattainable
from onbeat.core.fleet import ReplicaLimits, ReplicaView, ScalingView
from onbeat.core.step_stats import DraftStats, SchedulerState
from onbeat.metrics.declare import declared
from onbeat.metrics.exporter import SHOWN, state_schema
from tests.pure.metrics.fake_server import FakeServer

REPLICAS = (
    ReplicaView(replica="r0", state="ready", role="prefill", num_lives=2, num_outstanding=3, silence=0.2),
    ReplicaView(replica="r1", state="starting"),
)


def busy_server() -> FakeServer:
    """Return a server that has something to show of everything."""
    server = FakeServer(proposer="ngram")
    for place in range(19):
        server.serve(f"short {place}", 0.0, [0.5, 0.6], num_prompt_tokens=7_000 + place)
    server.serve("long", 0.0, [30.0], num_prompt_tokens=138_072, slo_class=None)
    server.open("refused", 0.0, slo=None)
    server.tracker.refuse("refused", SLOUnattainable("too late", predicted_ttft=5.0), 0.1)
    drafts = DraftStats([2, 0, 0, 2], [2, 2, 1], [1, 1, 0], num_tokens=6, expected_tokens=5.0)
    state = SchedulerState(num_relegated=4, num_missed=2, predicted_wait=0.3, decode_slacks=[-0.1, 0.2])
    server.step(0.0, 0.5, rows=[(10, 1)], scheduler=state, drafts=drafts, mbu=0.2, mfu=0.1, is_drifting=False)
    counts = server.exporter.server
    counts.http["/v1/chat/completions", "200"] += 3
    counts.loop_lag.observe(0.003)
    server.counts.jobs.end("kept", 3.0, 1.0)
    engine = SimpleNamespace(
        pulse=SimpleNamespace(time=1.0, step_start=0.5),
        is_alive=True,
        info=SimpleNamespace(
            limits=ReplicaLimits(max_model_len=2048, max_num_seqs=8, num_blocks=100, block_size=16)
        ),
    )
    fleet = SimpleNamespace(
        num_waiting=3,
        scaling=ScalingView(policy="work", least=1, most=4, num_wanted=2, share=0.7),
        replicas=lambda: REPLICAS,
    )
    server.exporter.watch(cast("Any", engine), cast("Any", fleet))
    return server


def test_the_state_has_each_number_of_the_metrics() -> None:
    server = busy_server()
    num_samples = 0
    text, state = server.text(40.0), server.state(40.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("onbeat_") or sample.name == "onbeat_server_info":
                continue
            num_samples += 1
            is_histogram = family.type == "histogram"
            name = (family.name if is_histogram else sample.name).removeprefix("onbeat_")
            order = next(labels for metric, labels in ALL if metric.name == name)
            own: Any = state[name]
            for label in order:
                own = own[sample.labels[label]]
            if is_histogram:
                bounds = [*map(str, map(float, own["bounds"])), "+Inf"]
                upto = bounds.index(sample.labels["le"]) + 1 if "le" in sample.labels else None
                own = own["sum"] if sample.name.endswith("_sum") else sum(own["counts"][:upto])
            assert own == pytest.approx(sample.value), sample
    assert num_samples > 600


def test_the_state_is_as_described() -> None:
    server, schema = busy_server(), state_schema()
    assert schema["properties"].keys() - {"unix_time", "start_time"} == {metric.name for metric, _ in ALL}
    strict = {**schema, "additionalProperties": False}
    for state in (server.state(40.0), FakeServer().state(0.0)):
        jsonschema.validate(state, strict)
    assert server.state(40.0)["server_info"]["model"] == "tiny"


@pytest.mark.parametrize("file", ["server/assets/index.html", "report/live_frame.py"])
def test_who_shows_the_state_asks_for_what_is_there(file: str) -> None:
    text = (Path(onbeat.__file__).parent / file).read_text()
    patterns = {
        "html": r"(?:state|last|each)\.([a-z]+_[a-z_]+)|mean\(\"(\w+)\"",
        "py": r"(?:value|delta|rate|count|sum|mean|quantile|get)\(\"([a-z]+_[a-z_]+)\"|now\.new\[\"(\w+)\"",
    }
    asked = {"".join(found) for found in re.findall(patterns[file.rpartition(".")[2]], text)}
    assert len(asked) > 12
    assert asked <= state_schema()["properties"].keys()


def test_the_tables_of_the_page_are_as_declared() -> None:
    page = Path(__file__).parents[3] / "docs/metrics.md"
    written = runpy.run_path(str(page.parents[1] / "scripts/metrics"))["page"]()
    assert page.read_text() == written, "run `make metrics`"
    assert [metric.name for metric, _ in ALL if f"`onbeat_{metric.name}" not in written] == []


def test_a_number_is_declared_once() -> None:
    names = [metric.name for kind, outer in SHOWN for metric, _ in declared(kind, outer)]
    assert len(names) == len(set(names))
    assert orjson.loads(busy_server().exporter.state())["steps_total"] == 1


ALL = [each for kind, outer in SHOWN for each in declared(kind, outer) if each[0].is_own]
