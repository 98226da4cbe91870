"""llm-d's protocol of a latency predictor, over HTTP.

One server is both of llm-d's, the one that predicts and the one that is trained: `PREDICTION_SERVER_URL` and
`TRAINING_SERVER_URL` name the same. The protocol is read from llm-d-latency-predictor's servers and from
the client in llm-d's router. It names no model server, so a pool of another kind has a path of its own:
`http://host:8000/NAME`. In one pool, `pod_type` chooses the kinds named `prefill` and `decode`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import msgspec
import orjson
from latency import Features, LatencyModel, Measured
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from onbeat.metrics.declare import counter, gauge, histogram, samples
from onbeat.metrics.exporter import families
from onbeat.metrics.histogram import ERROR_RATIOS, Histogram
from onbeat.metrics.merge import flat

MODEL_TYPE = "lightgbm"
"""What the server says that it is. llm-d's client knows three kinds of models, and asks over HTTP for each
prediction of this kind alone; of the others it computes with what it has fetched."""
MAX_BULK = 10_000
MAX_BODY_BYTES = 2**24
_LABELS = ("pool", "latency")

Handler = Callable[[Request], Awaitable[Response]]


class _Bulk(msgspec.Struct):
    requests: list[Features]


class _Training(msgspec.Struct):
    entries: list[Measured]


class _Wrong(Exception):
    """A request cannot be answered; its status and why."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Counts:
    """What was predicted and measured."""

    predictions: Mapping[str, int] = counter("predictions_total", "predictions", "pool")
    measured: Mapping[tuple[str, str], int] = counter(
        "predict_measured_total", "measured latencies", *_LABELS
    )
    bias: Mapping[tuple[str, str], float] = gauge(
        "predict_bias_ratio", "typical measured / predicted, as the profile alone predicts", *_LABELS
    )
    drift: Mapping[tuple[str, str], float] = gauge(
        "predict_drift", "1 while measured latencies have left what the profile alone predicts", *_LABELS
    )
    coverage: Mapping[tuple[str, str], float] = gauge(
        "predict_coverage_ratio",
        "share of latencies within what was predicted; should be the quantile",
        *_LABELS,
    )
    errors: Mapping[tuple[str, str], Histogram] = histogram(
        "predict_error_ratio", "|predicted - measured| / measured latency", ERROR_RATIOS, *_LABELS
    )


class PredictionService(Collector):
    """Answers for all pools, and counts: a Prometheus collector.

    Parameters
    ----------
    pools : by name; the first is the default.
    quantile : that is predicted, in (0, 1); None predicts the mean.
    """

    def __init__(self, pools: Mapping[str, LatencyModel], quantile: float | None) -> None:
        self.pools, self.quantile = dict(pools), quantile
        self._started = datetime.now(UTC).isoformat()
        self._errors = {(name, each): Histogram(ERROR_RATIOS) for name in pools for each in ("ttft", "tpot")}
        self._num_predicted = dict.fromkeys(pools, 0)
        self._about = {
            "model_type": MODEL_TYPE,
            "objective_type": "mean" if quantile is None else "quantile",
            "quantile": 0.5 if quantile is None else quantile,
        }

    def predict(self, pool: str, features: Features) -> dict[str, Any]:
        """Return one prediction, as the protocol has it; milliseconds."""
        name = self._name_of(pool, features)
        self._num_predicted[name] += 1
        (ttft, tpot), mean = self.pools[name].predict_each(features, (self.quantile, None))
        return {
            "ttft_ms": ttft * 1e3,
            "tpot_ms": tpot * 1e3,
            "ttft_uncertainty": abs(ttft - mean[0]) * 1e3,
            "tpot_uncertainty": abs(tpot - mean[1]) * 1e3,
            "ttft_prediction_bounds": sorted((mean[0] * 1e3, ttft * 1e3)),
            "tpot_prediction_bounds": sorted((mean[1] * 1e3, tpot * 1e3)),
            "predicted_at": datetime.now(UTC).isoformat(),
            "last_model_load": self._started,
            **self._about,
        }

    def learn(self, pool: str, entry: Measured) -> None:
        """Take a measured request."""
        name = self._name_of(pool, entry)
        predicted = self.pools[name].learn(entry, self.quantile)
        for metric, seconds, measured_ms in (
            ("ttft", predicted.ttft, entry.actual_ttft_ms),
            ("tpot", predicted.tpot, entry.actual_tpot_ms),
        ):
            if measured_ms > 0:
                self._errors[name, metric].observe(abs(seconds * 1e3 - measured_ms) / measured_ms)

    def about(self) -> dict[str, Any]:
        """Return what predicts, in the protocol's words."""
        return dict(self._about)

    def samples(self, pool: str) -> dict[str, int]:
        """Return how many measured requests each latency of a pool has had."""
        return {name: term.num_measured for name, term in self.pools[pool].terms.items()}

    def collect(self) -> Iterable[Family]:
        """Return the metrics as they stand."""
        terms = {
            (pool, name): term for pool, model in self.pools.items() for name, term in model.terms.items()
        }
        seen = {key: term for key, term in terms.items() if term.num_measured}
        counts = _Counts(
            predictions=self._num_predicted,
            measured={key: term.num_measured for key, term in terms.items()},
            bias={key: term.drift.ratio for key, term in seen.items()},
            drift={key: float(term.drift.is_alarming) for key, term in seen.items()},
            coverage={key: term.num_within / term.num_measured for key, term in seen.items()},
            errors=self._errors,
        )
        return families((f"onbeat_{each.metric.name}", each) for each in flat(samples(counts)))

    def forget(self, pool: str) -> int:
        """Forget what a pool has learnt; return how many measured latencies that were."""
        count = sum(self.samples(pool).values())
        self.pools[pool].forget()
        return count

    def _name_of(self, pool: str, features: Features) -> str:
        return features.pod_type if features.pod_type in self.pools else pool


def create_app(service: PredictionService) -> Starlette:
    """Return the application: the first pool at `/`, and each at `/NAME`."""
    registry = CollectorRegistry()
    registry.register(service)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    first = next(iter(service.pools))
    mounts: list[BaseRoute] = [
        Mount(f"/{name}", routes=_routes(service, name, metrics)) for name in service.pools
    ]
    return Starlette(routes=[*mounts, *_routes(service, first, metrics)])


def _routes(service: PredictionService, pool: str, metrics: Handler) -> list[BaseRoute]:
    endpoints = _Endpoints(service, pool)
    posts = {
        "/predict": endpoints.predict,
        "/predict/bulk": endpoints.bulk,
        "/predict/bulk/strict": endpoints.bulk,
        "/add_training_data_bulk": endpoints.train,
        "/flush": endpoints.flush,
        "/reload": endpoints.reload,
    }
    gets = {
        "/": endpoints.root,
        "/status": endpoints.status,
        "/healthz": endpoints.health,
        "/readyz": endpoints.ready,
        "/model/download/info": endpoints.info,
        "/data/status": endpoints.data,
        "/metrics": metrics,
    }
    return [
        *(Route(path, _guarded(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
    ]


class _Endpoints:
    """The paths of one pool."""

    def __init__(self, service: PredictionService, pool: str) -> None:
        self._desk, self._pool = service, pool
        self._features = msgspec.json.Decoder(Features)
        self._bulk = msgspec.json.Decoder(_Bulk)
        self._training = msgspec.json.Decoder(_Training)

    async def predict(self, request: Request) -> Response:
        features = self._features.decode(await _body(request))
        return _json(self._desk.predict(self._pool, features))

    async def bulk(self, request: Request) -> Response:
        began = time.monotonic()
        wanted = self._bulk.decode(await _body(request)).requests
        if not 1 <= len(wanted) <= MAX_BULK:
            raise _Wrong(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"requests has {len(wanted)} entries; send 1 to {MAX_BULK}"
            )
        predictions = [self._desk.predict(self._pool, features) for features in wanted]
        return _json(
            {
                "predictions": predictions,
                "errors": [],
                "total_requests": len(wanted),
                "successful_predictions": len(wanted),
                "failed_predictions": 0,
                "processing_time_ms": (time.monotonic() - began) * 1e3,
            }
        )

    async def train(self, request: Request) -> Response:
        entries = self._training.decode(await _body(request)).entries
        for entry in entries:
            self._desk.learn(self._pool, entry)
        return _json({"message": f"Accepted {len(entries)} training samples."}, HTTPStatus.ACCEPTED)

    async def flush(self, request: Request) -> Response:
        raw = await _body(request)
        asked = msgspec.json.decode(raw, type=dict[str, Any]) if raw.strip() else {}
        does = asked.get("flush_training_data", True)
        samples = self._desk.samples(self._pool)
        if does:
            self._desk.forget(self._pool)
        num_ttft = samples["ttft"] + samples["ttft_queued"] if does else 0
        num_tpot = samples["tpot"] if does else 0
        return _json(
            {
                "success": True,
                "flushed_at": datetime.now(UTC).isoformat(),
                "reason": asked.get("reason"),
                "ttft_training_samples_flushed": num_ttft,
                "tpot_training_samples_flushed": num_tpot,
                "ttft_test_samples_flushed": 0,
                "tpot_test_samples_flushed": 0,
                "metrics_cleared": bool(does),
                "message": f"Forgot {num_ttft} TTFT and {num_tpot} TPOT samples"
                if does
                else "No data flushed",
            }
        )

    async def reload(self, _request: Request) -> Response:
        """Answer that there is nothing to load: what is learnt counts at once."""
        return _json({"synced": False, "loaded": True, "is_ready": True, **self._desk.about()})

    async def root(self, _request: Request) -> Response:
        return _json(
            {"message": f"onbeat predicts pool {self._pool}", "is_ready": True, **self._desk.about()}
        )

    async def status(self, request: Request) -> Response:
        return _json(
            {
                "is_ready": True,
                "last_model_load": None,
                "training_server_url": str(request.base_url).rstrip("/"),
                "models_exist": {"ttft_model": True, "tpot_model": True},
                "ensemble_active": False,
                **self._desk.about(),
            }
        )

    async def health(self, _request: Request) -> Response:
        return _json({"status": "ok", "service": "onbeat"})

    async def ready(self, _request: Request) -> Response:
        return _json({"status": "ready", **self._desk.about()})

    async def info(self, _request: Request) -> Response:
        about = self._desk.about()
        status = {"ttft_model_ready": True, "tpot_model_ready": True}
        return _json({**about, "available_endpoints": {}, "model_status": status})

    async def data(self, _request: Request) -> Response:
        samples = self._desk.samples(self._pool)
        num_ttft = samples["ttft"] + samples["ttft_queued"]
        counts = {"ttft_samples": num_ttft, "tpot_samples": samples["tpot"]}
        return _json(
            {
                "training_data": {**counts, "total_samples": num_ttft + samples["tpot"]},
                "test_data": {"ttft_samples": 0, "tpot_samples": 0, "total_samples": 0},
                "model_ready": True,
                "last_retrain": None,
            }
        )


def _guarded(handler: Handler) -> Handler:
    """Return a handler whose wrong requests are answered, as FastAPI has them."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json({"detail": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except _Wrong as error:
            return _json({"detail": str(error)}, error.status)

    return guarded


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise _Wrong(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {MAX_BODY_BYTES} bytes; send less",
            )
    return bytes(body)


def _json(content: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
