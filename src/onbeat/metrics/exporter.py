"""Show the counts: as Prometheus reads them, and as JSON. Both are one loop over what is declared.

Declared metrics as Prometheus' client writes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from onbeat.core.fleet import FleetView
from onbeat.core.protocols import EngineClient
from onbeat.files import packaged
from onbeat.metrics.counts import EngineCounts, RunCounts, ServerCounts
from onbeat.metrics.declare import VLLM, Labels, Metric, declared, gauge, info, samples
from onbeat.metrics.fleet_counts import FleetCounts, FleetGauges
from onbeat.metrics.merge import Others, Sample, flat
from onbeat.metrics.policy_counts import SpeculationCounts
from onbeat.metrics.slo_counts import RecentObjectives
from onbeat.version import __version__

_FAMILIES: dict[str, type[Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": GaugeMetricFamily,
}


def families(shown: Iterable[tuple[str, Sample]]) -> Iterable[Family]:
    """Return the families of samples, which come with their names in `/metrics`."""
    found: dict[str, Any] = {}
    for name, (metric, outer, words, value) in shown:
        if (family := found.get(name)) is None:
            labels = [*(label for label, _ in outer), *metric.labels]
            found[name] = family = _FAMILIES[metric.kind](name, metric.text, labels=labels)
        own = [*(word for _, word in outer), *words]
        if metric.kind == "histogram":
            family.add_metric(own, value.cumulative(), value.sum)
        else:
            family.add_metric(own, value)
    return found.values()


ALIASES = {
    own: VLLM + theirs for own, theirs in packaged(dict[str, str], "onbeat.metrics", "vllm.yaml").items()
}
"""vLLM's names for what we count too."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how."""

    words: Mapping[str, str] = info(
        "server_info", "what is served, and how; always 1", *("version", "model", "policy", "slo_mode")
    )


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Signs of life of an engine, and the size of its KV cache."""

    is_alive: int = gauge("engine_alive", "1 while an engine process lives, else 0")
    silence: float = gauge(
        "engine_silence_seconds", "since the last sign of life, which an engine gives twice a second"
    )
    step_age: float = gauge(
        "engine_step_age_seconds", "since the begin of the step that ran at the last sign of life, or 0"
    )
    cache: Mapping[str, str] = info(
        "vllm:cache_config_info",
        "KV cache of one replica, in labels; always 1",
        *("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    )

    @classmethod
    def of(cls, engine: EngineClient, now: float) -> EngineGauges:
        """Return those of an engine whose pulse is of the same clock as `now`."""
        pulse = engine.pulse
        limits = engine.info.limits
        num_blocks = limits.num_blocks // (1 + limits.windows.num_groups)
        size = num_blocks * limits.block_size
        return cls(
            is_alive=int(engine.is_alive),
            silence=now - pulse.time,
            step_age=0.0 if pulse.step_start is None else now - pulse.step_start,
            cache={
                "engine": "0",
                "block_size": str(limits.block_size),
                "num_gpu_blocks": str(num_blocks),
                "kv_cache_size_tokens": str(size),
                "kv_cache_max_concurrency": f"{size / limits.max_model_len:.2f}",
            },
        )


SHOWN: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ServerInfo, ()),
    (RunCounts, ()),
    (RecentObjectives, ()),
    (ServerCounts, ()),
    (EngineGauges, ()),
    (FleetGauges, ()),
    (FleetCounts, ()),
    (EngineCounts, ("engine",)),
    (SpeculationCounts, ("proposer",)),
)
"""All that may be shown, with the labels that it is in."""


class MetricsExporter(Collector):
    """A Prometheus collector over `RunCounts`, with a registry of its own.

    Parameters
    ----------
    counts : what a `RequestTracker` feeds.
    model_name, policy : what is served, and how; shown as they are.
    proposer : what proposes draft tokens, as metrics label it; None where nothing is speculated.
    aliases : `vllm` adds the metrics that boards for vLLM show.
    fleet_counts : what a fleet does with requests; None where there is none.
    clock : the clock of steps and requests, seconds.

    Attributes
    ----------
    server : what the server's process counts.
    others : what other processes of the server count.
    """

    def __init__(  # noqa: PLR0913 -- what is served, and where its numbers are
        self,
        counts: RunCounts,
        *,
        model_name: str,
        policy: str = "",
        proposer: str | None = None,
        aliases: Literal["vllm"] | None = None,
        fleet_counts: FleetCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self.server = ServerCounts()
        self._info = ServerInfo(
            {"version": __version__, "model": model_name, "policy": policy, "slo_mode": counts.slo.mode}
        )
        self._proposer = proposer
        self._aliases = aliases
        self._model: Labels = (("model_name", model_name), ("engine", "0"))
        self._clock = clock
        self._start, self._started = clock(), time.time()
        self._engine: EngineClient | None = None
        self._fleet: FleetView | None = None
        self._fleet_counts = fleet_counts or FleetCounts()
        self.others = Others({metric.name: metric for metric, _ in _declared()})
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, engine: EngineClient, fleet: FleetView | None = None) -> None:
        """Show the signs of life of an engine from now on; its pulse must be of the same clock.

        Parameters
        ----------
        fleet : the replicas behind it.
        """
        self._engine, self._fleet = engine, fleet

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics as they stand."""
        yield from families(
            (name, sample._replace(outer=inside))
            for sample in self.samples()
            for name, inside in self._names(sample.metric, sample.outer)
        )

    def _names(self, metric: Metric, outer: Labels) -> Iterator[tuple[str, Labels]]:
        """Yield the names of a metric in `/metrics`, and the labels before its own."""
        if metric.is_own:
            yield f"onbeat_{metric.name}", outer
        alias = ALIASES.get(metric.name, metric.name)
        if self._aliases and alias.startswith(VLLM):
            yield alias, () if metric.kind == "info" else self._model

    def state(self) -> bytes:
        """Return the same numbers as JSON: by name and then by the values of labels."""
        now = self._started + self._clock() - self._start
        tree: dict[str, Any] = {"unix_time": now, "start_time": self._started}
        for metric, outer, words, value in self.samples():
            if not metric.is_own:
                continue
            if metric.kind == "info":
                tree[metric.name] = dict(zip(metric.labels, words, strict=True))
                continue
            inner, (*path, last) = tree, (metric.name, *(word for _, word in outer), *words)
            for word in path:
                inner = inner.setdefault(word, {})
            inner[last] = value.as_dict() if metric.kind == "histogram" else value
        return orjson.dumps(tree)

    def samples(self) -> Iterator[Sample]:
        """Yield what there is to show, with what other processes have counted."""
        return self.others.added_to(flat(self._samples()))

    def _samples(self) -> Iterator[tuple[Metric, Labels, Any]]:
        """Yield what there is to show."""
        counts, fleet, now = self._counts, self._fleet, self._clock()
        if fleet is not None:
            gauges = FleetGauges.of(fleet)
            replicas = gauges.replicas.items()
            counts.keep_engines(
                {name for name, each in replicas if each.state["ready"] or each.state["draining"]}
            )
            yield from samples(gauges)
            yield from samples(self._fleet_counts)
            engines = dict.fromkeys(gauges.replicas, EngineCounts()) | counts.engines
            for replica, engine in engines.items():
                for metric, outer, value in samples(engine, (("engine", replica),)):
                    if replica in (counts.engines if metric.kind == "counter" else gauges.replicas):
                        yield metric, outer, value
        yield from samples(self._info)
        yield from samples(counts)
        yield from samples(RecentObjectives.of(counts.slo, now, uptime=now - self._start))
        yield from samples(self.server)
        if self._engine is not None:
            yield from samples(EngineGauges.of(self._engine, now))
        if self._proposer is not None:
            yield from samples(counts.speculation, (("proposer", self._proposer),))


def state_schema() -> dict[str, Any]:
    """Return the JSON schema of `MetricsExporter.state`."""
    number: dict[str, Any] = {"type": "number"}
    numbers = {"type": "array", "items": number}
    histogram = {
        "type": "object",
        "properties": {"bounds": numbers, "counts": numbers, "sum": number},
        "required": ["bounds", "counts", "sum"],
    }
    properties: dict[str, Any] = {
        "unix_time": {**number, "description": "when these numbers were so"},
        "start_time": {**number, "description": "when the server was started"},
    }
    for metric, labels in _declared():
        if not metric.is_own:
            continue
        shape = histogram if metric.kind == "histogram" else number
        if metric.kind == "info":
            shape, labels = {"type": "string"}, ("name",)
        for _ in labels:
            shape = {"type": "object", "additionalProperties": shape}
        properties[metric.name] = {**shape, "description": metric.text}
    return {
        "type": "object",
        "properties": properties,
        "required": ["unix_time", "start_time", "server_info"],
    }


def _declared() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    for kind, outer in SHOWN:
        yield from declared(kind, outer)
