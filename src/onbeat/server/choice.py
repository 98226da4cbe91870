"""One choice of an answer, and what each delivery adds to it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from onbeat.core.request import FinishReason, Request, TokenLogprobs


@dataclass(slots=True)
class ChoiceDelta:
    """What one delivery adds to a choice: never nothing."""

    choice: Choice
    text: str
    tokens: list[ShownToken]
    token_ids: list[int]
    """The new output tokens, a stop token included."""
    finish_reason: str | None
    """`stop` or `length` on the last delta."""


@dataclass(slots=True)
class ShownToken:
    """A token of the answer. The stop token that ended it is not one."""

    token_id: int
    text_offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice of an answer while it is generated."""

    index: int
    prompt_index: int
    request: Request
    is_streamed: bool
    """Whether the caller sees each delivery."""
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    """When the engine delivered tokens, seconds of the monotonic clock."""
    delivery_sizes: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of each delivery."""
    predicted_ttft: float | None = None
    """What the engine predicted at the arrival, seconds."""
    is_relegated: bool = False
    """Whether the engine has given its objectives up."""
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    """Draft tokens that the engine verified for it."""
    num_accepted_tokens: int = 0
    """Of the output tokens, those that were drafts: not those behind the end of the answer."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the caller's stop token, that ended it."""
    token_ids: list[int] = field(default_factory=list)
    """All output tokens."""

    @property
    def first_delivery(self) -> float | None:
        """When the first tokens came, seconds of the monotonic clock."""
        return self.delivery_times[0] if self.delivery_times else None
