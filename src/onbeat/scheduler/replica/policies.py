"""Named policies: compositions of parts, and the limits that go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from onbeat.core.errors import ConfigError
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, DEFAULT_SHED_ORDER
from onbeat.scheduler.config import DEFAULT_POLICY, SchedulerConfig, SchedulerLimits, SpeculationConfig
from onbeat.scheduler.replica.baselines.fastserve import FastServeComposer
from onbeat.scheduler.replica.baselines.niyama import HybridPriority, NiyamaComposer
from onbeat.scheduler.replica.baselines.triaged import TriagedBudget
from onbeat.scheduler.replica.composers import BatchAtATime, Composer, DecodesFirst, PrefillsFirst
from onbeat.scheduler.replica.parts import (
    DEFAULT_ORDER,
    ChunkedPrompts,
    QueueOrder,
    Release,
    ReleaseAtOnce,
    ReleaseWithBatch,
    ReserveMaximum,
    ReservePrompt,
    WholePrompts,
)
from onbeat.scheduler.replica.slo.backlog import QueueBound
from onbeat.scheduler.replica.slo.composer import SLOComposer
from onbeat.scheduler.replica.slo.deadlines import EarliestDeadline


@dataclass(frozen=True, slots=True)
class Policy:
    """A composition."""

    composer: Composer
    release: Release
    whole_prompts: bool
    """Whether a step must be able to hold the longest prompt."""
    order: QueueOrder | None = None
    """Its own order of requests; None is the configured one."""
    needs_step_time: bool = False
    """Whether it plans with predicted step times."""
    is_bound_by_time: bool = False
    """Whether predicted time is a step's budget, and the tokens are only a cap."""
    keeps_deadlines: bool = False
    """Whether it follows the deadlines of each request's tokens."""
    slo: SLOComposer | None = None
    """Predicts the TTFT of arrivals and follows objectives; None in policies that do neither."""


def _static() -> Policy:
    return Policy(BatchAtATime(WholePrompts(), ReserveMaximum()), ReleaseWithBatch(), whole_prompts=True)


def _orca() -> Policy:
    return Policy(DecodesFirst(WholePrompts(), ReserveMaximum()), ReleaseAtOnce(), whole_prompts=True)


def _prefill_first() -> Policy:
    return Policy(PrefillsFirst(WholePrompts(), ReservePrompt()), ReleaseAtOnce(), whole_prompts=True)


def _sarathi() -> Policy:
    return Policy(DecodesFirst(ChunkedPrompts(), ReservePrompt()), ReleaseAtOnce(), whole_prompts=False)


def _hybrid_only() -> Policy:
    return Policy(DecodesFirst(WholePrompts(), ReservePrompt()), ReleaseAtOnce(), whole_prompts=True)


def _chunk_only() -> Policy:
    composer = PrefillsFirst(ChunkedPrompts(), ReservePrompt(), max_prefill_steps=1)
    return Policy(composer, ReleaseAtOnce(), whole_prompts=False)


def _edf() -> Policy:
    composer = DecodesFirst(ChunkedPrompts(), ReservePrompt())
    return Policy(composer, ReleaseAtOnce(), whole_prompts=False, order=EarliestDeadline())


def make_slo_policy(composer: SLOComposer | None = None) -> Policy:
    """Return the SLO policy with its own composer, or with one that a study puts in its place."""
    composer = composer or SLOComposer()
    return Policy(
        composer,
        ReleaseAtOnce(),
        whole_prompts=False,
        order=EarliestDeadline(),
        needs_step_time=True,
        is_bound_by_time=True,
        keeps_deadlines=True,
        slo=composer,
    )


def _triaged(*, by_time: bool, by_deadline: bool) -> Policy:
    return Policy(
        TriagedBudget(by_time=by_time, by_deadline=by_deadline),
        ReleaseAtOnce(),
        whole_prompts=False,
        order=EarliestDeadline(),
        needs_step_time=True,
        is_bound_by_time=by_time,
        keeps_deadlines=True,
    )


def _simple() -> Policy:
    return _triaged(by_time=True, by_deadline=True)


def _sarathi_triage() -> Policy:
    return _triaged(by_time=False, by_deadline=False)


def _edf_triage() -> Policy:
    return _triaged(by_time=False, by_deadline=True)


def _niyama() -> Policy:
    return Policy(
        NiyamaComposer(),
        ReleaseAtOnce(),
        whole_prompts=False,
        order=HybridPriority(),
        needs_step_time=True,
        is_bound_by_time=True,
        keeps_deadlines=True,
    )


def _fastserve() -> Policy:
    return Policy(FastServeComposer(), ReleaseAtOnce(), whole_prompts=True, needs_step_time=True)


POLICIES: dict[str, Callable[[], Policy]] = {
    "static": _static,
    "orca": _orca,
    "prefill-first": _prefill_first,
    "sarathi": _sarathi,
    "slo": make_slo_policy,
    "hybrid-only": _hybrid_only,
    "chunk-only": _chunk_only,
    "simple": _simple,
    "sarathi-triage": _sarathi_triage,
    "edf-triage": _edf_triage,
    "edf": _edf,
    "niyama": _niyama,
    "fastserve": _fastserve,
}
"""`hybrid-only` and `chunk-only` are halves of `sarathi`, for ablation (Sarathi-Serve, OSDI 2024, table 4):
whole prompts beside decodes, and chunks that take turns with decodes. Their names stand in
`scheduler.config` too, where the command line finds them."""

DEFAULT_TOKEN_BUDGET = 512
"""Sarathi-Serve's budget for a strict TBT objective (OSDI 2024, section 5)."""

LARGEST_BUDGET = 8192
"""Beyond this a larger chunk saves next to no time a token."""


def make_policy(config: SchedulerConfig) -> Policy:
    """Build the configured policy.

    Raises
    ------
    ConfigError : unknown name, or a token budget that the policy cannot work with.
    """
    policy = _lookup(config.policy)()
    if policy.slo is not None:
        seconds = config.max_queue_seconds
        bound = None if seconds is None else QueueBound(seconds, config.max_num_seqs)
        policy.slo.configure(config.slo_mode, config.shed_order, bound)
    if policy.order is not None and config.scheduling_policy != DEFAULT_ORDER:
        raise ConfigError(
            f"policy {config.policy!r} has an order of its own, so scheduling policy "
            f"{config.scheduling_policy!r} cannot be had with it; leave it out (a request's weight says what "
            "it is worth), or use policy sarathi"
        )
    if policy.slo is None and config.shed_order != DEFAULT_SHED_ORDER:
        raise ConfigError(
            f"policy {config.policy!r} has no choice of whom to leave behind, so shed order "
            f"{config.shed_order!r} cannot be had with it; leave it out, or use policy slo"
        )
    if policy.slo is None and config.max_queue_seconds is not None:
        raise ConfigError(
            f"policy {config.policy!r} predicts no waits, so max_queue_seconds "
            f"({config.max_queue_seconds:g}) cannot be had with it; leave it out, limit what waits "
            "by max_num_queued_reqs or max_num_queued_tokens, or use policy slo"
        )
    if policy.whole_prompts and config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"policy {config.policy!r} runs whole prompts, so max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) must be at least max_model_len ({config.max_model_len}); "
            "raise it, lower max_model_len, or use a policy with chunked prefill (sarathi)"
        )
    return policy


def queue_seconds(policy: str, given: float | None) -> float | None:
    """Return the `max_queue_seconds` of a policy.

    Parameters
    ----------
    given : what was asked for, seconds: 0 is no limit, None is the policy's default.

    Returns
    -------
    Seconds; None is no limit, as by default under a policy that predicts no waits.
    """
    if given is None:
        return None if _lookup(policy)().slo is None else DEFAULT_QUEUE_SECONDS
    return given or None


def settle(
    limits: SchedulerLimits,
    *,
    num_blocks: int,
    model_len: int,
    choose_budget: Callable[[int], int] | None = None,
    num_micro_batches: int = 1,
    speculation: SpeculationConfig | None = None,
) -> SchedulerConfig:
    """Decide what the limits leave open, and check that all goes together.

    Parameters
    ----------
    num_blocks : KV blocks in the cache.
    model_len : tokens of the longest request that the model was made for.
    choose_budget : from the longest request, tokens, to the token budget where that is `auto`; None has none.

    Raises
    ------
    ConfigError : limits that cannot be kept.
    """
    if (limits.max_model_len or 0) > model_len:
        raise ConfigError(
            f"max_model_len is {limits.max_model_len}, but this model was made for {model_len} tokens; give "
            "a smaller one"
        )
    settled = {each.name: getattr(limits, each.name) for each in fields(SchedulerLimits)}
    settled["policy"] = policy = limits.policy or DEFAULT_POLICY
    # A length that the user asked for must fit (SchedulerConfig checks it); the model's own may be cut.
    settled["max_model_len"] = longest = limits.max_model_len or min(
        model_len, num_blocks * limits.block_size
    )
    if limits.max_num_batched_tokens == "auto":
        if choose_budget is None:
            raise ConfigError("max_num_batched_tokens is 'auto', which is for simulations; give a number")
        settled["max_num_batched_tokens"] = choose_budget(longest)
    elif limits.max_num_batched_tokens is None:
        settled["max_num_batched_tokens"] = default_token_budget(
            policy, max_model_len=longest, max_num_seqs=limits.max_num_seqs
        )
    settled["max_queue_seconds"] = queue_seconds(policy, limits.max_queue_seconds)
    config = SchedulerConfig(
        **settled, num_blocks=num_blocks, num_micro_batches=num_micro_batches, speculation=speculation
    )
    make_policy(config)  # it checks the limits against the policy
    return config


def default_token_budget(policy_name: str, *, max_model_len: int, max_num_seqs: int) -> int:
    """Return the token budget of a step where the user gave none."""
    policy = _lookup(policy_name)()
    if policy.whole_prompts:
        return max(2048, max_model_len, max_num_seqs)
    if policy.is_bound_by_time:
        return max(LARGEST_BUDGET, max_num_seqs)
    return max(DEFAULT_TOKEN_BUDGET, max_num_seqs)


def _lookup(name: str) -> Callable[[], Policy]:
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
