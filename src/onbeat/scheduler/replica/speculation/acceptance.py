"""How likely a draft is to be accepted, learnt from those that were.

What is estimated is the *conditional* rate of a token: accepted drafts over drafts that had a chance. A draft
behind a rejected one had none, so each row counts its accepted drafts, and one more where one was rejected.
(Accepted over drafted, as SmartSpec's code has it, is biased low for every row with more than one draft.)
"""

from __future__ import annotations

from onbeat.scheduler.replica.request_state import RequestState

KEPT = 0.97
"""Of what is known, with each step: it is 33 steps old in the mean. A fall of the rate from 0.9 to 0.3 is
followed to within 0.05 in 150 steps, as with the 100 steps of SmartSpec's window, and more smoothly."""
LEAST_TRIES = 16.0
"""What is known never counts for less than so many drafts, however old it is, nor does what was configured:
a few drafts of one row say little."""


class AcceptanceRate:
    """The acceptance of a class of requests; that of newer steps counts more.

    Parameters
    ----------
    initial : what to believe at first.
    step : the number of steps so far.
    kept : share of what is known that is kept with each step.
    """

    __slots__ = ("_kept", "_num_accepted", "_num_tried", "_step")

    def __init__(self, initial: float, *, step: int, kept: float) -> None:
        self._num_accepted = initial * LEAST_TRIES
        self._num_tried = LEAST_TRIES
        self._step = step
        self._kept = kept

    @property
    def value(self) -> float:
        """Probability that a draft is accepted if those before it are."""
        return self._num_accepted / self._num_tried

    def observe(self, num_accepted: int, num_tried: int, step: int) -> None:
        """Count a row's drafts.

        Parameters
        ----------
        num_tried : drafts that had a chance.
        step : the number of steps so far.
        """
        if step != self._step:
            kept = max(self._kept ** (step - self._step), LEAST_TRIES / self._num_tried)
            self._num_accepted *= kept
            self._num_tried *= kept
            self._step = step
        self._num_accepted += num_accepted
        self._num_tried += num_tried


class AcceptanceRates:
    """The rates of all classes of objectives. A new class begins with that of all requests together.

    Parameters
    ----------
    initial : acceptance to begin with, in (0, 1).
    kept : share of what is known that is kept with each step.
    """

    def __init__(self, initial: float, *, kept: float = KEPT) -> None:
        self._kept = kept
        self._step = 0
        self._all = AcceptanceRate(initial, step=0, kept=kept)
        self._classes: dict[str | None, AcceptanceRate] = {}

    def begin_step(self) -> None:
        """Let what is known be a step older."""
        self._step += 1

    def of(self, state: RequestState) -> float:
        """Return the probability that a draft for a request is accepted if those before it are."""
        return self._classes.get(state.request.slo_class, self._all).value

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn what became of a row that delivered tokens, and how many drafts there are for its next step.

        Parameters
        ----------
        num_drafted : drafts that were verified.
        num_accepted : of these.
        num_available : drafts that are ready for the next step; None where any number can be made.
        """
        state.draft.num_ready = num_available
        if not num_drafted:
            return
        name = state.request.slo_class
        rate = self._classes.get(name)
        if rate is None:
            rate = AcceptanceRate(self._all.value, step=self._step, kept=self._kept)
            self._classes[name] = rate
        num_tried = num_accepted + (num_accepted < num_drafted)
        rate.observe(num_accepted, num_tried, self._step)
        self._all.observe(num_accepted, num_tried, self._step)
