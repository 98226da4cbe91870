"""How likely a draft is to be accepted, learnt from those that were.

What is estimated is the *conditional* rate of a token: accepted drafts over drafts that had a chance. A draft
behind a rejected one had none, so each row counts its accepted drafts, and one more where one was rejected.
(Accepted over drafted would be biased low for every row with more than one draft.)

A proposer that has more drafts ready is more certain of them: a long match comes true more often than a short
one. So rates are also kept by how many were ready, and a request's own odds are corrected by those.
"""

from __future__ import annotations

from collections import deque

from onbeat.scheduler.replica.request_state import RequestState

WINDOW = 32
"""Rows with drafts by which a request is judged. Text changes between what repeats and what does not, so
what was long ago says little."""
_OWN_PRIOR = 4.0
"""Tries that what is known of its class counts for beside a request's own."""
_GROUP_PRIOR = 16.0
"""Likewise for a class beside all requests, and for all beside what was configured."""
_DECAY = 0.995
"""Of a group's counts at each row: it remembers some two hundred rows."""
_DRAFTS_A_LEVEL = 3
_NUM_LEVELS = 6
"""Numbers of ready drafts are told apart in steps of three, up to fifteen."""
_LEAST_CHANCE = 0.02
"""No rate is taken for more certain than this, or its opposite."""


class GroupRate:
    """The acceptance of many requests together, the newest rows counting most.

    Parameters
    ----------
    parent : what to believe while little is known: a wider group, or a number.

    Attributes
    ----------
    rate : probability in (0, 1) that a draft is accepted if those before it are.
    odds : `rate / (1 - rate)`, of a rate that is kept off 0 and 1.
    """

    __slots__ = ("_num_accepted", "_num_tried", "_parent", "odds", "rate")

    def __init__(self, parent: GroupRate | float) -> None:
        self._parent = parent
        self._num_accepted = 0.0
        self._num_tried = 0.0
        self.rate: float = parent if isinstance(parent, float) else parent.rate
        self.odds = _odds(self.rate)

    def observe(self, num_accepted: int, num_tried: int) -> None:
        """Count a row's drafts."""
        self._num_accepted = self._num_accepted * _DECAY + num_accepted
        self._num_tried = self._num_tried * _DECAY + num_tried
        parent = self._parent
        prior = parent if isinstance(parent, float) else parent.rate
        self.rate = (_GROUP_PRIOR * prior + self._num_accepted) / (_GROUP_PRIOR + self._num_tried)
        self.odds = _odds(self.rate)


class LevelRates:
    """How much likelier drafts are to be accepted where the proposer had many ready, of all requests.

    Parameters
    ----------
    all_requests : what the levels are compared with.
    """

    def __init__(self, all_requests: GroupRate) -> None:
        self._all = all_requests
        self._levels = [GroupRate(all_requests) for _ in range(_NUM_LEVELS)]

    def of(self, num_available: int) -> GroupRate:
        """Return the rate of rows with so many drafts ready."""
        return self._levels[min(num_available // _DRAFTS_A_LEVEL, _NUM_LEVELS - 1)]

    def corrected(self, rate: float, num_available: int) -> float:
        """Return a request's rate at this many drafts ready: its odds times those of the level beside all."""
        odds = _odds(rate) * self.of(num_available).odds / self._all.odds
        return odds / (1.0 + odds)


class RequestRate:
    """The acceptance of one request, by its last rows with drafts.

    Parameters
    ----------
    group : its class, which it is believed to be like until it has shown otherwise.
    levels : what the number of drafts that are ready says.
    window : rows that count.

    Attributes
    ----------
    num_available : drafts that the proposer has for it; None where any number can be made, or nobody knows.
    num_idle : deliveries since the last draft.
    num_read : tokens that a model which makes drafts has read once all planned steps have run.
    read_life : how often the request had been preempted when they were counted.
    """

    __slots__ = (
        "_group",
        "_levels",
        "_num_accepted",
        "_num_tried",
        "_rows",
        "num_available",
        "num_idle",
        "num_read",
        "read_life",
    )

    def __init__(self, group: GroupRate, levels: LevelRates, window: int) -> None:
        self._group = group
        self._levels = levels
        self._rows: deque[tuple[int, int]] = deque(maxlen=window)
        self._num_accepted = 0
        self._num_tried = 0
        self.num_available: int | None = None
        self.num_idle = 0
        self.num_read = 0
        self.read_life = 0

    @property
    def acceptance(self) -> float:
        """Probability in (0, 1) that a draft is accepted if those before it are."""
        rate = (_OWN_PRIOR * self._group.rate + self._num_accepted) / (_OWN_PRIOR + self._num_tried)
        return rate if self.num_available is None else self._levels.corrected(rate, self.num_available)

    def observe(self, num_accepted: int, num_tried: int) -> None:
        """Count a row's drafts."""
        rows = self._rows
        if len(rows) == rows.maxlen:
            old_accepted, old_tried = rows[0]
            self._num_accepted -= old_accepted
            self._num_tried -= old_tried
        rows.append((num_accepted, num_tried))
        self._num_accepted += num_accepted
        self._num_tried += num_tried
        self._group.observe(num_accepted, num_tried)
        if self.num_available is not None:
            self._levels.of(self.num_available).observe(num_accepted, num_tried)


class AcceptanceBook:
    """Estimates for all requests; each is kept in its `RequestState.speculation`.

    Parameters
    ----------
    initial : acceptance to begin with, in (0, 1).
    window : rows with drafts by which a request is judged.
    """

    def __init__(self, initial: float, *, window: int = WINDOW) -> None:
        self._window = window
        self._all = GroupRate(initial)
        self._levels = LevelRates(self._all)
        self._classes: dict[str | None, GroupRate] = {}

    def of(self, state: RequestState) -> RequestRate:
        """Return a request's estimate."""
        rate = state.speculation
        if not isinstance(rate, RequestRate):
            rate = state.speculation = RequestRate(self._class_of(state), self._levels, self._window)
        return rate

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn what became of a row that delivered tokens. Takes the same time however much was seen before.

        Parameters
        ----------
        num_drafted : drafts that were verified.
        num_accepted : of these.
        num_available : drafts that are ready for the next step; None where any number can be made.
        """
        rate = self.of(state)
        if num_drafted:
            rate.num_idle = 0
            num_tried = num_accepted + (num_accepted < num_drafted)
            rate.observe(num_accepted, num_tried)  # by what was ready before
            self._all.observe(num_accepted, num_tried)
        else:
            rate.num_idle += 1
        rate.num_available = num_available

    def _class_of(self, state: RequestState) -> GroupRate:
        name = state.request.slo_class
        if name not in self._classes:
            self._classes[name] = GroupRate(self._all)
        return self._classes[name]


def _odds(rate: float) -> float:
    rate = min(max(rate, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
    return rate / (1.0 - rate)
