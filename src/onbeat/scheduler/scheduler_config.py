"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal, get_args

from onbeat.core import slo
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits
from onbeat.core.kv_windows import KVWindows
from onbeat.core.options import check, option
from onbeat.core.slo_options import slo_mode_option

SERVING_POLICIES = ("static", "orca", "prefill-first", "sarathi", "slo")
BASELINES = ("hybrid-only", "chunk-only", "edf")
"""Policies that are there to compare with, not to serve with."""
DEFAULT_POLICY = "slo"
DEFAULT_BLOCK_SIZE = 16

_option = partial(option, group="scheduler")


DraftLength = Literal["adaptive", "fixed"]
DRAFT_LENGTHS: tuple[str, ...] = get_args(DraftLength)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How many draft tokens the scheduler plans; what proposes them is the model runner's matter."""

    num_speculative_tokens: int
    """Most drafts of a request in one step, at least 1."""
    draft_length: DraftLength = "adaptive"
    """`adaptive`: as many as give the most tokens per second, down to none. `fixed`: always the most."""
    runs_model: bool = False
    """Whether a model makes the drafts, one forward pass for each position."""
    max_catch_up_tokens: int = 0
    """Most tokens of a step that the model which makes the drafts reads because it has not seen them, over
    all rows that are more than a block behind; 0 where it has nothing to read."""
    num_lookahead_tokens: int = 0
    """KV slots that each request needs behind its tokens: drafts are made at the end of a step, before it is
    known how many the next one verifies."""
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
class SchedulerLimits:
    """What a person may say of a replica's scheduler, live or simulated. None: decided at start."""

    policy: str | None = _option(
        None,
        choices=(*SERVING_POLICIES, *BASELINES),
        help="how steps are composed (default: slo, by deadlines and predicted step times); baselines, to "
        f"compare with: {', '.join(BASELINES)}",
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option(
        "fcfs", help="order of requests; fcfs: by arrival; priority: lower `priority` first"
    )
    max_num_seqs: int = _option(256, metavar="N", at_least=1, help="most requests at once")
    max_num_batched_tokens: int | Literal["auto"] | None = _option(
        None,
        metavar="N",
        at_least=1,
        help="token budget of a step; under slo: a cap only, since its budget is time; by default at most "
        "8192; default of other policies with chunked prefill: 512; default of the rest: the longest "
        "request; auto (simulations only): the largest budget whose step keeps --slo-tbt-ms",
    )
    max_model_len: int | None = _option(
        None,
        metavar="TOKENS",
        at_least=1,
        help="longest request, prompt and output (default: the model's, or what the KV cache holds)",
    )
    block_size: int | None = _option(
        None,
        metavar="TOKENS",
        at_least=16,
        help=f"tokens in a KV block, a multiple of 16 (default: {DEFAULT_BLOCK_SIZE}; 64 on the GPU engine)",
    )
    enable_prefix_caching: bool = _option(default=True, help="reuse the KV of shared prompt prefixes")
    max_num_queued_reqs: int | None = _option(
        None,
        metavar="N",
        at_least=1,
        help="most requests that wait at a replica; each choice of a request counts; more are refused with "
        "503 (default: no limit)",
    )
    max_num_queued_tokens: int | None = _option(
        None,
        metavar="N",
        at_least=1,
        help="most prompt tokens that wait at a replica; more are refused with 503 (default: no limit)",
    )
    max_queue_seconds: float | None = _option(
        None,
        metavar="SECONDS",
        parse=lambda text: 0.0 if text == "none" else float(text),
        at_least=0,
        below=inf,
        help="longest predicted wait of best effort; beyond it a request gets 503 with Retry-After; 0 or "
        f"none: no limit (default: {slo.DEFAULT_QUEUE_SECONDS:g} under slo, which alone predicts it)",
    )
    slo_mode: slo.SLOMode = slo_mode_option()
    shed_order: slo.ShedOrder = option(
        slo.DEFAULT_SHED_ORDER,
        group=slo.OBJECTIVES,
        help="which prompts slo leaves behind if not all can be in time; most: those with the most work, so "
        "that most requests are in time; longest-wait: those that came last, so that long prompts keep "
        "their turn",
    )

    def __post_init__(self) -> None:
        check(self, SchedulerLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerLimits):
    """Limits of one replica's scheduler with nothing left open (`token_budget.settle`)."""

    policy: str
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int
    """KV blocks in the cache."""
    num_micro_batches: int = 1
    """Steps in flight of a pipeline, one for each stage; a request is in one of them at a time, and each
    holds at most its share of `max_num_seqs` (Sarathi-Serve, OSDI 2024, section 4.2)."""
    speculation: SpeculationConfig | None = None
    """None plans no drafts."""
    num_snapshots: int | None = None
    """States of requests that can be kept for prefix hits, of a model that keeps states; None of any other,
    which needs none."""
    num_tables: int = 1
    """Block tables of a request: the first, and one of each group of layers whose windows give KV back."""
    window_length: int = 0
    """Tokens that layers with a window read, the newest included, where they have tables of their own."""
    window_tokens: int | None = None
    """Output tokens that a request may have which nobody has fetched; with so many it sits out. None where
    nobody says what is fetched."""

    def __post_init__(self) -> None:
        SchedulerLimits.__post_init__(self)  # super() finds no class in one with slots
        if self.block_size % 16:
            raise ConfigError(
                f"block_size is {self.block_size}; it must be a multiple of 16 (16, 32, 64, ...)"
            )
        if self.max_queue_seconds == 0:
            raise ConfigError("max_queue_seconds is 0; it must be above 0, or None for no limit")
        for name in ("num_blocks", "num_micro_batches", "num_tables"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
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
        room = self.longest_request
        if self.max_model_len > room:
            needed = -(-(self.max_model_len + self.num_lookahead_tokens) // self.block_size)
            needed = -(-self.windows.num_blocks(needed) // self.num_tables)
            raise ConfigError(
                f"max_model_len is {self.max_model_len} tokens but the KV cache holds {room} "
                f"({self.num_blocks} blocks of {self.block_size}); lower max_model_len, or make it {needed} "
                "blocks (--num-blocks of a simulation; a server takes --kv-cache-memory-bytes)"
            )

    @property
    def num_pages(self) -> int:
        """KV blocks of single tables: of these, `num_blocks` for each."""
        return self.num_blocks * self.num_tables

    @property
    def windows(self) -> KVWindows:
        """What a request holds beside its first table: of a window, and a step's tokens."""
        num_tokens = self.window_length + self.max_num_batched_tokens + self.num_lookahead_tokens
        return KVWindows.of(self.num_tables, num_tokens, self.block_size)

    def replica_limits(self, *, device: str, moves_streams: bool = False) -> ReplicaLimits:
        """Return what a router must know of a replica with such a scheduler; see `ReplicaLimits`."""
        return ReplicaLimits(
            device=device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_pages,
            block_size=self.block_size,
            windows=self.windows,
            moves_streams=moves_streams,
        )

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that the KV cache holds."""
        return self.windows.num_token_blocks(self.num_pages) * self.block_size - self.num_lookahead_tokens

    def num_requests(self, num_tokens: int) -> int:
        """Return how many requests of so many tokens the KV cache holds at a time."""
        held = self.windows.num_blocks(-(-num_tokens // self.block_size))
        return max(self.num_blocks * self.block_size // num_tokens, self.num_pages // held)

    @property
    def num_states(self) -> int:
        """Slots of states, of a model that keeps states: the requests', then those that are kept."""
        return self.max_num_seqs + (self.num_snapshots or 0)

    @property
    def most_drafts(self) -> int:
        """Drafts that a request may have in a step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots that each request has behind its tokens, for drafts."""
        return 0 if self.speculation is None else self.speculation.num_lookahead_tokens


_SNAPSHOTS_PER_REQUEST = 4
"""Most states that are kept for prefix hits, over the requests that may run."""


def with_states(limits: SchedulerLimits, most: int) -> tuple[SchedulerLimits, int]:
    """Return limits of a model that keeps a state of each request, and how many are kept for prefix hits.

    Parameters
    ----------
    most : states that there may be; a part of them is for prefixes, more if there are few requests.
    """
    is_cached = limits.enable_prefix_caching
    num_slots = min(limits.max_num_seqs, most - most // 4 if is_cached else most)
    num_kept = min(most - num_slots, _SNAPSHOTS_PER_REQUEST * num_slots) if is_cached else 0
    return replace(limits, max_num_seqs=num_slots, enable_prefix_caching=num_kept > 0), num_kept
