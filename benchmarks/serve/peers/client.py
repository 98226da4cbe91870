"""Offers a load to one server with the client of `onbeat bench`, and says what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.bench.bench_config import SendSLO, TargetConfig, choose_transport
from onbeat.bench.client import Endpoint, StreamingClient, open_session
from onbeat.bench.probe import ServerModels, choose_model, wait_until_ready
from onbeat.bench.record import Api, PayloadBuilder
from onbeat.bench.result import group_errors
from onbeat.bench.runner import LoadOutcome, LoadRunner
from onbeat.bench.session import RequestOffer
from onbeat.core.settled_memory import settled_memory
from onbeat.core.slo import SLO
from onbeat.core.tokenizer import Tokenizer
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.report.run import summary_values
from onbeat.workload.prompts import PromptWriter, WordPool, tokenizer_pool
from onbeat.workload.slo_classes import SLOClass

from .workload import LONG_PROMPT_TOKENS, Cell

REQUEST_SECONDS = 900.0
KEYS: tuple[str, ...] = (
    "duration",
    "offered",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
)
KEYS += ("output_throughput", "request_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
KEYS += ("max_itl_ms", "mean_tpot_ms", "attainment", "goodput")
SHORT_KEYS = ("offered", "attainment", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "max_itl_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server as the client sees it."""

    url: str
    model: str | None
    api: Api
    ignore_eos: bool
    keeps_alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Of every request, seconds; a request is good if it keeps both, its own P99 gap the second."""

    ttft: float = 1.0
    tbt: float = 0.1

    def __str__(self) -> str:
        return f"TTFT {self.ttft * 1e3:.0f} ms, own P99 gap {self.tbt * 1e3:.0f} ms"


class LoadClient:
    """Sends loads and scores them.

    Parameters
    ----------
    tokenizer : of the model that all servers run: the same prompts for all, of exactly known lengths.
    objectives : what requests are held to.
    send_slo : how a server is told of them; `auto` tells those that say they are onbeat.
    seed : of the lengths.
    """

    def __init__(self, tokenizer: Tokenizer, *, objectives: Objectives, send_slo: SendSLO, seed: int) -> None:
        self.objectives = objectives
        self._seed = seed
        self._send_slo = send_slo
        self._pool: WordPool = tokenizer_pool(tokenizer)
        self._count_tokens = lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        slo = SLO(ttft=objectives.ttft, tbt=objectives.tbt)
        self._classes = (SLOClass(name="default", slo=slo),)
        self._options = SummaryOptions(percentiles=(50.0, 99.0), slo_mode="gap")

    def warm_up(self, target: Target, cell: Cell, *, num_requests: int, salt: str) -> None:
        """Send a few requests of a load's kind, in words of their own, and forget them."""
        offer = cell.offer(PromptWriter(self._pool, f"{salt}/warm-up"), seed=self._seed)
        asyncio.run(self._send(target, offer, cell.concurrency, limit=num_requests))

    def run(self, target: Target, cell: Cell, *, salt: str) -> dict[str, Any]:
        """Offer a load; equal salts give equal prompts, whoever serves them.

        Returns
        -------
        Numbers of the run by the keys of a bench result; those of the short prompts apart, where there are
        two kinds.
        """
        offer = cell.offer(PromptWriter(self._pool, f"{salt}/{cell.name}"), seed=self._seed)
        outcome = asyncio.run(self._send(target, offer, cell.concurrency))
        summary = summarise(outcome.records, duration=outcome.duration, options=self._options)
        short = [each for each in outcome.records if each.offered_prompt_tokens < LONG_PROMPT_TOKENS]
        apart = summarise(short, duration=outcome.duration, options=self._options)
        return {
            **_chosen(summary_values(summary), KEYS),
            "num_short_answers": sum(
                record.is_completed and record.num_output_tokens < record.max_tokens
                for record in outcome.records
            ),
            "short": _chosen(summary_values(apart), SHORT_KEYS) if short and cell.long_share else None,
            "errors": group_errors(outcome.records),
        }

    async def _send(
        self, target: Target, offer: RequestOffer, concurrency: int, *, limit: int | None = None
    ) -> LoadOutcome:
        config = TargetConfig(
            base_url=target.url,
            backend=f"openai-{target.api}",
            model=target.model,
            request_timeout=REQUEST_SECONDS,
        )
        async with open_session(config.request_timeout, keeps_alive=target.keeps_alive) as session:
            # A server whose model is known is not asked for it: some cannot list models of a directory.
            known = ServerModels() if target.model is not None else None
            offered = known or await wait_until_ready(session, config)
            transport = choose_transport(self._send_slo, is_onbeat=offered.is_onbeat, asks_to_shed=False)
            extra = {"temperature": 0.0} | ({"ignore_eos": True} if target.ignore_eos else {})
            endpoint = Endpoint(
                url=config.url,
                payload=PayloadBuilder(api=config.api, model=choose_model(config, offered), extra=extra),
                objectives=transport,
                timeout=config.request_timeout,
            )
            client = StreamingClient(session, endpoint, count_tokens=self._count_tokens)
            offer = RequestOffer(offer.load.with_classes(self._classes, seed=self._seed), offer.prompts)
            items = await offer.items(limit)
            runner = LoadRunner(client.send, offsets=offer.starts, max_concurrency=concurrency)
            with settled_memory():
                return await runner.run(items, offer.begin, asyncio.Event())


def _chosen(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: values.get(key) for key in keys}
