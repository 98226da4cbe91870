"""The seam between the model runner and what chooses tokens: by NumPy, on the device, or as a stand-in does.

Legend: R rows, V vocabulary.
"""

# ruff: noqa: N803, N806, N815 -- array names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import TokenLogprobs
from onbeat.engine.draw import Logits
from onbeat.engine.guided_draw import GuideOutcome
from onbeat.engine.sampling_row import SamplingRow

INVALID_TOKEN = -1
"""Stands for the token of a row that has none because of an error."""


@dataclass(slots=True)
class SampledTokens:
    """One step's tokens, in the order of the rows."""

    token_ids: list[int]
    """`INVALID_TOKEN` where the row is in `errors`."""
    logprobs: list[TokenLogprobs | None]
    """None where the row did not ask, or is in `errors`."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row index to what is wrong with its logits or its grammar; the other rows are not affected."""
    guides: GuideOutcome | None = None
    """What grammars did, and rows whose parameters leave no token; None where no row has either."""

    def fail(self, index: int, message: str) -> None:
        """Note that a row has no token, and why."""
        self.errors[index], self.token_ids[index] = message, INVALID_TOKEN


class BestTokens(NamedTuple):
    """Each row's most likely token, found where the logits were computed; or what was drawn there."""

    ids_R: NDArray[np.int64]
    """The lowest id of equals."""
    logits_R: Logits
    """The largest logit; NaN where any logit of the row is NaN."""
    is_chosen_R: NDArray[np.bool_] | None = None
    """Whether the token is what the row gets, so that nobody needs its logits; None: of no row."""
    logprobs: Sequence[TokenLogprobs | None] = ()
    """Of each row, where a device has chosen; empty where none asked."""
    masks: GuideOutcome | None = None
    """What it took to find masks of grammars that a device has held its choice to; None: there were none."""

    def take(self, rows: NDArray[np.int64] | slice) -> BestTokens:
        """Return those of some rows."""
        chosen_R = None if self.is_chosen_R is None else self.is_chosen_R[rows]
        return BestTokens(self.ids_R[rows], self.logits_R[rows], chosen_R)


class TokenSampler(Protocol):
    """Chooses one token per row of logits."""

    @property
    def trusts_device(self) -> bool:
        """Whether a forward pass that chooses tokens may do so for it."""

    def needs_logits(self, rows: list[SamplingRow]) -> bool:
        """Whether more than each row's most likely token is needed to choose."""

    def sample(
        self, logits_RV: Logits | None, rows: list[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        """Choose a token for each row.

        Parameters
        ----------
        logits_RV : [rows without a token, vocabulary], float32 or float64, contiguous; may be modified. None
            where the best tokens suffice (`needs_logits`, or all are chosen).
        rows : the requests. Those that have got a token (`BestTokens.is_chosen_R`) have no logits.
        best : the most likely token of each row, where it is known already.

        Returns
        -------
        SampledTokens
            A row with NaN, +inf or no finite logit at all is reported in `errors`.
        """

    def score(
        self, logits_RV: Logits | None, token_ids: Sequence[int], num_alternatives: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Report tokens of prompts, with their ranks: one for each row of logits that nobody has changed."""


def rows_with_logits(best: BestTokens | None, num_rows: int) -> NDArray[np.int64]:
    """Return the rows that have not got a token yet."""
    if best is None or best.is_chosen_R is None:
        return np.arange(num_rows)
    return np.flatnonzero(~best.is_chosen_R)
