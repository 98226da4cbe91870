"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.slo import DEFAULT_SHED_ORDER, SHED_ORDERS, SLO_MODES, ShedOrder, SLOMode

DraftLength = Literal["adaptive", "fixed"]
DRAFT_LENGTHS: tuple[str, ...] = get_args(DraftLength)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How many draft tokens the scheduler plans; what proposes them is the model runner's matter."""

    num_speculative_tokens: int
    """Most drafts of a request in one step, at least 1."""
    draft_length: DraftLength = "adaptive"
    """`adaptive`: as many as promise the most tokens per second, down to none. `fixed`: always the most."""
    runs_model: bool = False
    """Whether a model makes the drafts, one forward pass for each position."""
    max_catch_up_tokens: int = 0
    """Most tokens of a step that the model which makes the drafts reads because it has not seen them, over
    all rows that are more than a block behind; 0 where it has nothing to read."""
    initial_acceptance: float = 0.7
    """Share of drafts taken to be accepted, of those whose predecessors are, before anything is known;
    in (0, 1)."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 1"
            )
        if self.draft_length not in DRAFT_LENGTHS:
            raise ConfigError(
                f"unknown draft_length {self.draft_length!r}; choose one of {', '.join(DRAFT_LENGTHS)}"
            )
        if not 0.0 < self.initial_acceptance < 1.0:
            raise ConfigError(f"initial_acceptance is {self.initial_acceptance}; it must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one replica's scheduler."""

    num_blocks: int
    """KV blocks in the cache."""
    block_size: int = 16
    """Tokens a KV block holds; a multiple of 16."""
    max_model_len: int = 2048
    """Most tokens (prompt and output) of one request."""
    max_num_seqs: int = 64
    """Most requests running at once."""
    max_num_batched_tokens: int = 512
    """Token budget of one step (chunks and decodes)."""
    policy: str = "sarathi"
    scheduling_policy: str = "fcfs"
    """Order of requests: `fcfs` or `priority`."""
    enable_prefix_caching: bool = True
    num_micro_batches: int = 1
    """Steps in flight of a pipeline, one for each stage; a request is in one of them at a time, and each
    holds at most its share of `max_num_seqs` (Sarathi-Serve, OSDI 2024, section 4.2)."""
    slo_mode: SLOMode = "stream"
    """What keeping a TBT objective means to policies that plan with deadlines (`core.slo.SLO_MODES`)."""
    shed_order: ShedOrder = DEFAULT_SHED_ORDER
    """Which prompts the policy `slo` leaves behind where not all can be in time (`core.slo.SHED_ORDERS`)."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait; one more is refused whatever its objectives. None sets no limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait, likewise."""
    max_queue_seconds: float | None = None
    """Longest wait, as predicted, for which another request is taken that cannot be in time or has no
    objective, seconds; policy `slo` alone predicts it. None sets no limit."""
    speculation: SpeculationConfig | None = None
    """None plans no drafts."""

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(
                f"block_size is {self.block_size}; it must be a multiple of 16 (16, 32, 64, ...)"
            )
        for name in (
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_micro_batches",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.max_queue_seconds is not None and not 0 < self.max_queue_seconds < inf:
            raise ConfigError(
                f"max_queue_seconds is {self.max_queue_seconds}; it must be a number of seconds above 0"
            )
        if self.slo_mode not in SLO_MODES:
            raise ConfigError(f"unknown slo_mode {self.slo_mode!r}; known are {', '.join(SLO_MODES)}")
        if self.shed_order not in SHED_ORDERS:
            raise ConfigError(f"unknown shed_order {self.shed_order!r}; known are {', '.join(SHED_ORDERS)}")
        if self.speculation is not None and self.speculation.num_speculative_tokens > self.block_size:
            raise ConfigError(
                f"num_speculative_tokens is {self.speculation.num_speculative_tokens}; it must not be above "
                f"block_size ({self.block_size})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); every running request needs one token a step: raise the first or "
                "lower the second"
            )
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ConfigError(
                f"max_model_len is {self.max_model_len} tokens but the KV cache holds "
                f"{self.num_blocks * self.block_size} ({self.num_blocks} blocks of {self.block_size}); lower "
                "max_model_len or give the cache more memory (kv_cache_memory_bytes)"
            )
