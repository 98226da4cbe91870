"""What the scheduler remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import inf

from onbeat.core.hashing import BlockHash
from onbeat.core.request import Request
from onbeat.scheduler.replica.speculation.draft_state import DraftState

NEVER = 1 << 62
"""More tokens than any request has."""


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    """Not in the batch: new, or preempted."""
    RUNNING = auto()
    PADDING = auto()
    """Finished, but its row and blocks are held until its batch ends (static batching)."""
    FINISHED = auto()


class RequestState:
    """Progress of one request.

    There is no prefill or decode phase: a request has `num_tokens` and `num_computed_tokens`, and each step
    lets the second catch up with the first.
    """

    __slots__ = (
        "admitted_step_id",
        "block_hashes",
        "block_ids",
        "draft",
        "is_best_effort",
        "is_in_flight",
        "last_delivery",
        "last_preemption",
        "max_total_tokens",
        "next_deadline",
        "num_allocated_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_hit_tokens",
        "num_in_flight_drafts",
        "num_in_flight_tokens",
        "num_late_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "num_tokens_to_register",
        "output_token_ids",
        "predicted_ttft",
        "request",
        "request_id",
        "scheduled_time",
        "sort_key",
        "status",
        "stop_token_ids",
        "tbt",
        "ttft_deadline",
    )

    def __init__(self, request: Request, *, sort_key: tuple[float, ...], max_model_len: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sort_key = sort_key
        self.status = RequestStatus.WAITING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_tokens = self.num_prompt_tokens
        """Known tokens: prompt and delivered output."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache once every planned step has run."""
        self.num_external_tokens = request.num_external_tokens
        """Of its tokens, those whose KV is still to come from elsewhere."""
        self.num_in_flight_tokens = 0
        """Tokens that planned steps will sample but that are not known yet; with drafts, the most of them."""
        self.num_in_flight_drafts = 0
        """Of these, drafts, which may be rejected. `num_computed_tokens` counts them as accepted."""
        self.draft = DraftState()
        self.max_total_tokens = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.block_ids: list[int] = []
        self.num_allocated_tokens = 0
        """KV slots in `block_ids`."""
        self.block_hashes: list[BlockHash] = list(request.block_hashes or ())
        """Hashes of its full blocks: given with the request, or made of its tokens as they are needed."""
        self.num_registered_blocks = 0
        self.num_tokens_to_register = 0
        """Valid tokens from which on there is another full block to register."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.is_in_flight = False
        """Whether a micro-batch that has not come back (kept with pipeline stages only), or a transfer of its
        KV, holds it."""
        self.ttft_deadline = inf
        """When its first token is due; infinite where nothing is promised."""
        self.tbt = inf
        """Seconds from the deadline of a token to that of the next."""
        self.next_deadline = inf
        """When its next token is due; infinite where nothing is promised, or the promise is broken."""
        self.num_late_tokens = 0
        """Delivered after their deadlines (in `gap` mode: after a gap above `tbt`)."""
        self.is_best_effort = False
        """Whether its promise is broken, or could not be made: it is served from what is left over."""
        self.num_hit_tokens = 0
        """While it waits: prompt tokens that the prefix cache held when last looked."""
        self.predicted_ttft: float | None = None
        """Predicted at its arrival, seconds."""
        self.last_delivery = -inf
        self.last_preemption = -inf
        """When it was last preempted; kept by policies with deadlines."""
        self.admitted_step_id = -1
        self.scheduled_time = -1.0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens, known or in flight, that are not computed yet."""
        return self.num_tokens + self.num_in_flight_tokens - self.num_computed_tokens

    @property
    def num_certain_tokens(self) -> int:
        """Tokens in flight that will be delivered whatever becomes of drafts."""
        return self.num_in_flight_tokens - self.num_in_flight_drafts

    @property
    def will_be_full(self) -> bool:
        """Whether the tokens in flight are the last ones that the request may have."""
        return self.num_tokens + self.num_in_flight_tokens >= self.max_total_tokens

    def token_slice(self, start: int, stop: int) -> Sequence[int]:
        """Return the known tokens of these positions."""
        prompt, num_prompt = self.request.prompt_token_ids, self.num_prompt_tokens
        if stop <= num_prompt:
            return prompt[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*prompt[start:], *self.output_token_ids[: stop - num_prompt]]
