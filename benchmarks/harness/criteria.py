"""What a capacity is: the rate at which a criterion is no longer kept, read off runs at some rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log

RATE_STEP = 1.05
"""Rates are powers of this, named by their exponents, so that runs of all searches share them."""
MOST_TAIL = 5.0
MOST_GROWTH = 0.02
"""Of what arrives, in requests and in prompt tokens, may be left over at the end of a load: the queue of a
load that could go on for ever does not grow, and one of thousands of requests cannot be told from that
better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What came of the measured requests of a run; hopeless ones are in no figure."""

    num: int
    """Requests that count."""
    num_hopeless: int
    good: float
    """Share; of a run that was ended early, the share so far (by the loosest TTFT of all that it is scored
    by), and nothing below but what has grown so far."""
    is_lost: bool = False
    """Whether the run was ended early."""
    classes: dict[str, float] = field(default_factory=dict)
    deciles: list[float] = field(default_factory=list)
    """Share of good ones by decile of prompt length."""
    longest: list[float] = field(default_factory=list)
    """Longest TTFT of each decile, seconds."""
    ttft: list[float] = field(default_factory=list)
    """P50, P99, longest, seconds."""
    tail: float = 0.0
    """P99 of TTFT over its objective; 0 where nobody has one."""
    gap: float = 0.0
    """P99 of all gaps, seconds."""
    preempted: float = 0.0
    """Share of the requests that were."""
    growth: float = 0.0
    """Share of what arrives that is left over (`growth`), in requests or prompt tokens, whichever is more."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """What must hold."""

    name: str
    share: float
    """Of good requests."""
    of_each_decile: bool = False
    """Whether every decile of prompt length must reach it."""
    bounds_tail: bool = False
    """Whether P99 TTFT must be below `MOST_TAIL` times its objective."""
    lasts: bool = True
    """Whether the queue must not grow."""
    widest: int = 2
    """Exponents between the rates that a capacity is interpolated between: 10 %."""

    def margins(self, score: Score) -> list[float]:
        """Return how far each part is kept, above 0 where it is; nearly straight lines over log rate."""
        good = score.good
        if self.of_each_decile and score.deciles:
            good = min(score.deciles)
        growth = (MOST_GROWTH - score.growth) / MOST_GROWTH if self.lasts else inf
        found = [_logit(good) - _logit(self.share), growth]
        if self.bounds_tail and score.tail > 0:
            found.append(log(MOST_TAIL / score.tail))
        return found

    def keeps(self, score: Score) -> bool:
        """Return whether all parts are kept."""
        return min(self.margins(score)) >= 0


CRITERIA = {
    each.name: each
    for each in (
        Criterion("90 %", 0.9),
        Criterion("99 %", 0.99),
        Criterion("90 %, any queue", 0.9, lasts=False),
        Criterion("worst decile", 0.9, of_each_decile=True, widest=4),
        Criterion("90 %, tail", 0.9, bounds_tail=True, widest=4),
    )
}


def _logit(share: float) -> float:
    share = min(max(share, 1e-3), 1 - 1e-3)
    return log(share / (1 - share))


def rate_at(index: float) -> float:
    """Return requests per second."""
    return float(RATE_STEP**index)


def index_near(rate: float) -> int:
    """Return the exponent nearest to a rate."""
    return round(log(rate) / log(RATE_STEP))


@dataclass(frozen=True, slots=True)
class Bracket:
    """Neighbouring exponents: at least one rate up to `kept` keeps a criterion, `missed` does not."""

    kept: int | None
    missed: int | None
    widest: int

    @property
    def is_narrow(self) -> bool:
        """Whether a capacity can be read off."""
        return self.kept is not None and self.missed is not None and self.missed - self.kept <= self.widest


class Curve(dict[int, Score]):
    """Scores of one policy, cell and seed by the exponents of their rates."""

    def bracket(self, criterion: Criterion) -> Bracket:
        """Return where the answer changes: the highest rate that keeps it, the next that does not."""
        answers = {index: criterion.keeps(score) for index, score in self.items()}
        kept = max((index for index, keeps in answers.items() if keeps), default=None)
        above = [i for i, keeps in answers.items() if not keeps and (kept is None or i > kept)]
        return Bracket(kept, min(above, default=None), criterion.widest)

    def capacity(self, criterion: Criterion) -> float | None:
        """Return requests per second between two neighbours; None where these are not known."""
        bracket = self.bracket(criterion)
        if not bracket.is_narrow:
            return None
        assert bracket.kept is not None
        assert bracket.missed is not None
        return exp(log(RATE_STEP) * self.crossing(criterion, bracket.kept, bracket.missed))

    def crossing(self, criterion: Criterion, kept: int, missed: int) -> float:
        """Return where between two exponents the criterion is missed, as a straight line has it."""
        above, below = criterion.margins(self[kept]), criterion.margins(self[missed])
        shares = [a / (a - b) for a, b in zip(above, below, strict=False) if b < 0]
        return kept + min(shares) * (missed - kept)

    def at_most(self, criterion: Criterion) -> float | None:
        """Return a rate at which it is not kept; None where there is none."""
        missed = self.bracket(criterion).missed
        return None if missed is None else rate_at(missed)
