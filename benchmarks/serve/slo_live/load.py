"""One measured run of the bench client against one server."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onbeat.bench.bench_config import BenchConfig, SamplingConfig, SendSLO, TargetConfig
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.record import SentRequest
from onbeat.bench.result import BenchRun
from onbeat.bench.session import run_bench
from onbeat.core.slo import SLO, SLOMode
from onbeat.metrics.attainment import good_requests
from onbeat.workload.slo_classes import SLOClass

Result = BenchRun

# Prompts of 100 to 600 tokens, outputs of 20 to 100.
CHAT = BenchLoad(input_len=350, random_range_ratio=5 / 7, output_len=60, random_output_range_ratio=2 / 3)
REQUEST_TIMEOUT = 300.0
MAX_FAILED_SHARE = 0.05
"""With more failures than this a study ends; up to it they are counted, as requests that are not good."""
RAMP_STEPS = 16
"""In which a ramp's rate grows."""


class Quiet:
    """Shows nothing while a run goes on."""

    def on_phase(self, text: str) -> None: ...

    def on_start(self, run: RunConfig, num_requests: int) -> None: ...

    def on_request(self, record: SentRequest) -> None: ...

    def on_result(self, result: Result) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of a server in one run: equal loads are equal requests at equal times, in new words."""

    seed: int
    seconds: float
    rate: float = 0.0
    """Requests per second of Poisson arrivals."""
    ramp: tuple[float, float] | None = None
    """First and last rate of a load that grows; in place of `rate`."""
    concurrency: int | None = None
    """A closed loop of so many requests; in place of `rate`."""
    num_prompts: int | None = None
    """None: as many as arrive in `seconds`."""
    classes: tuple[SLOClass, ...] = ()
    dataset: BenchLoad = CHAT
    asks_to_shed: bool = False
    num_warmups: int = 2

    @property
    def num_requests(self) -> int:
        if self.num_prompts is not None:
            return self.num_prompts
        rate = sum(self.ramp) / 2 if self.ramp else self.rate
        return max(2, round(rate * self.seconds))

    def config(self) -> BenchLoad:
        arrivals: dict[str, Any] = {"request_rate": self.rate, "arrivals": "poisson"}
        if self.ramp is not None:
            rates = np.linspace(*self.ramp, RAMP_STEPS)
            arrivals = {"rate_steps": ",".join(f"{rate:g}:{self.seconds / RAMP_STEPS:g}" for rate in rates)}
        if self.concurrency is not None:
            arrivals = {"max_concurrency": self.concurrency}
        return replace(
            self.dataset,
            num_prompts=self.num_requests,
            num_warmups=self.num_warmups,
            seed=self.seed,
            salt=secrets.token_hex(4),
            **arrivals,
        )


@dataclass(frozen=True, kw_only=True)
class Client:
    """How runs are sent and scored."""

    send_slo: SendSLO = "auto"
    slo_mode: SLOMode = "stream"

    def run(self, url: str, load: Load) -> Result:
        """Measure one run; exits the program if the server failed on many requests."""
        bench = BenchConfig(
            target=TargetConfig(base_url=url, request_timeout=REQUEST_TIMEOUT),
            sampling=SamplingConfig(ignore_eos=True),
            slo_mode=self.slo_mode,
            send_slo=self.send_slo,
            shed=load.asks_to_shed,
        )
        run = RunConfig(load=load.config(), classes=load.classes)
        [result] = asyncio.run(
            run_bench(bench, [run], tokenizer=None, progress=Quiet(), stop=asyncio.Event())
        )
        if failed := result.summary.counts.num_failed:
            problem = f"{url}: {failed} requests failed: {result.errors}"
            if failed > MAX_FAILED_SHARE * load.num_requests:
                raise SystemExit(problem)
            print(f"warning: {problem}", flush=True)
        return result


def one_class(ttft: float, tbt: float) -> tuple[SLOClass, ...]:
    """Return the same objectives (seconds) for every request."""
    return (SLOClass(name="default", slo=SLO(ttft=ttft, tbt=tbt)),)


@dataclass(frozen=True)
class Scores:
    """What a result comes to, for tables and for saving."""

    result: Result
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        saved = self.result.values
        counts = ("offered", "completed", "rejected", "expired", "failed")
        shares = ("good", "attainment", "attainment_admitted")
        latencies = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "max_itl_ms")
        more = ("goodput", "output_throughput", "p99_rejection_ms", "max_rejection_ms", "p99_dispatch_lag_ms")
        return (
            {key: saved.get(key) for key in (*counts, *shares, *latencies, *more)}
            | {"attainment_gap": attainment_in(self.result, "gap"), "verdicts": saved["server_verdicts"]}
            | self.extra
        )


def attainment_in(result: Result, mode: SLOMode) -> float | None:
    """Return the attainment of a result's requests in another mode than the one it was scored in."""
    records = list(result.records)
    return float(good_requests(records, mode=mode).mean()) if records else None


def good_flags(result: Result, mode: SLOMode) -> np.ndarray:
    """Return for each request, by arrival, whether it was good."""
    return good_requests(sorted(result.records, key=lambda record: record.arrival), mode=mode)
