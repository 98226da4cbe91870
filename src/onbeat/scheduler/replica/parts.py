"""The small parts a policy is composed of: queue order, chunking, reservation."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.request import Request
from onbeat.scheduler.replica.request_state import RequestState


class QueueOrder(Protocol):
    """Which request is served first."""

    preempts: bool
    """Whether a waiting request may push a running one of strictly lower rank out of the batch."""

    def rank(self, request: Request) -> float:
        """Return the request's rank; a smaller one is served earlier, equal ones by arrival."""
        ...


class FirstComeFirstServed:
    """By arrival time alone."""

    preempts = False

    def rank(self, request: Request) -> float:  # noqa: ARG002 (all requests rank the same)
        return 0


class StrictPriority:
    """By `Request.priority`, lower first (vLLM's meaning), then by arrival. May starve low priorities."""

    preempts = True

    def rank(self, request: Request) -> float:
        return request.priority


class Chunking(Protocol):
    """How much of a prompt may run in one step."""

    def num_tokens(self, num_wanted_tokens: int, num_tokens_left: int) -> int:
        """Return how many tokens to run now; 0 leaves the request for a later step."""
        ...


class WholePrompts:
    """A prompt runs in one step or not at all."""

    def num_tokens(self, num_wanted_tokens: int, num_tokens_left: int) -> int:
        return num_wanted_tokens if num_wanted_tokens <= num_tokens_left else 0


class ChunkedPrompts:
    """A prompt runs in pieces that fill the step's token budget (Sarathi-Serve, section 4)."""

    def num_tokens(self, num_wanted_tokens: int, num_tokens_left: int) -> int:
        return min(num_wanted_tokens, num_tokens_left)


class Reservation(Protocol):
    """How much KV memory a request must find before it is admitted."""

    def num_tokens(self, state: RequestState) -> int:
        """Return the KV slots allocated at admission."""
        ...

    def num_spare_blocks(self, num_blocks: int) -> int:
        """Return the free blocks to leave for running requests to grow into."""
        ...


class ReserveMaximum:
    """Prompt plus `max_tokens`, for the whole life of the request (Orca, algorithm 1).

    Such a request never lacks a block; only a strictly higher rank can preempt it.
    """

    def num_tokens(self, state: RequestState) -> int:
        return state.max_total_tokens

    def num_spare_blocks(self, num_blocks: int) -> int:  # noqa: ARG002
        return 0


class ReservePrompt:
    """The tokens that are there, above a watermark of 1 % of the blocks (vLLM, SOSP 2023)."""

    def num_tokens(self, state: RequestState) -> int:
        return state.num_tokens

    def num_spare_blocks(self, num_blocks: int) -> int:
        return num_blocks // 100


QUEUE_ORDERS: dict[str, type[QueueOrder]] = {"fcfs": FirstComeFirstServed, "priority": StrictPriority}
DEFAULT_ORDER = "fcfs"
