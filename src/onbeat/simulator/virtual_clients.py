"""The clients of a simulated run: each request is made when it is sent, not before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf

import numpy as np

from onbeat.core.errors import ConfigError, Overloaded, SLOUnattainable
from onbeat.core.request import UNKNOWN_GRAMMAR, Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.jobs.call import JobCall, JobEnd
from onbeat.jobs.table import JobTable, OpenCall
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.speculation import RequestDrafts
from onbeat.workload.offered import JobRows, OfferedLoad

STOP = 0
"""The token with which a request ends before its `max_tokens`."""

_GOLDEN_RATIO = 0.6180339887498949
"""Its multiples spread requests under a grammar evenly over a load."""
_ROWS_AT_ONCE = 4096
"""Rows of the load that are Python numbers at a time."""


@dataclass(slots=True)
class OfferedRequest:
    """A request on its way: what the scheduler gets, and the record of what becomes of it."""

    index: int
    """Row of the load."""
    request: Request
    record: RequestRecord
    drafts: RequestDrafts | None = None
    """Which drafts for it are accepted, once that has been drawn."""
    place: int = -1
    """Number of the replica of a fleet that has it, or had it last."""
    num_told: int = 0
    """Its deliveries that the fleet knows of."""
    refusal: Overloaded | SLOUnattainable | None = None
    """Why its replica would not have it, for the load there; another may."""


class JobChains:
    """Sends the calls of jobs in their order, each once those that it needs have ended.

    A call that does not come to its end ends its job, and so does the deadline: no other call is sent.

    Parameters
    ----------
    rows : which rows of a load are the calls of which job.
    """

    def __init__(self, rows: JobRows) -> None:
        self._rows = rows
        self._book = JobTable()
        self._due: list[tuple[float, int]] = []
        """(when, row) of calls whose think time passes."""
        self._num_missing: dict[int, int] = {}
        """Rows that wait, and how many calls they wait for."""
        self._open: dict[int, OpenCall] = {}
        self._ends: dict[int, float] = {}
        """When jobs have to be done of which a call was sent: minus infinity once one was lost."""

    @property
    def next_time(self) -> float:
        """When the next call is due; infinite where none is."""
        return self._due[0][0] if self._due else inf

    def take(self) -> int:
        """Return the row of the call that is due, which counts as sent."""
        return heappop(self._due)[1]

    def has_schema(self, row: int) -> bool:
        """Return whether an answer must match a schema."""
        number, index = self._rows.place(row)
        return self._rows.jobs[number].calls[index].schema is not None

    def open(
        self, row: int, slo: SLO | None, now: float, *, num_prompt_tokens: int, max_tokens: int
    ) -> tuple[SLO | None, float]:
        """Return what a call is held to that arrives now, and its `Request.kept_for`.

        Parameters
        ----------
        slo : its own objectives.
        """
        number, index = self._rows.place(row)
        job = self._rows.jobs[number]
        self._ends.setdefault(number, now + job.deadline)
        if job.deadline == inf or not job.calls[index].output_tokens:  # a server takes no job there
            return slo, 0.0
        call = JobCall(
            job_id=str(number),
            e2e=job.deadline,
            calls_left=job.calls_left[index],
            kind=job.kind,
        )
        opened = self._book.open(call, now, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        self._open[row] = opened
        return opened.share.objectives(slo), opened.share.kept_for

    def close(self, row: int, record: RequestRecord, now: float) -> None:
        """Hear that a call ended, and let those be due that waited for it."""
        number, index = self._rows.place(row)
        job, is_done = self._rows.jobs[number], record.is_completed
        if (opened := self._open.pop(row, None)) is not None:
            why = None if is_done else JobEnd.REFUSED
            self._book.close(opened, now, num_output_tokens=record.num_output_tokens, why=why)
        if not is_done:
            self._ends[number] = -inf
        for each in job.followers[index]:
            follower = row - index + each
            missing = self._num_missing.pop(follower, len(job.calls[each].needs)) - 1
            when = now + job.calls[each].think
            if when > self._ends[number]:
                continue
            if missing:
                self._num_missing[follower] = missing
            else:
                heappush(self._due, (when, follower))


class Clients:
    """Sends the requests of a load: at their times, in a closed loop, or both.

    With a limit on concurrency, a request that is due waits for an earlier one to end, and arrives then.

    Parameters
    ----------
    load : the requests.
    config : how many requests may be under way (a load without arrivals needs a limit), and what each
        declares and asks for.
    """

    def __init__(self, load: OfferedLoad, config: SimulationConfig) -> None:
        max_concurrency = config.max_concurrency
        if load.arrivals is None and max_concurrency is None:
            raise ConfigError(
                f"the {load.name} load is a closed loop; say how many requests are under way at once "
                "(max_concurrency), or give it arrivals"
            )
        self._load = load
        self._hashes = None if load.block_ids is None else _BlockHashes(load, config.scheduler.block_size)
        self._max_concurrency = inf if max_concurrency is None else max_concurrency
        self._declared_max_tokens = config.declared_max_tokens
        self._shed = config.shed
        self._guided_share = config.guided_share
        self._chains = None if load.jobs is None else JobChains(load.jobs)
        self._rows = None if load.jobs is None else load.jobs.heads
        """Those of the load that wait for no other; None is all."""
        self._num_rows = len(load) if self._rows is None else len(self._rows)
        self._overhead = config.request_overhead
        self._num_sent = 0
        self._ends: deque[float] = deque()
        """When requests ended that another may follow, where so many are under way that one waits."""
        self._may_send: float | None = None
        """When the next request may be sent, by the limit; None while it has to wait for an end."""
        self._num_places = 0
        """How many of the places that the limit allows were ever taken."""
        self.num_under_way = 0
        """Requests sent that have not ended."""
        self._first_buffered = 0
        self._buffer: list[tuple[int, float]] = []
        """(row, arrival) of requests about to be sent"""
        self.next_time = inf
        """When a replica hears of the next request; infinite where none is left, or all wait for an end."""
        self._find_next()

    @property
    def is_open(self) -> bool:
        """Whether no request waits for the end of another."""
        return self._max_concurrency == inf and self._chains is None

    def send(self, now: float) -> OfferedRequest:
        """Make the next request, of which a replica hears now; it arrived when its server began with it."""
        load, index, arrival = self._load, self._take_next(), now - self._overhead
        self.num_under_way += 1
        self._find_next()
        request_id = str(index)
        num_prompt_tokens = int(load.num_prompt_tokens[index])
        num_output_tokens = int(load.num_output_tokens[index])
        request_class = load.request_class(index)
        name, slo, weight, kept_for = None, None, 1.0, 0.0
        if request_class is not None:
            name, slo, weight = request_class.name, request_class.slo, request_class.weight
        tenant = load.tenant(index)
        if self._chains is not None:
            most = max(num_output_tokens, self._declared_max_tokens or 0)
            slo, kept_for = self._chains.open(
                index, slo, arrival, num_prompt_tokens=num_prompt_tokens, max_tokens=most
            )
        request = Request(
            request_id=request_id,
            prompt_token_ids=range(num_prompt_tokens),
            sampling=self._sampling(index, num_output_tokens),
            arrival=arrival,
            block_hashes=() if self._hashes is None else self._hashes.of(index),
            slo=slo,
            slo_class=name,
            weight=weight,
            tenant=tenant,
            shed=self._shed,
            priority=0 if load.priorities is None else int(load.priorities[index]),
            kept_for=kept_for,
            pooling=None if num_output_tokens else "last",
        )
        record = RequestRecord(
            request_id=request_id,
            arrival=arrival,
            num_prompt_tokens=num_prompt_tokens,
            offered_output_tokens=num_output_tokens,
            request_class=name,
            slo=slo,
            tenant=tenant,
            is_embedding=not num_output_tokens,
        )
        return OfferedRequest(index, request, record)

    def _sampling(self, index: int, num_output_tokens: int) -> SamplingParams:
        sampling = _sampling(num_output_tokens, self._declared_max_tokens)
        is_guided = num_output_tokens > 0 and index * _GOLDEN_RATIO % 1 < self._guided_share
        if self._chains is not None:
            is_guided = is_guided or self._chains.has_schema(index)
        return replace(sampling, grammar=UNKNOWN_GRAMMAR) if is_guided else sampling

    def on_finish(self, offered: OfferedRequest, now: float) -> None:
        """Let the next request be sent, if it was waiting for one to end."""
        self.num_under_way -= 1
        if self._max_concurrency < inf:
            self._ends.append(now)
        if self._chains is not None:
            self._chains.close(offered.index, offered.record, now)
            self._find_next()
        elif self.next_time == inf and self._max_concurrency < inf:
            self._find_next()

    def _take_next(self) -> int:
        """Return the row of the next request, which counts as sent."""
        chains, self._may_send = self._chains, None
        if chains is not None and chains.next_time <= self._next_of_rows():
            return chains.take()
        index = self._buffer[self._num_sent - self._first_buffered][0]
        self._num_sent += 1
        return index

    def _next_of_rows(self) -> float:
        """Return when the next request is due that waits for no other; infinite where none is left."""
        if self._num_sent == self._num_rows:
            return inf
        offset = self._num_sent - self._first_buffered
        if offset == len(self._buffer):
            self._fill_buffer()
            offset = 0
        return self._buffer[offset][1]

    def _find_next(self) -> None:
        self.next_time = inf
        if self._may_send is None:
            if self._num_places < self._max_concurrency:
                self._may_send, self._num_places = 0.0, self._num_places + 1
            elif self._ends:
                self._may_send = self._ends.popleft()
            else:
                return
        due = self._next_of_rows()
        if self._chains is not None:
            due = min(due, self._chains.next_time)
        self.next_time = max(self._may_send, due) + self._overhead

    def _fill_buffer(self) -> None:
        start, load = self._num_sent, self._load
        stop = min(start + _ROWS_AT_ONCE, self._num_rows)
        rows = np.arange(start, stop) if self._rows is None else self._rows[start:stop]
        arrivals = [0.0] * len(rows) if load.arrivals is None else load.arrivals[rows].tolist()
        self._first_buffered = start
        self._buffer = list(zip(rows.tolist(), arrivals, strict=True))


@lru_cache(maxsize=1 << 16)
def _sampling(num_output_tokens: int, declared_max_tokens: int | None) -> SamplingParams:
    """Return what a client asks for.

    Parameters
    ----------
    num_output_tokens : what the model will have generated when it stops; 0 of a request with an embedding.
    declared_max_tokens : the client's `max_tokens`, which is all that a scheduler can know beforehand; None,
        or no more than the output: the output ends because it is that long.
    """
    if not num_output_tokens:
        return SamplingParams(max_tokens=1)
    if declared_max_tokens is None or declared_max_tokens <= num_output_tokens:
        return SamplingParams(max_tokens=num_output_tokens)
    return SamplingParams(max_tokens=declared_max_tokens, stop_token_ids=(STOP,))


class _BlockHashes:
    """Names the scheduler's blocks by the ids of the load's blocks, which are of another size.

    Equal ids mean equal tokens up to the end of the load's block, so a smaller block is named by its id and
    its place in it, a larger one by the id of the last that it holds.
    """

    def __init__(self, load: OfferedLoad, block_size: int) -> None:
        assert load.block_ids is not None
        self._load = load
        self._block_ids = load.block_ids
        self._block_size = block_size
        self._num_parts = load.block_size // block_size
        self._num_joined = block_size // load.block_size
        if load.block_size % block_size and block_size % load.block_size:
            raise ConfigError(
                f"the {load.name} load has ids for blocks of {load.block_size} tokens, but KV blocks "
                f"have {block_size}; choose a block_size that divides the first or is a multiple of it"
            )

    def of(self, index: int) -> list[int]:
        """Return the hashes of the full blocks of a prompt, and of its output where ids cover that."""
        block_ids = self._block_ids[index]
        load = self._load
        num_tokens = int(load.num_prompt_tokens[index])
        if load.ids_cover_output:
            num_tokens += int(load.num_output_tokens[index])
        num_blocks = num_tokens // self._block_size
        if self._num_joined > 1:
            return list(block_ids[self._num_joined - 1 :: self._num_joined][:num_blocks])
        parts = self._num_parts
        if parts == 1:
            return list(block_ids[:num_blocks])
        hashes = [block_id * parts + part for block_id in block_ids for part in range(parts)]
        del hashes[num_blocks:]
        return hashes
