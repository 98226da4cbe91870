"""examples/llm-d: payloads as llm-d's client sends them, and what comes back."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from onbeat.core.errors import ConfigError
from tests.pure.perfmodel.test_models import write_fitted

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/llm-d"))
latency, protocol, predictor = (
    importlib.import_module(each) for each in ("latency", "protocol", "predictor")
)
del sys.path[0]
Features, Measured, MAX_BULK = latency.Features, latency.Measured, protocol.MAX_BULK
PredictionService, create_app = protocol.PredictionService, protocol.create_app
PoolConfig, build_pools, read_pools = predictor.PoolConfig, predictor.build_pools, predictor.read_pools

FEATURES = {
    "kv_cache_percentage": 0.3,
    "input_token_length": 1000,
    "num_request_waiting": 0,
    "num_request_running": 8,
    "num_tokens_generated": 1,
    "prefix_cache_score": 0.0,
}
OTHERS = {"pod_type": "", "prefill_tokens_in_flight": 0, "decode_tokens_in_flight": 100}
ENTRY = FEATURES | {"actual_ttft_ms": 120.0, "actual_tpot_ms": 0.0, "timestamp": "2026-11-27T00:00:00.123Z"}


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "fitted.json"
    write_fitted(path)
    return path


def desk_of(*names: str, profile, quantile: float | None = 0.9) -> Any:
    sizes = {"num_kv_tokens": 400_000, "max_num_batched_tokens": 2048}
    configs = [PoolConfig(name=name, profile=profile, **sizes) for name in names or ("default",)]
    return PredictionService(build_pools(configs), quantile)


@pytest.fixture
def service(profile):
    return desk_of(profile=profile)


@pytest.fixture
def client(service) -> httpx.AsyncClient:
    return client_of(service)


def client_of(service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://p")


@pytest.mark.parametrize("more", [{}, OTHERS, {"pod_type": None}, {"unknown": [1]}])
async def test_a_prediction_has_all_that_the_clients_read(client, more):
    reply = await client.post("/predict", json=FEATURES | more)
    said = reply.json()
    assert reply.status_code == 200
    assert 0 < said["tpot_ms"] < said["ttft_ms"] < 1000
    low, high = said["ttft_prediction_bounds"]
    assert low <= said["ttft_ms"] <= high
    assert (said["model_type"], said["objective_type"], said["quantile"]) == ("lightgbm", "quantile", 0.9)
    assert said.keys() >= {"predicted_at", "last_model_load", "ttft_uncertainty", "tpot_prediction_bounds"}


@pytest.mark.parametrize("path", ["/predict/bulk", "/predict/bulk/strict"])
async def test_many_are_predicted_in_their_order(client, path):
    wanted = [FEATURES | {"input_token_length": length} for length in (9000, 10, 3000)]
    said = (await client.post(path, json={"requests": wanted})).json()
    ttfts = [each["ttft_ms"] for each in said["predictions"]]
    assert ttfts[0] > ttfts[2] > ttfts[1]
    assert (said["total_requests"], said["successful_predictions"], said["failed_predictions"]) == (3, 3, 0)


async def test_it_is_ready_without_a_single_sample(client):
    for path in ("/healthz", "/readyz", "/status", "/model/download/info", "/data/status", "/"):
        assert (await client.get(path)).status_code == 200
    status = (await client.get("/status")).json()
    assert (status["is_ready"], status["model_type"]) == (True, "lightgbm")
    info = (await client.get("/model/download/info")).json()
    assert info["model_status"] == {"ttft_model_ready": True, "tpot_model_ready": True}
    assert (await client.post("/reload")).json()["is_ready"] is True


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/predict", "{"),
        ("/predict", "[]"),
        ("/predict", json.dumps({})),
        ("/predict", json.dumps(FEATURES | {"kv_cache_percentage": 1.5})),
        ("/predict", json.dumps(FEATURES | {"num_request_running": -1})),
        ("/predict", json.dumps(FEATURES | {"input_token_length": "9"})),
        ("/predict", json.dumps(FEATURES | {"input_token_length": 10**40})),
        ("/predict/bulk", json.dumps({"requests": []})),
        ("/predict/bulk", json.dumps({"requests": [FEATURES, 5]})),
        ("/add_training_data_bulk", json.dumps({"entries": [FEATURES]})),
        ("/add_training_data_bulk", json.dumps({"entries": [ENTRY | {"actual_ttft_ms": -1}]})),
        ("/flush", "[]"),
    ],
)
async def test_what_is_wrong_is_a_422_that_says_why(client, path, content):
    reply = await client.post(path, content=content)
    assert reply.status_code == 422
    assert reply.json()["detail"]


async def test_bodies_and_batches_are_bounded(client):
    assert (await client.post("/predict", content=b" " * (2**24 + 1))).status_code == 413
    many = {"requests": [FEATURES] * (MAX_BULK + 1)}
    assert str(MAX_BULK) in (await client.post("/predict/bulk", json=many)).json()["detail"]


async def test_measured_latencies_correct_predictions_and_show_drift(client, service):
    before = (await client.post("/predict", json=FEATURES)).json()
    slower = 3 * before["ttft_ms"]
    entries = [ENTRY | {"actual_ttft_ms": slower, "actual_tpot_ms": before["tpot_ms"]}] * 200
    reply = await client.post("/add_training_data_bulk", json={"entries": entries})
    assert (reply.status_code, reply.json()["message"]) == (202, "Accepted 200 training samples.")
    after = (await client.post("/predict", json=FEATURES)).json()
    assert after["ttft_ms"] == pytest.approx(slower, rel=0.1)
    text = (await client.get("/metrics")).text
    assert 'onbeat_predict_drift{latency="ttft",pool="default"} 1.0' in text
    assert 'onbeat_predict_measured_total{latency="ttft",pool="default"} 200.0' in text
    assert (await client.get("/data/status")).json()["training_data"]["total_samples"] == 400
    flushed = (await client.post("/flush", json={"reason": "new"})).json()
    assert (flushed["ttft_training_samples_flushed"], flushed["reason"]) == (200, "new")
    again = (await client.post("/predict", json=FEATURES)).json()
    assert again["ttft_ms"] == pytest.approx(before["ttft_ms"])
    kept = (await client.post("/flush", json={"flush_training_data": False})).json()
    assert kept["message"] == "No data flushed"


def test_a_quantile_covers_as_many_measured_latencies(service):
    """Latencies scatter by a factor; nine of ten are to lie within what is predicted at 0.9."""
    import random

    rng = random.Random(3)
    model = service.pools["default"]
    base = model.predict(Features(**FEATURES), None).ttft
    for _ in range(600):
        spread = rng.lognormvariate(0.2, 0.3)
        model.learn(Measured(**FEATURES, actual_ttft_ms=base * 1e3 * spread, actual_tpot_ms=0.0), 0.9)
    predicted = model.predict(Features(**FEATURES), 0.9).ttft
    within = sum(base * rng.lognormvariate(0.2, 0.3) <= predicted for _ in range(2000)) / 2000
    assert 0.84 < within < 0.96


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"num_request_waiting": 9}, {}),
        ({"prefill_tokens_in_flight": 9000}, {}),
        ({"num_request_running": 200}, {}),
        ({"kv_cache_percentage": 1.0}, {}),
        ({}, {"prefix_cache_score": 0.9}),
        ({}, {"pod_type": "decode"}),
    ],
)
def test_more_load_takes_longer(service, more, less):
    model = service.pools["default"]
    slow, fast = (model.predict(Features(**(FEATURES | each)), None) for each in (more, less))
    assert slow.ttft > fast.ttft


def test_an_idle_server_takes_what_its_steps_take(service):
    """A prompt of one step, alone: TTFT is that step."""
    model = service.pools["default"]
    idle = FEATURES | {"num_request_running": 0, "kv_cache_percentage": 0.0}
    shape = model._with_chunk(model._decodes(Features(**idle), 0), 0, 1000)
    assert model.predict(Features(**idle), None).ttft == pytest.approx(model._predictor.step_time(shape))


async def test_pools_learn_apart_and_have_paths_of_their_own(profile):
    service = desk_of("h100", "prefill", profile=profile)
    client = client_of(service)
    entries = {"entries": [ENTRY] * 100}
    await client.post("/prefill/add_training_data_bulk", json=entries)
    await client.post("/h100/add_training_data_bulk", json={"entries": [ENTRY | {"pod_type": "prefill"}]})
    assert service.samples("prefill")["ttft"] == 101
    assert service.samples("h100")["ttft"] == 0
    first = (await client.post("/predict", json=FEATURES)).json()["ttft_ms"]
    by_path = (await client.post("/h100/predict", json=FEATURES)).json()["ttft_ms"]
    by_type = (await client.post("/predict", json=FEATURES | {"pod_type": "prefill"})).json()["ttft_ms"]
    assert first == by_path
    assert by_type != first
    assert (await client.get("/h100/readyz")).status_code == 200
    assert (await client.post("/b200/predict", json=FEATURES)).status_code == 404


def test_pools_of_a_file(tmp_path, profile):
    path = profile.parent / "pools.yaml"
    path.write_text(
        f"- {{name: a, profile: {profile.name}}}\n- {{name: b, profile: {profile.name}, num_kv_tokens: 9}}\n"
    )
    pools = build_pools(read_pools(path))
    assert list(pools) == ["a", "b"]
    assert pools["a"]._num_kv_tokens > 100_000  # of the device's memory
    for content, why in (
        ("[]", "a list with at least one value"),
        ("- 5", "must be a mapping"),
        ("- {name: a}", "lacks profile"),
        ("- {name: a, profil: x}", "unknown field 'profil': did you mean profile"),
        ("- {name: a, gpu: x}", "unknown field 'gpu': known are "),
        ("- {name: a/b, profile: x}", "use letters"),
        ("- {name: a, profile: x, num_kv_tokens: many}", "whole number"),
        ("- {name: a, profile: x, num_kv_tokens: 0}", "at least 1"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=why):
            read_pools(path)
    with pytest.raises(ConfigError, match="two pools"):
        build_pools([PoolConfig(name="a", profile=profile)] * 2)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "--profile"),
        (["--profile", "/nowhere"], "/nowhere"),
        (["--profile", "x", "--pools", "y"], "--pools"),
        (["--pools", "y", "--num-kv-tokens", "9"], "num_kv_tokens"),
        (["--profile", "x", "--quantile", "1"], "below 1"),
    ],
)
def test_wrong_flags_end_in_words(flags, why, capsys):
    with pytest.raises(SystemExit, match="2"):
        predictor.main(flags)
    assert why in capsys.readouterr().err
