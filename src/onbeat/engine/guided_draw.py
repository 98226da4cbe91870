"""Tokens of rows under a grammar: drawn as if there were none, and drawn again where the grammar refuses.

A row's token is x with probability p(x). Where the grammar allows the set A and refuses x, another is drawn
from A in proportion to p, with a number of its own. So y in A comes with probability
p(y) + (1 - p(A)) p(y) / p(A) = p(y) / p(A), as with a mask before the first draw, but few tokens need a mask.
Greedily it is the most likely token of A in both. With top-k, top-p or min-p the first draw is from what
these keep of all tokens, the second from what they keep of A.

References
----------
Beurer-Kellner, Fischer and Vechev, "Guiding LLMs The Right Way: Fast, Non-Invasive Constrained Generation",
ICML 2024 (opportunistic masking).

Legend: R rows, V vocabulary, A tokens that a grammar allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt
from torch import Tensor

from onbeat.core.request import SamplingParams
from onbeat.engine.draw import draw, locate, nucleus_candidates
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampling_row import SamplingRow, TokenIds
from onbeat.text.grammar.guide import GrammarTooComplex

NO_TOKEN = -1
DEAD_END = (
    "no token that the grammar allows can be sampled under allowed_token_ids, logit_bias and min_tokens"
)

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class GuideWork:
    """What grammars did for the rows of a step."""

    num_tokens: int = 0
    """That were asked about."""
    num_redrawn: int = 0
    """Of these, refused, and drawn again."""
    seconds: float = 0.0
    """That it took on the host."""
    faults: dict[int, str] = field(default_factory=dict)
    """Row index to why its grammar cannot be followed; the request is at fault, and its KV is sound."""

    def add(self, part: GuideWork, indices: Sequence[int]) -> None:
        """Count what was done for some of the rows, whose indices these are."""
        self.num_tokens += part.num_tokens
        self.num_redrawn += part.num_redrawn
        self.seconds += part.seconds
        self.faults |= {indices[place]: message for place, message in part.faults.items()}


Redraw = Callable[[int, int, TokenIds], int]
"""Given a row's index, its refused token and those that its grammar allows, returns one of these."""


def hold_to_grammars(
    rows: Sequence[SamplingRow], guided: Sequence[int], token_ids: list[int], redraw: Redraw
) -> GuideWork:
    """Ask each row's grammar about its token, and draw another where it is refused.

    The grammar advances over the token, so that this is called once for each token of an answer.

    Parameters
    ----------
    guided : indices of the rows that have a grammar.
    token_ids : what was drawn for each row; changed where it is refused.
    """
    start = perf_counter()
    work = GuideWork(len(guided))
    for index in guided:
        row = rows[index]
        if row.guide is None:
            work.faults[index] = row.fault or "this engine enforces no grammars"
            continue
        if row.guide.is_complete:
            continue  # of a step that was planned before its end was known: nobody gets the token
        try:
            if not takes(row, token_ids[index]):
                work.num_redrawn += 1
                allowed_A = allowed_ids(row)
                if len(allowed_A):
                    token_ids[index] = redraw(index, token_ids[index], allowed_A)
                has_one = len(allowed_A) > 0 and token_ids[index] != NO_TOKEN
                if not (has_one and takes(row, token_ids[index])):
                    work.faults[index] = DEAD_END
        except GrammarTooComplex as error:
            work.faults[index] = f"the grammar is too complex: {error}"
    work.seconds = perf_counter() - start
    return work


def takes(row: SamplingRow, token_id: int) -> bool:
    """Return whether a row's grammar allows a token, which has come then."""
    assert row.guide is not None, "the row has a grammar"
    if row.guide.accepts(token_id):
        return True
    return token_id in row.stops and row.guide.may_end and not row.holds_back_stops


def redrawn(logits_V: Tensor, row: SamplingRow, allowed_A: TokenIds) -> int:
    """Return a token of those that a row's grammar allows; none of these where none can be sampled."""
    values_A = logits_V.cpu().numpy()[allowed_A].astype(np.float64)
    peak = values_A.max()
    if not np.isfinite(peak):
        return NO_TOKEN
    if row.is_greedy:
        return int(allowed_A[values_A.argmax()])
    params, number = row.params, uniform(row.params.seed, row.position, draw=1)
    weights_A = np.exp((values_A - peak) / params.temperature)
    if not row.is_truncated:
        cumulative_A = np.cumsum(weights_A)
        return int(allowed_A[locate(cumulative_A, number * cumulative_A[-1])])
    mass = float(weights_A.sum())
    places = _kept(values_A, params, mass)
    return draw(allowed_A[places], values_A[places], params, mass=mass, number=number)


def allowed_ids(row: SamplingRow) -> TokenIds:
    """Return the tokens that a row's grammar allows, stop tokens where it may end included."""
    assert row.guide is not None, "the row has a grammar"
    if row.guide.may_end and not row.holds_back_stops:
        return row.guide.allowed(row.stop_token_ids[row.stop_token_ids < row.guide.vocab_size])
    return row.guide.allowed()


def _kept(values_A: Floats, params: SamplingParams, mass: float) -> TokenIds:
    """Return places that include all that min-p, top-k and top-p keep."""
    if params.min_p or params.top_k:
        return np.arange(len(values_A))
    return nucleus_candidates(values_A, params, mass)
