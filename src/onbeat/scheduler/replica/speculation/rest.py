"""When to stop looking for drafts for a while: looking takes time, too."""

from __future__ import annotations

_LOOK_SECONDS = 3e-5
"""Time of the host, in a step, to find out what could be drafted and to weigh it, whatever the rows."""
_LOOK_ROW_SECONDS = 1e-5
"""Likewise for each decode row. No step-time model knows either; both are much the same on any machine."""
_ROWS_TO_JUDGE = 512
"""Rows that are looked at before it is judged whether that pays, and that are remembered then."""
_ROWS_AGAIN = 128
"""Likewise after a rest."""
_SHORTEST, _LONGEST = 32, 256
"""Steps of a rest: twice as many as of the one before, where looking did not pay since."""
_CHANGE = 2
"""A batch with so many times the rows, or so many times fewer, is another one."""


class Rest:
    """Weighs the time that drafts save against the time that looking for them takes.

    Attributes
    ----------
    has_ended : whether the step is the first after a rest, so that what was known of drafts is old.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._length = _SHORTEST
        self._num_left = 0
        """Steps of the rest under way; 0 while looking."""
        self._num_rows = 0
        """When it began."""
        self._num_newcomers = 0
        """Requests that have joined since."""
        self._saved = self._spent = 0.0
        """Seconds, since the last rest; older ones count less."""
        self._rows_left = _ROWS_TO_JUDGE
        """To look at before the next rest."""

    def goes_on(self, num_rows: int, num_newcomers: int) -> bool:
        """Count a step; return whether nothing is looked for in it.

        Parameters
        ----------
        num_rows : decodes of the step.
        num_newcomers : requests that join the batch with it.
        """
        self.has_ended = False
        if not self._num_left:
            return False
        self._num_left -= 1
        self._num_newcomers += num_newcomers
        if num_rows >= _CHANGE * self._num_rows or _CHANGE * num_rows <= self._num_rows:
            self._length = _SHORTEST
            self._look_anew(_ROWS_TO_JUDGE)
        elif self._num_left and self._num_newcomers < self._num_rows:
            return True
        self._num_left = 0
        self.has_ended = True
        return False

    def look(self, num_rows: int, saved: float) -> None:
        """Count a step in which drafts were looked for, and begin a rest where that does not pay.

        Parameters
        ----------
        num_rows : decodes of the step.
        saved : seconds that its drafts are expected to save; 0 where none pay.
        """
        keep = max(0.0, 1.0 - num_rows / _ROWS_TO_JUDGE)
        self._saved = self._saved * keep + saved
        self._spent = self._spent * keep + _LOOK_SECONDS + num_rows * _LOOK_ROW_SECONDS
        self._rows_left -= num_rows
        if self._rows_left > 0:
            return
        if self._saved >= self._spent:
            self._length = _SHORTEST
            return
        self._num_left, self._num_rows, self._num_newcomers = self._length, num_rows, 0
        self._length = min(2 * self._length, _LONGEST)
        self._look_anew(_ROWS_AGAIN)

    def _look_anew(self, num_rows: int) -> None:
        """Forget what was weighed, and weigh so many rows before the next rest."""
        self._saved = self._spent = 0.0
        self._rows_left = num_rows
