"""What the scheduler remembers of one request."""

from __future__ import annotations

from enum import Enum, auto

from onbeat.core.hashing import BlockHash
from onbeat.core.request import Request


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
        "max_total_tokens",
        "num_allocated_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "request",
        "request_id",
        "scheduled_time",
        "sort_key",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, *, sort_key: tuple[float, ...], max_model_len: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sort_key = sort_key
        self.status = RequestStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = self.num_prompt_tokens
        """Known tokens: prompt and delivered output (`len(token_ids)`, kept apart as it is read so often)."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache once every planned step has run."""
        self.num_in_flight_tokens = 0
        """Tokens that planned steps will sample but that are not known yet."""
        self.max_total_tokens = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.block_ids: list[int] = []
        self.num_allocated_tokens = 0
        """KV slots in `block_ids`."""
        self.block_hashes: list[BlockHash] = []
        """Hashes of the full blocks of `token_ids`, as far as they were needed."""
        self.num_registered_blocks = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
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
    def will_be_full(self) -> bool:
        """Whether the tokens in flight are the last ones that the request may have."""
        return self.num_tokens + self.num_in_flight_tokens >= self.max_total_tokens
