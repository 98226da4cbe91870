"""The work that a fleet is offered, measured at arrival, and the share of its time that this takes."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from math import ceil, exp, inf, log, sqrt
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts, ReplicaLimits
from onbeat.scheduler.cluster.events import RoutingRequest

LONGEST_WINDOW = 240
"""Seconds over which work is summed up at most."""
_SURE = 3.0
"""Standard deviations by which a sum of random requests has to pass a bound."""
LATE_SHARE = 0.01
"""Of the requests: if more are late, there are too few replicas; what fewer ask for decides nothing."""
_PACE_RATIO = 0.02
"""TBT objectives that differ by less than this, as a share, are counted as one."""
_MEAN_OF = 200
"""Requests over which the means of lengths and of prefix hits are taken."""
_GUESSED_OUTPUT = 200.0
"""Output tokens of a request before any has ended."""


@dataclass(slots=True)
class _Mean:
    """A mean that forgets: of all values at first, then of about the last `_MEAN_OF`."""

    value: float
    num: int = 0

    def add(self, value: float) -> None:
        self.num = min(self.num + 1, _MEAN_OF)
        self.value += (value - self.value) / self.num


@dataclass(slots=True)
class _Second:
    """What arrived within a second."""

    when: int
    num_requests: int = 0
    prefill: float = 0.0
    """Seconds of prompt work."""
    squares: float = 0.0
    """Sum of the squares of what each request takes, prompt and answer."""
    num_missed: int = 0
    """Requests of this second, or of an earlier one, that turned out not to be in time in this one."""
    paces: Counter[int] = field(default_factory=Counter)
    """Requests by their TBT objective, in units of `_PACE_RATIO` of its logarithm."""


class Offered(NamedTuple):
    """The load of some seconds, a second."""

    num_requests: float
    prefill: float
    """Seconds of prompt work."""
    num_tokens: float
    """Output tokens."""
    error: float
    """Of the work as a share of it, one standard deviation, as that of a sum of independent requests."""
    num_missed: float
    tbt: float
    """Objective, seconds, which more than a few requests have or a tighter one that a replica can keep;
    infinite where there is none."""
    seconds: int

    def scaled(self, factor: float, *, backlog: float = 0.0) -> Offered:
        """Return so many times this load, and a backlog of prompt work for each second."""
        return self._replace(
            num_requests=self.num_requests * factor,
            prefill=self.prefill * factor + backlog,
            num_tokens=self.num_tokens * factor,
        )

    @property
    def surely(self) -> Offered:
        """The load that there is at least, but for chance."""
        return self.scaled(max(0.0, 1 - _SURE * self.error))

    @property
    def surely_misses(self) -> bool:
        """Whether more than a few of the requests are not in time, whatever is chance in that."""
        return _is_surely_many(self.num_missed * self.seconds, self.num_requests * self.seconds)


def _is_surely_many(num: float, num_requests: float) -> bool:
    """Return whether these are more than `LATE_SHARE` of the requests, whatever is chance in that."""
    return num - _SURE * sqrt(num) > LATE_SHARE * num_requests


class OfferedWork:
    """Sums up what arrives, in the seconds of work that it is for a replica of this fleet.

    The length of an answer is not known at arrival, and what a prefix cache will hold is not either: both are
    taken to be as they were in the requests before. Each call costs O(1), but for `of_last`, which looks at
    as many seconds.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=LONGEST_WINDOW + 1)
        self._output = _Mean(_GUESSED_OUTPUT)
        self._prompt = _Mean(0.0)
        self._cached = _Mean(0.0)
        """Share of a prompt that was found in a prefix cache."""
        self.costs: PrefillCosts | None = None
        """As a replica reported last."""
        self.limits: ReplicaLimits | None = None

    def on_arrival(self, request: RoutingRequest, now: float) -> None:
        """Count a request, unless every replica refuses it whatever it has to do."""
        if request.rather_refused and self.is_hopeless(request):
            return
        num_prompt = request.num_prompt_tokens
        self._prompt.add(num_prompt)
        second = self._second(now)
        second.num_requests += 1
        if request.slo is not None and request.slo.tbt is not None:
            second.paces[round(log(request.slo.tbt) / _PACE_RATIO)] += 1
        if self.costs is not None:
            prefill = self.prefill(num_prompt)
            second.prefill += prefill
            second.squares += (prefill + self._output.value * self.decode) ** 2

    def on_miss(self, now: float) -> None:
        """Count a request that is not in time, or is predicted not to be."""
        self._second(now).num_missed += 1

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Learn what the prefix cache held of a prompt."""
        self._cached.add(min(1.0, num_cached_tokens / max(1, num_prompt_tokens)))

    def on_end(self, num_output_tokens: int) -> None:
        """Learn how long an answer was."""
        self._output.add(num_output_tokens)

    def prefill(self, num_prompt_tokens: int) -> float:
        """Return the seconds of work of a prompt, as much of it cached as was of others."""
        assert self.costs is not None
        num_cached = int(self._cached.value * num_prompt_tokens)
        return self.costs.seconds(num_prompt_tokens - num_cached, num_cached)

    def is_hopeless(self, request: RoutingRequest) -> bool:
        """Return whether an idle replica would not be in time with a request: then no number of them is."""
        if self.costs is None:
            return False
        tbt = inf if request.slo is None or request.slo.tbt is None else request.slo.tbt
        idle = self.prefill(request.num_prompt_tokens) + self._least_step
        return idle >= request.ttft_objective or self._least_step >= tbt

    @property
    def _least_step(self) -> float:
        """Seconds of a step with next to nothing in it: it reads all weights."""
        return 0.0 if self.costs is None else max(self.costs.decode_base, self.costs.step)

    @property
    def decode(self) -> float:
        """Seconds that an output token adds to a step, at the mean context."""
        return 0.0 if self.costs is None else self.costs.decode_seconds(self._context)

    @property
    def _context(self) -> float:
        return self._prompt.value + self._output.value / 2

    def of_last(self, seconds: int, now: float) -> Offered:
        """Return the load of the last seconds, the present one left out."""
        end = int(now)
        num_requests = num_missed = 0
        prefill = squares = 0.0
        paces: Counter[int] = Counter()
        for each in reversed(self._seconds):
            if each.when >= end:
                continue
            if each.when < end - seconds:
                break
            num_requests += each.num_requests
            num_missed += each.num_missed
            prefill += each.prefill
            squares += each.squares
            for pace, num in each.paces.items():  # Counter.update takes three times as long
                paces[pace] += num
        num_tokens = num_requests * self._output.value
        work = prefill + num_tokens * self.decode
        return Offered(
            num_requests=num_requests / seconds,
            prefill=prefill / seconds,
            num_tokens=num_tokens / seconds,
            error=sqrt(squares) / work if work > 0 else 0.0,
            num_missed=num_missed / seconds,
            tbt=self._kept_tbt(paces, num_requests),
            seconds=seconds,
        )

    def _kept_tbt(self, paces: Counter[int], num_requests: int) -> float:
        """Return the objective that steps have to keep: see `Offered.tbt`."""
        num = 0
        for pace in sorted(paces):
            tbt = exp(pace * _PACE_RATIO)
            if tbt > self._least_step:
                num += paces[pace]
                if _is_surely_many(num, num_requests):
                    return tbt
        return inf

    def share(self, offered: Offered, num_replicas: int) -> float:
        """Return the share of its time that each of so many replicas would be busy with a load.

        A replica makes as many steps a second as the TBT objective asks for, and as its memory and its slots
        need to generate that many tokens. Each step has a fixed cost, which a prompt's work may hide: a step
        of decodes alone reads all weights. What the objective's steps cost by themselves, no number of
        replicas lowers: the share is that of the time which they leave.
        """
        costs, limits = self.costs, self.limits
        if costs is None or limits is None or not offered.num_requests:
            return 0.0
        num_tokens, prefill = offered.num_tokens / num_replicas, offered.prefill / num_replicas
        kv_tokens = limits.num_blocks * limits.block_size
        num_streams = max(1.0, min(limits.max_num_seqs, kv_tokens / max(1.0, self._context)))
        num_steps = max(1 / offered.tbt, num_tokens / num_streams)
        fixed = max(num_steps * self._least_step, num_steps * costs.step + prefill)
        kept = self._least_step / offered.tbt
        return (num_tokens * self.decode + fixed - kept) / (1 - kept)

    def needed(self, offered: Offered, share: float, most: int) -> int:
        """Return the fewest replicas that a load keeps busy for at most this share of their time."""
        if not offered.num_requests:
            return 0
        num_replicas = max(1, min(most, ceil(self.share(offered, 1) / share)))
        # what each step costs does not shrink with the load, but for that it does
        while num_replicas > 1 and self.share(offered, num_replicas - 1) <= share:
            num_replicas -= 1
        while num_replicas < most and self.share(offered, num_replicas) > share:
            num_replicas += 1
        return num_replicas

    def _second(self, now: float) -> _Second:
        when = int(now)
        if not self._seconds or self._seconds[-1].when < when:
            self._seconds.append(_Second(when))
        return self._seconds[-1]
