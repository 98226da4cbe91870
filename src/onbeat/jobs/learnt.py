"""What ended calls and jobs teach of those to come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

MOST_TENANTS = 1024
MOST_KINDS = 64
"""Of jobs of one tenant, of which something is learnt."""
_MOST_STAGES = 64
"""Of a job, beyond which nothing more is learnt of how many follow."""
_MEMORY = 64
"""Ended calls that an average is taken over, at most: the newest count most."""
PROMPT_TOKENS = 128
"""Prompt tokens that take as long as an output token: what it takes to generate one, many are computed in."""
CALL_WORK = 4.0
"""Output tokens that take as long as a call without any: to arrive, to be planned, to be heard of."""
_USUAL_LEFT = 3.0
"""Calls that are expected to follow where nothing is known."""
_USUAL_OUTPUT = 256.0
"""Output tokens of a call where nothing is known."""
_QUICK_SHRINK = 1.01
"""By how much the quickest pace is let go at each ended call: one lucky call does not count for ever."""


_T = TypeVar("_T")


def work_of(num_prompt_tokens: float, num_output_tokens: float) -> float:
    """Return how long a call takes, in output tokens."""
    return CALL_WORK + num_prompt_tokens / PROMPT_TOKENS + num_output_tokens


@dataclass(slots=True)
class Mean:
    """A running mean in which new values count for a `1 / _MEMORY` at least."""

    value: float
    count: int = 0

    def add(self, value: float) -> None:
        """Take in one more value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEMORY)


@dataclass(slots=True)
class KindOfJob:
    """What is known of jobs of one kind."""

    work: Mean = field(default_factory=lambda: Mean(work_of(0, _USUAL_OUTPUT)))
    """Of a call."""
    output: Mean = field(default_factory=lambda: Mean(_USUAL_OUTPUT))
    """Output tokens of a call."""
    between: Mean = field(default_factory=lambda: Mean(0.0))
    """Seconds between calls that follow one another."""
    left: list[Mean] = field(default_factory=list)
    """How many calls followed the first, the second and so on."""

    def calls_left(self, stage: int) -> float:
        """Return how many calls are expected to follow a call that `stage` others came before."""
        if not self.left:
            return _USUAL_LEFT
        return self.left[min(stage, len(self.left) - 1)].value

    def as_prior(self) -> KindOfJob:
        """Return what others of the kind are taken to be like, up to their first own call or end."""
        work, output, between, *left = (
            Mean(each.value) for each in (self.work, self.output, self.between, *self.left)
        )
        return KindOfJob(work, output, between, left)

    def end(self, num_stages: int) -> None:
        """Learn from a job that came to its end."""
        for stage in range(min(num_stages, _MOST_STAGES)):
            if stage == len(self.left):
                self.left.append(Mean(0.0))
            self.left[stage].add(num_stages - 1 - stage)


@dataclass(slots=True)
class Pace:
    """How long a unit of work takes."""

    usual: Mean = field(default_factory=lambda: Mean(0.0))
    """Of late, seconds."""
    quickest: float = 0.0
    """That was seen, seconds: a call takes no less, whatever it is promised."""

    def add(self, seconds: float, work: float) -> None:
        """Learn from a call that ended."""
        pace = seconds / work
        self.usual.add(pace)
        self.quickest = min(pace, self.quickest * _QUICK_SHRINK) if self.quickest else pace


class Lessons:
    """What calls have taught, by tenant and kind of job; of too many, the least recently used are forgotten.

    Nobody's calls bear on what another tenant's get, but for the guess that a tenant, or a kind of it, begins
    with: what was known of the last one.
    """

    def __init__(self) -> None:
        self._tenants = OrderedDict[str, tuple[Pace, OrderedDict[str, KindOfJob]]]()

    def of(self, tenant: str, kind: str) -> tuple[Pace, KindOfJob]:
        """Return what is known of a tenant's calls, and of its jobs of a kind."""
        pace, kinds = _recent(self._tenants, tenant, self._new_tenant, MOST_TENANTS)
        return pace, _recent(kinds, kind, lambda: self._new_kind(kind), MOST_KINDS)

    def _new_tenant(self) -> tuple[Pace, OrderedDict[str, KindOfJob]]:
        last, _ = next(reversed(self._tenants.values()), (Pace(), None))
        return Pace(Mean(last.usual.value), last.quickest), OrderedDict()

    def _new_kind(self, kind: str) -> KindOfJob:
        known = (kinds[kind] for _, kinds in reversed(self._tenants.values()) if kind in kinds)
        return next(known, KindOfJob()).as_prior()


def _recent(known: OrderedDict[str, _T], key: str, make: Callable[[], _T], most: int) -> _T:
    """Return what is known by a key, anew if it is not, and count it as used."""
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
    return known[key]
