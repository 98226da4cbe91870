"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO_MODES, SLOMode


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
    max_num_queued_reqs: int | None = None
    """Most requests that wait; one more is refused whatever its objectives. None sets no limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait, likewise."""

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
        if self.slo_mode not in SLO_MODES:
            raise ConfigError(f"unknown slo_mode {self.slo_mode!r}; known are {', '.join(SLO_MODES)}")
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
