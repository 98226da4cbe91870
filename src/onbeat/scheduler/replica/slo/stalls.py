"""Steps that take far longer than predicted, and what streams should have in hand for the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.lengths import OutputLengths
from onbeat.scheduler.replica.slo.work import PrefillWork

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)
"""Of a step's time, among which the one to earn is looked for: what lies between is not worth a call."""


class Stream(NamedTuple):
    """A request with tokens to come, as a stall meets it."""

    tbt: float
    """Objective, seconds; infinite without one, or where it is missed, a pace alone, or cannot be kept."""
    slack: float
    """That it had with its first token, seconds."""
    num_tokens: int
    """That it is expected to have in all."""
    context: float
    """Tokens that it has in the KV cache on average."""


def streams_of(running: Iterable[RequestState], lengths: OutputLengths, shortest: float) -> list[Stream]:
    """Return the requests that decode.

    Parameters
    ----------
    shortest : of a step, seconds; see `RunningView`.
    """
    streams = []
    for state in running:
        slo = state.slo
        if slo.first_delivery == -inf:
            continue
        limit = state.max_total_tokens - state.num_prompt_tokens
        num_tokens = lengths.remaining(state.request.slo_class, 0, q=0.5, limit=limit)
        streams.append(
            Stream(
                tbt=inf if slo.is_best_effort or slo.tbt_objective < shortest else slo.tbt_objective,
                slack=0.0 if slo.ttft_deadline == inf else max(0.0, slo.ttft_deadline - slo.first_delivery),
                num_tokens=num_tokens,
                context=state.num_prompt_tokens + 0.5 * num_tokens,
            )
        )
    return streams


class Stalls:
    """When stalls came, and what share of their time steps should leave to streams because of them.

    A stall is a step that takes longer than any is planned to, and a TBT objective longer than predicted; or
    several in a row. What it takes beyond that, S, a stream should have in hand: about one token may be late.

    With steps of length L a stream earns tbt - L a token, and what it lacked of S with its first token it has
    after k = lack / (tbt - L) tokens. If stalls come every T seconds, one comes before with about k L / T: so
    much of the streams is lost. What is lost by shorter steps is what prompts get of the time. The share to
    earn is the one that loses least: none where steps are costly or stalls rare, where answers end before
    they have earned anything to speak of, or where first tokens come early.

    Attributes
    ----------
    size : S of the last one, seconds; 0 before the first.
    share : of the time that decodes leave, what steps leave to streams, in [0, 1).
    tightest : TBT objective of the streams that steps now have, seconds; infinite without any.
    shortest : what no step is planned to take, seconds.
    since : when the last one began, or the first plan was made, seconds; None before.
    """

    __slots__ = ("_end", "_interval", "share", "shortest", "since", "size", "tightest")

    def __init__(self) -> None:
        self.size = self.share = 0.0
        self.tightest = self.shortest = inf
        self.since: float | None = None
        self._interval = 0.0
        """Between the last two, seconds; of the first, since the first plan."""
        self._end = -inf
        """When the last one ended."""

    def may_be_in(self, begun: float, ends: Sequence[float]) -> bool:
        """Whether any of the steps that followed one another may be one; each is to be noted then."""
        starts = [begun, *ends[:-1]]
        return max([end - start for start, end in zip(starts, ends, strict=True)]) > self.shortest

    def note(self, begun: float, end: float, predicted: float) -> None:
        """Look at a step.

        Parameters
        ----------
        begun, end : seconds.
        predicted : how long it was expected to take, seconds.
        """
        beyond = end - begun - predicted - self.tightest
        if beyond <= 0 or end - begun <= self.shortest:
            return
        if begun > self._end:  # else the last one goes on: a machine that has changed says so step after step
            since = begun if self.since is None else self.since
            self._interval, self.since, self.size = begun - since, begun, 0.0
        self.size, self._end = max(self.size, beyond), end

    def weigh(self, streams: Sequence[Stream], work: PrefillWork, limit: float, now: float) -> None:
        """Find the share to earn.

        Parameters
        ----------
        streams : those that run.
        limit : that steps take otherwise, seconds.
        """
        self.share = 0.0
        every = self._every(now)
        held = [(each.tbt, self.size - each.slack, each.num_tokens) for each in streams if each.tbt < inf]
        if not every or all(lack <= 0 for _, lack, _ in held):
            return
        context = sum([each.context for each in streams])

        def lost(share: float) -> float:
            """Return what streams lose to stalls, less what prompts get of the time."""
            length = limit * (1 - share)
            hits = [
                min(num_tokens, lack / (tbt - length) if tbt > length else inf) * length / every
                for tbt, lack, num_tokens in held
                if lack > 0
            ]
            # Each is done the sooner, so that fewer run.
            decodes = BatchShape.of_decodes(round((1 - share) * len(streams)), round((1 - share) * context))
            prompts = work.room_beside(decodes, length, inf).share
            return sum([min(1.0, each) for each in hits]) / len(held) - prompts

        self.share = min(_SHARES, key=lost)

    def reserve(self, now: float) -> float:
        """Return what streams should have in hand, seconds: less, once the next stall is overdue."""
        return self.size * self._interval / self._every(now) if self.share else 0.0

    def _every(self, now: float) -> float:
        """Return how often they come, seconds."""
        assert self.since is not None
        return max(self._interval, now - self.since)
