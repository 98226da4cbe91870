"""The clients of a simulated run: each request is made when it is sent, not before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, Overloaded, SLOUnattainable
from onbeat.core.request import UNKNOWN_GRAMMAR, Request, SamplingParams
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.draft_acceptance import RequestDrafts
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad

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
    refusal: Overloaded | SLOUnattainable | None = None
    """Why its replica would not have it, for the load there; another may."""


class Clients:
    """Sends the requests of a load: at their times, in a closed loop, or both.

    With a limit on concurrency, a request that is due waits for an earlier one to end, and arrives then.

    Parameters
    ----------
    load : the requests.
    config : how many requests may be under way (a load without arrivals needs a limit), and what each
        declares and asks for.
    rows : rows of the load to send, ascending; None is all of them.
    """

    def __init__(
        self,
        load: OfferedLoad,
        config: SimulationConfig,
        *,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
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
        self._rows = rows
        self.num_requests = len(load) if rows is None else len(rows)
        self._overhead = config.request_overhead
        self._num_sent = 0
        self._ends: deque[float] = deque()
        """When requests ended that another may follow, where so many are under way that one waits."""
        self.num_under_way = 0
        """Requests sent that have not ended."""
        self._first_buffered = 0
        self._buffer: list[tuple[int, float, int, int]] = []
        """(row, arrival, prompt tokens, output tokens) of requests about to be sent"""
        self.next_time = inf
        """When a replica hears of the next request; infinite where none is left, or all wait for an end."""
        self._find_next()

    def send(self, now: float) -> OfferedRequest:
        """Make the next request, of which a replica hears now; it arrived when its server began with it."""
        index, _, num_prompt_tokens, num_output_tokens = self._buffer[self._num_sent - self._first_buffered]
        self._num_sent += 1
        self.num_under_way += 1
        self._find_next()
        request_id, arrival = str(index), now - self._overhead
        load = self._load
        request_class = load.request_class(index)
        name, slo, weight = None, None, 1.0
        if request_class is not None:
            name, slo, weight = request_class.name, request_class.slo, request_class.weight
        tenant = load.tenant(index)
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
        return replace(sampling, grammar=UNKNOWN_GRAMMAR) if is_guided else sampling

    def on_finish(self, now: float) -> None:
        """Let the next request be sent, if it was waiting for one to end."""
        self.num_under_way -= 1
        if self._max_concurrency < inf:
            self._ends.append(now)
            if self.next_time == inf:
                self._find_next()

    def _find_next(self) -> None:
        self.next_time = inf
        if self._num_sent == self.num_requests:
            return
        may_send = 0.0
        if self._num_sent >= self._max_concurrency:
            if not self._ends:
                return
            may_send = self._ends.popleft()
        offset = self._num_sent - self._first_buffered
        if offset == len(self._buffer):
            self._fill_buffer()
            offset = 0
        self.next_time = max(may_send, self._buffer[offset][1]) + self._overhead

    def _fill_buffer(self) -> None:
        start, load = self._num_sent, self._load
        stop = min(start + _ROWS_AT_ONCE, self.num_requests)
        rows = np.arange(start, stop) if self._rows is None else self._rows[start:stop]
        arrivals = [0.0] * len(rows) if load.arrivals is None else load.arrivals[rows].tolist()
        self._first_buffered = start
        self._buffer = list(
            zip(
                rows.tolist(),
                arrivals,
                load.num_prompt_tokens[rows].tolist(),
                load.num_output_tokens[rows].tolist(),
                strict=True,
            )
        )


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
                f"the {load.name} load has ids for blocks of {load.block_size} tokens, which KV blocks of "
                f"{block_size} tokens neither divide nor are a multiple of; choose a block_size that does"
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
