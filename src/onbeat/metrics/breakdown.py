"""Who pays where not all requests are good: attainment and waits by length of prompt, and by tenant.

The *wait* of a request is its TTFT, completed or not; that of one that never had a token lasts from its
arrival to its end, however it ended. Who was refused at arrival has waited for as long as that took.

The *deciles* are the requests with objectives in order of their prompts' lengths as offered, parted into ten
groups of equal size (to one request). Equal lengths stay in the order in which they are given, and
neighbouring groups of nothing but one and the same length are one group: between these the order would tell
when requests came, and not how long they are. Fewer than ten requests have no deciles. The *worst* decile is
the one with the least attainment; of equal ones that with the longest wait, then that of the longest prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from onbeat.metrics.attainment import JudgedRequests
from onbeat.metrics.measured import MeasuredRequest

NUM_DECILES = 10
MOST_TENANTS = 10
"""Tenants that get a group each, those with the most requests; the others share one."""


OUTCOME = np.dtype([("prompt_tokens", "i8"), ("wait", "f8"), ("is_ttft", "?"), ("is_good", "?")])
"""What became of a request with objectives: the length of its prompt as offered, its wait in seconds, and
whether that is the TTFT of a completed request."""
Outcomes = NDArray[np.void]
"""Of `OUTCOME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group of requests with objectives, one at least."""

    min_prompt_tokens: int
    max_prompt_tokens: int
    num_offered: int
    num_good: int
    longest_wait: float
    """Seconds."""
    median_ttft: float | None
    """Of the completed requests, seconds; None without one."""

    @property
    def attainment(self) -> float:
        """Share of the requests that are good."""
        return self.num_good / self.num_offered


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOutcome:
    """What became of the requests of a tenant, or of several tenants together."""

    tenant: str | None
    """None where nobody named one, and where it is several."""
    num_tenants: int
    outcome: GroupOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Who pays in a run."""

    deciles: tuple[GroupOutcome, ...]
    """By length of prompt, the shortest first."""
    tenants: tuple[TenantOutcome, ...]
    """The one with the most requests first."""

    @property
    def worst_decile(self) -> GroupOutcome | None:
        """None where there are no two to compare."""
        return worst_decile(self.deciles)


def break_down(judged: JudgedRequests) -> Breakdown:
    """Return who pays among judged requests."""
    outcomes = outcomes_of(judged)
    tenants = by_tenant(outcomes, [request.tenant for request in judged.requests])
    return Breakdown(deciles=by_prompt_decile(outcomes), tenants=tenants)


def outcomes_of(judged: JudgedRequests) -> Outcomes:
    """Return the outcomes of judged requests, in their order."""
    rows = (
        (request.offered_prompt_tokens, wait_of(request), has_ttft(request), is_good)
        for request, is_good in zip(judged.requests, judged.good.tolist(), strict=True)
    )
    return np.fromiter(rows, dtype=OUTCOME, count=len(judged.requests))


def wait_of(request: MeasuredRequest) -> float:
    """Return how long a request waited for its first token, or in vain until it ended, seconds."""
    waited_until = request.delivery_times[0] if len(request.delivery_times) else request.end
    return waited_until - request.arrival


def has_ttft(request: MeasuredRequest) -> bool:
    """Return whether the wait of a request is the TTFT of a whole answer."""
    return request.is_completed and len(request.delivery_times) > 0


def by_prompt_decile(outcomes: Outcomes) -> tuple[GroupOutcome, ...]:
    """Return the deciles of prompt length, the shortest prompts first; none of fewer than ten requests."""
    count = len(outcomes)
    if count < NUM_DECILES:
        return ()
    ordered = outcomes[np.argsort(outcomes["prompt_tokens"], kind="stable")]
    lengths = ordered["prompt_tokens"]
    bounds = [0]
    for stop in (count * decile // NUM_DECILES for decile in range(1, NUM_DECILES + 1)):
        if bounds[-1] and lengths[bounds[-2]] == lengths[stop - 1]:
            bounds.pop()
        bounds.append(stop)
    return tuple(_group(ordered[start:stop]) for start, stop in pairwise(bounds))


def worst_decile(deciles: Sequence[GroupOutcome]) -> GroupOutcome | None:
    """Return the decile that pays most; None where there are no two to compare."""
    if len(deciles) < 2:
        return None
    return min(deciles, key=lambda own: (own.attainment, -own.longest_wait, -own.max_prompt_tokens))


def by_tenant(
    outcomes: Outcomes, tenants: Sequence[str | None], *, most: int = MOST_TENANTS
) -> tuple[TenantOutcome, ...]:
    """Return what became of each tenant's requests, the tenant with the most requests first.

    Parameters
    ----------
    tenants : whose each row is; None, nobody in particular, is one tenant like the others. Where no row has
        a tenant there is nothing to tell apart, and nothing is returned.
    most : tenants with a group each; where there are more, the last group is that of all others together.
    """
    counts = Counter(tenants)
    if not counts.keys() - {None}:
        return ()
    ranked = sorted(counts, key=lambda name: (-counts[name], name is None, name or ""))
    named, others = ranked[:most], ranked[most:]
    if len(others) == 1:  # a group of one tenant can as well have its name
        named, others = ranked, []
    places: dict[str | None, int] = {name: place for place, name in enumerate(named)}
    rows: list[list[int]] = [[] for _ in range(len(named) + 1)]
    for row, tenant in enumerate(tenants):
        rows[places.get(tenant, len(named))].append(row)
    groups = [
        TenantOutcome(tenant=name, num_tenants=1, outcome=_group(outcomes[own]))
        for name, own in zip(named, rows, strict=False)
    ]
    if others:
        together = _group(outcomes[rows[-1]])
        groups.append(TenantOutcome(tenant=None, num_tenants=len(others), outcome=together))
    return tuple(groups)


def _group(outcomes: Outcomes) -> GroupOutcome:
    lengths, ttfts = outcomes["prompt_tokens"], outcomes["wait"][outcomes["is_ttft"]]
    return GroupOutcome(
        min_prompt_tokens=int(lengths.min()),
        max_prompt_tokens=int(lengths.max()),
        num_offered=len(outcomes),
        num_good=int(outcomes["is_good"].sum()),
        longest_wait=float(outcomes["wait"].max()),
        median_ttft=float(np.median(ttfts)) if ttfts.size else None,
    )
