"""How long a request's own work takes on an idle replica, cheap enough to ask for every waiting request."""

from __future__ import annotations

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

_MAX_CELLS = 1 << 16
"""Cells remembered before all are forgotten; more than a context of a million tokens uses."""

_Cell = tuple[float, float, float, float]
"""a, b, c, d of a + b x + c y + d x y; x and y are the tokens beyond the cell's lower corner."""


class PrefillEstimate:
    """Times of a step with a single row, read off a table that is filled as it is asked for.

    Tokens cached and tokens to compute are both cut into four cells an octave (below 8 into single tokens),
    and the model is asked at the corners only; between these the time is interpolated bilinearly. That is
    exact for every term that is linear in each of the two (fixed cost, tokens, tokens x context); a square of
    the chunk is overestimated by at most 1 / 64 of itself, and the time at a kink (where arithmetic overtakes
    the reading of weights) by at most 1 / 16.

    A model that learns moves away from the table: call `forget` from time to time.

    Parameters
    ----------
    model : asked for at most four times a cell.
    q : quantile; None is the mean.
    """

    __slots__ = ("_cells", "_corners", "_model", "_q")

    def __init__(self, model: StepTimeModel, q: float | None = None) -> None:
        self._model = model
        self._q = q
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._corners: dict[tuple[int, int], float] = {}

    def seconds(self, cached_tokens: int, remaining_tokens: int) -> float:
        """Return the time of a prompt's remaining tokens, alone and in one chunk, that ends with a sample.

        Parameters
        ----------
        cached_tokens : context that is computed already.
        remaining_tokens : tokens to compute; 0 takes no time.
        """
        if remaining_tokens < 1:
            return 0.0
        # The lower corner keeps the three highest bits.
        shift = cached_tokens.bit_length() - 3
        low_cached = cached_tokens >> shift << shift if shift > 0 else cached_tokens
        shift = remaining_tokens.bit_length() - 3
        low_remaining = remaining_tokens >> shift << shift if shift > 0 else remaining_tokens
        cell = self._cells.get((low_cached, low_remaining))
        if cell is None:
            cell = self._add_cell(low_cached, low_remaining)
        a, b, c, d = cell
        x, y = cached_tokens - low_cached, remaining_tokens - low_remaining
        return a + b * x + (c + d * x) * y

    def decode_seconds(self, context_tokens: int) -> float:
        """Return the time of one decode alone.

        Parameters
        ----------
        context_tokens : tokens in the KV cache before it.
        """
        return self.seconds(context_tokens, 1)

    def forget(self) -> None:
        """Ask the model anew from now on."""
        self._cells.clear()
        self._corners.clear()

    def _add_cell(self, low_cached: int, low_remaining: int) -> _Cell:
        if len(self._cells) >= _MAX_CELLS:
            self.forget()
        width, height = _cell_size(low_cached), _cell_size(low_remaining)
        base = self._corner(low_cached, low_remaining)
        # Cells of a single token have nothing between their corners.
        right = self._corner(low_cached + width, low_remaining) - base if width > 1 else 0.0
        above = self._corner(low_cached, low_remaining + height) - base if height > 1 else 0.0
        twist = 0.0
        if width > 1 and height > 1:
            twist = self._corner(low_cached + width, low_remaining + height) - base - right - above
        cell = self._cells[low_cached, low_remaining] = (
            base,
            right / width,
            above / height,
            twist / (width * height),
        )
        return cell

    def _corner(self, cached_tokens: int, remaining_tokens: int) -> float:
        found = self._corners.get((cached_tokens, remaining_tokens))
        if found is None:
            shape = BatchShape()
            shape.add(cached_tokens, remaining_tokens, samples=True)
            found = self._corners[cached_tokens, remaining_tokens] = self._model.step_time(shape, self._q)
        return found


def _cell_size(low: int) -> int:
    """Return the tokens from a cell's lower corner to the next one's."""
    return 1 << max(low.bit_length() - 3, 0)
