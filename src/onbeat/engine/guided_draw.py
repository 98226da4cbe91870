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

Legend: R rows, V vocabulary, G rows that are refused, W words of 32 tokens, A tokens that a grammar allows.

The model runner begins a row's guide, lets it cut drafts, and tells the scheduler what became of guided rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import EngineError, InvalidRequest, RequestRejected
from onbeat.core.request import Grammar, SamplingParams
from onbeat.core.step import GuidedRows
from onbeat.engine.draw import Floats, Logits, draw, locate, nucleus_candidates, weigh
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampling_row import SamplingRow, TokenIds
from onbeat.text.grammar.guide import GrammarTooComplex, Guide, ids_in

NO_TOKEN = -1


@dataclass(slots=True)
class GuideOutcome:
    """What grammars did for the rows of a step."""

    num_tokens: int = 0
    """That were asked about."""
    num_redrawn: int = 0
    """Of these, refused, and drawn again."""
    seconds: float = 0.0
    """That it took on the host."""
    faults: dict[int, str] = field(default_factory=dict)
    """Row index to why its grammar cannot be followed; the request is at fault, and its KV is sound."""
    failures: dict[int, str] = field(default_factory=dict)
    """Row index to why its grammar was not followed, where the engine is at fault."""
    row_seconds: dict[int, float] = field(default_factory=dict)
    """Row index to the processor time of its grammar."""

    @property
    def errors(self) -> dict[int, str]:
        """Both."""
        return self.faults | self.failures

    def add(self, part: GuideOutcome, indices: Sequence[int]) -> None:
        """Count what was done for some of the rows, whose indices these are; failures are the caller's."""
        self.num_tokens += part.num_tokens
        self.num_redrawn += part.num_redrawn
        self.seconds += part.seconds
        self.faults |= {indices[place]: message for place, message in part.faults.items()}
        for place, seconds in part.row_seconds.items():
            self.charge(indices[place], seconds)

    def charge(self, index: int, seconds: float) -> None:
        """Count processor time of a row."""
        self.row_seconds[index] = self.row_seconds.get(index, 0.0) + seconds

    def note(self, index: int, error: Exception) -> None:
        """Note why a row has no token."""
        if isinstance(error, GrammarTooComplex):
            self.faults[index] = f"the grammar is too complex: {error}"
        elif isinstance(error, RequestRejected):
            self.faults[index] = str(error)
        else:
            self.failures[index] = f"its grammar could not be followed: {type(error).__name__}: {error}"


Redraw = Callable[[Sequence[int], Sequence[TokenIds]], list[int]]
"""Given rows' indices and the tokens that their grammars allow, some of each, returns one of these for each
row; `NO_TOKEN` where none can be sampled."""


def hold_to_grammars(
    rows: Sequence[SamplingRow], guided: Sequence[int], token_ids: list[int], redraw: Redraw
) -> GuideOutcome:
    """Ask each row's grammar about its token, and draw another where it is refused.

    The grammar advances over the token, so that this is called once for each token of an answer. What goes
    wrong for one row is noted, and the others go on.

    Parameters
    ----------
    guided : indices of the rows that have a grammar.
    token_ids : what was drawn for each row; changed where it is refused.
    """
    start = perf_counter()
    outcome = GuideOutcome(len(guided))
    refused = [index for index in guided if not _takes(rows[index], index, token_ids[index], outcome)]
    if refused:
        outcome.num_redrawn = len(refused)
        _draw_again(rows, refused, token_ids, redraw, outcome)
    outcome.seconds = perf_counter() - start
    return outcome


def _draw_again(
    rows: Sequence[SamplingRow],
    refused: Sequence[int],
    token_ids: list[int],
    redraw: Redraw,
    outcome: GuideOutcome,
) -> None:
    pairs = list(zip(refused, map(ids_in, allowed_masks(rows, refused, outcome)), strict=True))
    able = [(index, allowed_A) for index, allowed_A in pairs if len(allowed_A)]
    indices = [index for index, _ in able]
    for index, token_id in zip(indices, redraw(indices, [ids for _, ids in able]), strict=True):
        token_ids[index] = token_id
    for index, allowed_A in pairs:
        if index in outcome.faults or index in outcome.failures:
            continue
        has_one = len(allowed_A) > 0 and token_ids[index] != NO_TOKEN
        if not (has_one and _takes(rows[index], index, token_ids[index], outcome, is_allowed=True)):
            outcome.faults[index] = rows[index].dead_end


def _takes(
    row: SamplingRow, index: int, token_id: int, outcome: GuideOutcome, *, is_allowed: bool = False
) -> bool:
    """Return whether a row's grammar allows its token, which has come then; True where it needs none."""
    start = thread_time()
    try:
        guide = _guide_of(row)
        if guide.is_complete:
            return True  # of a step that was planned before its end was known: nobody gets the token
        if is_allowed and token_id not in row.stops:
            guide.take(token_id)
            return True
        return guide.accepts(token_id) or (
            token_id in row.stops
            and guide.may_end
            and len(row.output_token_ids) >= row.params.min_tokens  # others may be under way behind it
        )
    except Exception as error:  # what a library does to one row is not to end the step of all
        outcome.note(index, error)
        return True
    finally:
        outcome.charge(index, thread_time() - start)


def _guide_of(row: SamplingRow) -> Guide:
    if row.guide is None:
        raise row.problem or InvalidRequest("this engine enforces no grammars")
    return row.guide


def open_guides(rows: Sequence[SamplingRow]) -> list[int]:
    """Return the indices of the rows whose grammars say what may come next."""
    guides = ((index, row.guide) for index, row in enumerate(rows) if row.is_guided)
    return [index for index, guide in guides if guide is not None and not guide.is_complete]


def allowed_masks(
    rows: Sequence[SamplingRow], refused: Sequence[int], outcome: GuideOutcome
) -> NDArray[np.uint32]:
    """Return masks [G, W] of what each row's grammar allows, stop tokens where it may end included.

    Parameters
    ----------
    refused : indices of the rows.
    outcome : told of rows whose grammar fails; they get no token.
    """
    tokens = _guide_of(rows[refused[0]]).tokens
    words_GW = np.zeros((len(refused), tokens.num_words), np.uint32)
    address, num_bytes = words_GW.ctypes.data, words_GW.strides[0]
    ends: list[tuple[int, int]] = []

    def fill(line: int, index: int) -> None:
        row, start = rows[index], thread_time()
        try:
            guide = _guide_of(row)
            guide.fill_mask(address + line * num_bytes, num_bytes)
            if guide.may_end and not row.holds_back_stops:
                ends.extend((line, token_id) for token_id in row.stops if token_id < tokens.vocab_size)
        except Exception as error:  # as above
            outcome.note(index, error)
            words_GW[line] = 0
        outcome.charge(index, thread_time() - start)

    lines = sorted(enumerate(refused), key=lambda each: id(getattr(rows[each[1]].guide, "lane", None)))
    tokens.for_each(fill, lines)
    tokens.clear_ends(words_GW)
    for line, token_id in ends:
        words_GW[line, token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words_GW


def redrawn(
    lines: Mapping[int, Logits],
    rows: Sequence[SamplingRow],
    refused: Sequence[int],
    allowed: Sequence[TokenIds],
) -> list[int]:
    """Return for each row that was refused a token of those that its grammar allows; see `Redraw`.

    Parameters
    ----------
    lines : the logits of each row, [vocabulary].
    """
    return [
        _redrawn(lines[index][allowed_A].astype(np.float64), rows[index], allowed_A)
        for index, allowed_A in zip(refused, allowed, strict=True)
    ]


def _redrawn(values_A: Floats, row: SamplingRow, allowed_A: TokenIds) -> int:
    best = int(values_A.argmax())
    peak = float(values_A[best])
    if not math.isfinite(peak):
        return NO_TOKEN
    if row.is_greedy:
        return int(allowed_A[best])
    params, number = row.params, uniform(row.params.seed, row.position, draw=1)
    weights_A = np.empty_like(values_A)
    weigh(values_A, peak, params.temperature, weights_A)
    if not row.is_truncated:
        cumulative_A = weights_A.cumsum()
        return int(allowed_A[locate(cumulative_A, number * cumulative_A[-1])])
    mass = float(weights_A.sum())
    places = _kept(values_A, params, mass)
    return draw(allowed_A[places], values_A[places], params, mass=mass, number=number)


def _kept(values_A: Floats, params: SamplingParams, mass: float) -> TokenIds:
    """Return places that include all that min-p, top-k and top-p keep."""
    if params.min_p or params.top_k:
        return np.arange(len(values_A))
    return nucleus_candidates(values_A, params, mass)


_MOST_FORCED = 64
"""Tokens that are told to be forced; a step verifies fewer."""


class Guides(Protocol):
    """Where guides come from."""

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide at the start of a grammar.

        Raises
        ------
        RequestRejected : the grammar cannot be enforced.
        """


def begin_guide(row: SamplingRow, guides: Guides | None) -> None:
    """Give a row its guide, which stands behind the tokens that the row has: it may come from elsewhere."""
    grammar = row.params.grammar
    if grammar is None or guides is None:
        return
    try:
        guide = guides.guide(grammar)
        num_taken = guide.consume(row.output_token_ids)
    except Exception as error:  # told when it samples: the requests beside it are not to fail with it
        row.problem = error
        return
    if num_taken < len(row.output_token_ids):
        row.problem = EngineError(f"token {num_taken} of the answer so far is not what its grammar allows")
        return
    row.guide = guide


def guided_drafts(row: SamplingRow, drafts: list[int], most: int) -> list[int]:
    """Return drafts that a row's grammar allows: text that must come, else those proposed.

    They never end the grammar: a token is drawn behind the last draft.
    """
    guide = row.guide
    if guide is None or guide.is_complete:
        return drafts
    try:
        drafts = guide.forced(most) or drafts
        return drafts[: guide.num_drafts(drafts)]
    except GrammarTooComplex:
        return []  # which is found again when a token is drawn


def with_forced(rows: Sequence[SamplingRow], num_available: list[int]) -> list[int]:
    """Return how many drafts each row has, those of text that must come included."""
    return [
        max(num, len(guided_drafts(row, [], _MOST_FORCED))) if row.is_guided else num
        for row, num in zip(rows, num_available, strict=True)
    ]


def guided_rows(rows: Sequence[SamplingRow], request_ids: Sequence[str], outcome: GuideOutcome) -> GuidedRows:
    """Return what the scheduler is told of the grammars of a step's rows."""
    completed = [
        request_id
        for row, request_id in zip(rows, request_ids, strict=True)
        if row.guide is not None and row.guide.is_complete
    ]
    # Threads that worked at once took less than the sum; one that had to wait for a core took no more.
    share = min(1.0, outcome.seconds / max(sum(outcome.row_seconds.values()), 1e-9))
    return GuidedRows(
        frozenset(completed),
        {request_ids[index]: message for index, message in outcome.faults.items()},
        outcome.num_tokens,
        outcome.num_redrawn,
        outcome.seconds,
        {request_ids[index]: share * seconds for index, seconds in outcome.row_seconds.items()},
    )
