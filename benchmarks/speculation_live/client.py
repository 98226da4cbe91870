"""Gives tasks to one server in a closed loop, and says how fast they were done and what was drafted."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from peers.client import Target

from onbeat.bench.client import Endpoint, StreamingClient, open_session
from onbeat.bench.config import TargetConfig
from onbeat.bench.feed import PromptFeed
from onbeat.bench.payload import PayloadBuilder
from onbeat.bench.probe import choose_model, wait_until_ready
from onbeat.bench.record import RequestRecord
from onbeat.bench.result import group_errors
from onbeat.bench.runner import LoadOutcome, LoadPlan, LoadRunner
from onbeat.bench.saved import error_keys
from onbeat.core.protocols import Tokenizer
from onbeat.core.settled_memory import settled_memory
from onbeat.metrics.summary import summarise, tpot
from onbeat.metrics.summary_keys import run_keys
from onbeat.workload.prompts import GivenPrompts
from onbeat.workload.workload import Workload

from .tasks import Task, copied_share

REQUEST_SECONDS = 300.0
KEYS = ("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "output_throughput")
KEYS += ("mean_tpot_ms", "mean_ttft_ms", "p50_itl_ms", "p99_itl_ms")


class TaskClient:
    """Sends tasks as chats of one message, greedy; an answer ends where the model ends it.

    Parameters
    ----------
    tokenizer : of the model that all servers run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def run(self, target: Target, tasks: Sequence[Task], concurrency: int) -> dict[str, Any]:
        """Return the numbers of a run, with the TPOT of each task (ms) in the order of the tasks."""
        outcome = asyncio.run(self._offer(target, tasks, concurrency))
        saved = run_keys(summarise(outcome.records, duration=outcome.duration))
        records = sorted(outcome.records, key=lambda record: record.index)
        return {
            **{key: saved.get(key) for key in KEYS},
            "tpot_ms": [_tpot_ms(record) for record in records],
            "copied_share": self._copied_share(tasks, records),
            "num_drafted": sum(record.num_drafted_tokens for record in records),
            "num_accepted": sum(record.num_accepted_tokens for record in records),
            "errors": error_keys(group_errors(records)),
        }

    async def _offer(self, target: Target, tasks: Sequence[Task], concurrency: int) -> LoadOutcome:
        config = TargetConfig(base_url=target.url, api=target.api, request_timeout=REQUEST_SECONDS)
        async with open_session(config.request_timeout) as session:
            model = choose_model(config, await wait_until_ready(session, config))
            payload = PayloadBuilder(api=target.api, model=model, extra={"temperature": 0.0})
            endpoint = Endpoint(url=config.url, payload=payload, timeout=config.request_timeout)
            client = StreamingClient(session, endpoint, count_tokens=self._count_tokens, keep_text=True)
            feed = PromptFeed(self._workload(tasks))
            await feed.fill()
            plan = LoadPlan(offsets=None, max_concurrency=concurrency)
            with settled_memory():
                return await LoadRunner(client.send, plan).run(feed, asyncio.Event())

    def _workload(self, tasks: Sequence[Task]) -> Workload:
        return Workload(
            name="tasks",
            prompts=GivenPrompts([task.prompt for task in tasks]),
            num_prompt_tokens=np.array([self._count_tokens(task.prompt) for task in tasks], dtype=np.int64),
            max_tokens=np.array([task.max_tokens for task in tasks], dtype=np.int64),
        )

    def _count_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def _encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _copied_share(self, tasks: Sequence[Task], records: Sequence[RequestRecord]) -> float:
        shares = [
            copied_share(self._encode(tasks[record.index].prompt), self._encode(record.text or ""))
            for record in records
        ]
        return statistics.fmean(shares)


def _tpot_ms(record: RequestRecord) -> float | None:
    seconds = tpot(record) if record.is_completed else None
    return None if seconds is None else round(seconds * 1e3, 3)
