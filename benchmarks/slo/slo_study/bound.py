r"""A rate that no policy can carry for ever, however much it knows: the work takes longer than the time.

In a load that lasts the queue does not grow: all prompts and decodes are done in the time in which their
requests arrive, but for what may be left over (`MOST_GROWTH` of the requests, and of their prompt tokens;
here the costliest). For a share of them each token is in time. That takes at least:

- *Steps.* A stream that is in time has its $n$ tokens between its arrival and $D_{n-1}$ = arrival + ttft +
  $(n - 1)$ tbt, each in a step of its own. Let the requests be laid into lanes in which these windows do not
  overlap; as many lanes are enough as windows overlap at most. Then some lane holds at least the mean number
  of tokens of a lane, and there are at least so many steps. (99 % of the tokens, as attainment asks; without
  the longest answers, which may be late.)
- *Time.* The time of a step is convex in its sums, so that $N$ steps take at least $N$ times as long as one
  that holds the mean of their sums, and that product grows with $N$.

All else is in the policy's favour: it knows arrivals and lengths, memory and slots never lack, prompts wait
as long as they like, and prefix hits are those of a cache without limit. Bursts do not count: the bound is of
the mean load.
"""

from __future__ import annotations

from functools import partial
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.slo.slo_study.idle import row_seconds
from benchmarks.slo.slo_study.trial import MOST_GROWTH
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.workload.offered import OfferedLoad

_IN_TIME = 0.99
"""Of a stream's tokens."""
_LOWEST, _PRECISION = 1e-3, 1.002


def fluid_bound(
    load: OfferedLoad, model: StepTimeModel, counted: NDArray[np.bool_], *, share: float
) -> float:
    """Return a rate above which no policy keeps a share of a load's requests, requests per second.

    Parameters
    ----------
    load : with arrivals, which are stretched to the rates, and with a TTFT and a TBT objective for each
        request, in `stream` mode.
    counted : bool [requests], those of which the share is.
    share : in (0, 1].
    """
    work = _Work(load, model, counted, share)
    low = _LOWEST
    while work.fits(2 * low):
        low *= 2
    high = 2 * low
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if work.fits(middle) else (low, middle)
    return high


def unlimited_hits(load: OfferedLoad) -> NDArray[np.int64]:
    """Return the prompt tokens of each request that a cache without limit holds when it arrives."""
    hits = np.zeros(len(load), dtype=np.int64)
    seen: set[int] = set()
    for row, block_ids in enumerate(load.block_ids or ()):
        count = next((at for at, block_id in enumerate(block_ids) if block_id not in seen), len(block_ids))
        hits[row] = min(count * load.block_size, int(load.num_prompt_tokens[row]) - 1)
        seen.update(block_ids)
    return hits


class _Work:
    """The requests that are counted, as columns; arrivals as at one request per second."""

    def __init__(
        self, load: OfferedLoad, model: StepTimeModel, counted: NDArray[np.bool_], share: float
    ) -> None:
        rows = np.flatnonzero(counted)
        slos = [load.slo(row) for row in rows.tolist()]
        limits = [(slo.ttft, slo.tbt) for slo in slos if slo is not None and slo.ttft and slo.tbt]
        assert load.arrivals is not None
        assert load.rate is not None
        assert len(limits) == len(rows), "every request needs a TTFT and a TBT objective"
        self._model = model
        self._num_late = floor(len(rows) * (1 - share) + 1e-9)
        self._arrivals = (load.arrivals * load.rate)[rows]
        self._ttft, self._tbt = np.array(limits).T
        self._outputs = load.num_output_tokens[rows].astype(np.float64)
        self._sums = self._least_sums(load.num_prompt_tokens[rows], unlimited_hits(load)[rows])

    def fits(self, rate: float) -> bool:
        """Whether the work takes no longer than its requests take to arrive."""
        span = float(self._arrivals[-1] - self._arrivals[0]) / rate
        steps = max(self._fewest_steps(rate), 1.0)
        mean = {name: value / steps for name, value in self._sums.items()}
        return steps * self._model.step_time(BatchShape(**mean)) <= span

    def _least_sums(self, prompts: NDArray[np.int64], cached: NDArray[np.int64]) -> dict[str, Any]:
        """Return the sums over all steps of `BatchShape`, without the requests that cost most."""
        tokens = (prompts - cached).astype(np.float64)
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        decodes = self._outputs - 1
        context = decodes * prompts + decodes * (decodes + 1) / 2
        token, pair, read = _prices(self._model)
        costliest = np.argsort(-(token * (tokens + decodes) + pair * pairs + read * context))
        is_little = np.cumsum(prompts[costliest]) <= MOST_GROWTH * prompts.sum()
        num_left_over = min(int(is_little.sum()), floor(MOST_GROWTH * len(prompts)))
        kept = costliest[num_left_over:]
        sums = {
            "num_new_tokens": tokens + decodes,
            "num_sequences": decodes + 1,
            "num_decodes": decodes,
            "num_chunks": np.ones(len(tokens)),
            "query_key_pairs": pairs,
            "chunk_cached_tokens": cached,
            "decode_context_tokens": context,
            "num_lm_head_rows": decodes + 1,
        }
        return {name: float(values[kept].sum()) for name, values in sums.items()}

    def _fewest_steps(self, rate: float) -> float:
        most = 0.0
        for tbt in np.unique(self._tbt):  # loose classes may make for so many lanes that they help nobody
            alike = self._tbt <= tbt
            starts = self._arrivals[alike] / rate
            outputs = np.ceil(self._outputs[alike] * _IN_TIME)
            ends = starts + self._ttft[alike] + (outputs - 1) * self._tbt[alike]
            tokens = np.sort(outputs)[: max(0, len(outputs) - self._num_late)].sum()
            most = max(most, float(tokens) / _most_at_once(starts, ends))
        return most


def _most_at_once(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> int:
    times = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    return int(np.cumsum(changes[np.lexsort((changes, times))]).max())


def _prices(model: StepTimeModel) -> tuple[float, float, float]:
    """Return what one more new token, pair and token of context read cost a large step, seconds."""
    seconds = partial(row_seconds, model)
    token = (seconds(0, 4096) - seconds(0, 2048)) / 2048
    pair = (seconds(16_384, 2048) - seconds(0, 2048)) / (16_384 * 2048)
    read = (seconds(32_768, 1) - seconds(1024, 1)) / (32_768 - 1024)
    return token, pair, read
