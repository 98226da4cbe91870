"""One step (one forward pass): what the scheduler asks for and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from onbeat.core.request import Request, TokenLogprobs


@dataclass(slots=True)
class BatchShape:
    """What a step costs, as plain sums that are kept in O(1) per change.

    A row is one request's share of the step; a *decode* row has one new token, a *chunk* has more.
    """

    num_new_tokens: int = 0
    num_sequences: int = 0
    num_decodes: int = 0
    num_chunks: int = 0
    query_key_pairs: int = 0
    """Sum over chunks of new tokens x mean context they attend to (attention FLOPs)."""
    chunk_cached_tokens: int = 0
    """Context already cached that chunks read again."""
    decode_context_tokens: int = 0
    """Context that decodes read, their own token included."""
    sum_chunk_squares: int = 0
    """Sum of squared chunk lengths."""
    num_lm_head_rows: int = 0
    """Tokens whose logits are computed."""
    num_verify_rows: int = 0
    """Decode rows that verify draft tokens; `num_decodes` counts them too."""
    num_draft_tokens: int = 0
    """Draft tokens verified, the rows' own tokens left out; `num_new_tokens` counts them too."""
    num_draft_passes: int = 0
    """Forward passes, one after another, in which a proposer's model made the drafts; 0 where none runs."""
    num_catch_up_tokens: int = 0
    """Tokens that a proposer's model reads before it can draft, since it was never told of them: prompts, and
    what came while nothing was drafted. They are no part of `num_new_tokens`."""
    catch_up_pairs: int = 0
    """Sum over them of the context that they attend to, themselves included."""
    num_guided_rows: int = 0
    """Rows that sample under a grammar, about whose tokens the host asks."""

    @classmethod
    def of_decodes(cls, num: int, context_tokens: int, num_guided: int = 0) -> BatchShape:
        """Return a step of decodes alone.

        Parameters
        ----------
        context_tokens : that they read together, their own tokens included.
        num_guided : of them, those under a grammar.
        """
        return cls(num, num, num, 0, 0, 0, context_tokens, 0, num, num_guided_rows=num_guided)

    @property
    def num_chunk_tokens(self) -> int:
        """New tokens of prompts, and of requests that compute again what a preemption took."""
        return self.num_new_tokens - self.num_decodes - self.num_draft_tokens

    def copy(self) -> BatchShape:
        """Return one to try things with: planning does so many times a step, and `replace` is slow."""
        return BatchShape(*_sums_of(self))

    def add_verify(self, num_computed_tokens: int, num_drafts: int) -> None:
        """Count a decode row with drafts: its context is read once, and each of its tokens has logits."""
        self.num_new_tokens += 1 + num_drafts
        self.num_sequences += 1
        self.num_decodes += 1
        self.decode_context_tokens += num_computed_tokens + 1 + num_drafts
        self.num_lm_head_rows += 1 + num_drafts
        self.num_draft_tokens += num_drafts
        self.num_verify_rows += num_drafts > 0

    def add_catch_up(self, num_read_tokens: int, num_tokens: int) -> None:
        """Count what a proposer's model reads of a request, some of which it has read before."""
        self.num_catch_up_tokens += num_tokens
        self.catch_up_pairs += num_tokens * num_read_tokens + num_tokens * (num_tokens + 1) // 2

    def add(self, num_computed_tokens: int, num_new_tokens: int, *, samples: int) -> None:
        """Count one more row.

        Parameters
        ----------
        samples : tokens of it whose logits are computed: the last one of a row that samples, and every one
            where the log-probabilities of a prompt are reported.
        """
        self.num_new_tokens += num_new_tokens
        self.num_sequences += 1
        self.num_lm_head_rows += samples
        if num_new_tokens == 1:
            self.num_decodes += 1
            self.decode_context_tokens += num_computed_tokens + 1
        else:
            self.num_chunks += 1
            self.query_key_pairs += (
                num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) // 2
            )
            self.chunk_cached_tokens += num_computed_tokens
            self.sum_chunk_squares += num_new_tokens * num_new_tokens


_sums_of = attrgetter(*(item.name for item in fields(BatchShape)))


new_tuple = tuple.__new__
"""Makes a named tuple without the call of its own constructor: `new_tuple(ScheduledRequest, (...))`."""


class ScheduledRequest(NamedTuple):
    """One row of a step (a named tuple because a step makes hundreds of them)."""

    request_id: str
    num_computed_tokens: int
    """Tokens whose KV is in the cache before this step; also the position of the first new token."""
    num_new_tokens: int
    new_block_ids: tuple[int, ...]
    """Blocks appended to the request's block table since its last row."""
    samples: bool
    """Whether the last new token's logits are sampled; with drafts, those of the row's other tokens too."""
    num_draft_tokens: int = 0
    """Of the new tokens, the last ones: drafts to propose and verify in this step. The model runner may have
    fewer to propose. Where a step before is in flight whose drafts are not verified yet, the row's
    `num_computed_tokens` is what it is if all of them are accepted, and the runner knows better."""


class KeptState(NamedTuple):
    """A state of a request that a step is to keep for others."""

    row: int
    """Place of the request's row in the step."""
    num_tokens: int
    """After so many of the row's tokens."""
    snapshot: int


class NewPages(NamedTuple):
    """Blocks of layers with a window that a request has been given.

    Parameters
    ----------
    num_passed : its blocks of tokens that no window reaches any more.
    first_block : the first of its blocks of tokens that these are for.
    block_ids : one of each further table for the first block of tokens, then for the next, and so on.
    """

    request_id: str
    num_passed: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that runs for the first time, or again after a preemption: all the model runner must know."""

    request: Request
    output_token_ids: tuple[int, ...]
    """Tokens generated before a preemption; empty the first time."""
    block_ids: tuple[int, ...]
    """Its block table, prefix-cache hits first."""
    snapshot: int | None = None
    """The kept state from which it goes on, of a model that keeps states; None: from none."""


class SchedulerOutput(NamedTuple):
    """One planned step. Rows that sample come back in `ModelRunnerOutput` in the order of `rows`."""

    step_id: int
    rows: tuple[ScheduledRequest, ...]
    admitted: tuple[AdmittedRequest, ...]
    released_ids: tuple[str, ...]
    """Requests that finished, were aborted or preempted since the last step: drop their state first."""
    shape: BatchShape
    budget: float | None = None
    """Time that the policy allowed the step, seconds; None where it plans by tokens, or nothing bound it."""
    budget_request_id: str | None = None
    """The request whose deadline set the budget."""
    preempted_ids: tuple[str, ...] = ()
    """Of `released_ids`, those that were preempted, and may come again."""
    forgotten_ids: tuple[str, ...] = ()
    """Requests that were preempted, in this step or before, and will not come again."""
    kept_states: tuple[KeptState, ...] = ()
    """Of a model that keeps states."""
    new_pages: tuple[NewPages, ...] = ()  # of a model whose windows give KV back, in their order


class GuidedRows(NamedTuple):
    """What grammars did in a step."""

    completed: frozenset[str] = frozenset()
    """Requests whose grammar allows nothing more: they end with their newest token."""
    faults: Mapping[str, str] = MappingProxyType({})
    """Request id -> why its grammar cannot be followed any further. Its KV is sound."""
    num_tokens: int = 0
    """That grammars were asked about."""
    num_redrawn: int = 0
    """Of these, refused, and drawn again."""
    seconds: float = 0.0
    """That it took on the host."""
    row_seconds: Mapping[str, float] = MappingProxyType({})
    """Request id -> what its row took of that."""


NOTHING_GUIDED = GuidedRows()


class ModelRunnerOutput(NamedTuple):
    """Tokens of one step.

    Parameters
    ----------
    sampled_token_ids : one list per row with `samples`, in row order.
    logprobs : the same length, or None when no row asked for any; an entry is None where its row did not ask.
    failed : request id -> what went wrong, for rows whose result is unusable (their tokens are empty).
    num_drafted : drafts that were verified for each row with `samples`: those that were asked for, or fewer.
        A row has as many tokens as drafts were accepted, and one more. None where none were asked for.
    num_available : drafts that the proposer has ready for the next step of each row with `samples`; None
        where it makes as many as one asks for, or where nothing is proposed.
    embeddings : request id -> embedding, for the rows that complete the prompt of a request with `pooling`.
        Such rows do not sample.
    prompt_logprobs : request id -> log-probabilities of its prompt, for rows that end one and asked for them.
    guided : what grammars did; None where no row has one.
    """

    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] | None = None
    failed: dict[str, str] | None = None
    num_drafted: list[int] | None = None
    num_available: list[int] | None = None
    embeddings: dict[str, bytes] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] | None = None
    guided: GuidedRows | None = None
