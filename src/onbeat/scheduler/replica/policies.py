"""Named policies: compositions of parts, and the limits that go with them.

In which order a policy fills a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request
from onbeat.core.slo import DEFAULT_SHED_ORDER
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.admission import Admission
from onbeat.scheduler.replica.request_state import first_deadline
from onbeat.scheduler.replica.slo.composer import SLOComposer
from onbeat.scheduler.replica.step_plan import Composer, RunningList, StepPlan, WaitingQueue
from onbeat.scheduler.scheduler_config import SchedulerConfig


class _Plain(Composer):
    """Looks at nothing that changes from one step of decodes to the next: whoever waits could not come in."""

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        return inf


class DecodesFirst(_Plain):
    """Decodes, then prompts that have begun, then new ones: no decode ever waits for a prompt.

    With prompts in chunks this is Sarathi-Serve's stall-free batching (OSDI 2024, section 4.2); with whole
    ones it is Orca's iteration-level scheduling (OSDI 2022, algorithm 1), whose batches mix whole prompts
    with decodes.
    """

    def compose(self, plan: StepPlan) -> None:
        plan.preempt_for_waiting()
        plan.decode_running()
        plan.continue_prefills()
        plan.admit_waiting()


class PrefillsFirst(Composer):
    """A step of new prompts alone if any fits, else a step of decodes (vLLM, SOSP 2023).

    Departs from vLLM in one point: after `max_prefill_steps` prompt steps in a row the decodes get one, since
    otherwise an endless stream of short requests could starve those that are generating.
    """

    def __init__(self, *, max_prefill_steps: int = 32) -> None:
        self._max_prefill_steps = max_prefill_steps
        self._num_prefill_steps = 0
        self._is_turn_of_prompts = False
        """Whether the last step was one that prompts had to leave to decodes."""

    def compose(self, plan: StepPlan) -> None:
        plan.preempt_for_waiting()
        if self._num_prefill_steps >= self._max_prefill_steps:
            plan.decode_running()
            if not plan.is_empty:
                return
        plan.continue_prefills()
        plan.admit_waiting()
        if plan.is_empty:
            plan.decode_running()

    def commit(self, plan: StepPlan) -> None:
        """Count steps of prompts in a row."""
        has_prompts = bool(plan.chunks or plan.admissions)
        self._is_turn_of_prompts = not has_prompts and self._num_prefill_steps >= self._max_prefill_steps
        self._num_prefill_steps = self._num_prefill_steps + 1 if has_prompts else 0

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return infinity unless prompts have their turn next."""
        return 0.0 if self._is_turn_of_prompts else inf


class BatchAtATime(_Plain):
    """Request-level batching: a batch is formed, runs until its last request has finished, then the next.

    The prompts of a batch may take several steps (each within the token budget); the first decode step closes
    the batch. Finished requests stay as padding rows (`holds_finished`), which is what request-level
    batching costs.
    """

    def compose(self, plan: StepPlan) -> None:
        # Those with which a request was resumed are not of this batch.
        if all(state.num_output_tokens - len(state.request.resumed_token_ids) <= 1 for state in plan.running):
            plan.admit_waiting()
        if plan.is_empty:
            plan.decode_running()


Compose = Callable[[SchedulerConfig, Any], Composer]
Order = Callable[[Request], float]
"""Returns the rank of a request; a smaller one is served earlier, equal ones by arrival."""
QUEUE_ORDERS: dict[str, Order] = {"fcfs": lambda _request: 0, "priority": lambda request: request.priority}
"""By arrival alone; by `Request.priority`, lower first (vLLM's meaning), which may starve low priorities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A named policy: how it is built, and what is known of it before there is a model or a machine."""

    compose: Compose
    """Builds its composer from limits and a step-time model; None where nobody predicts."""
    holds_finished: bool = False
    """Whether a finished request keeps its row and blocks, as padding, until its whole batch has finished."""
    whole_prompts: bool = False
    """Whether a prompt runs in one step, which must hold the longest, or not at all; else in pieces
    that fill the step's token budget (Sarathi-Serve, section 4)."""
    reserves_maximum: bool = False
    """Whether a request must find the blocks of its prompt and `max_tokens`, and never lacks one then (Orca,
    algorithm 1); else those of the tokens that are there, above a watermark of 1 % (vLLM, SOSP 2023)."""
    order: Order | None = None
    """Its own order of requests; None is the configured one."""
    needs_step_time: bool = False
    """Whether it plans with predicted step times."""
    is_bound_by_time: bool = False
    """Whether predicted time is a step's budget, and the tokens are only a cap."""
    keeps_deadlines: bool = False
    """Whether it follows the deadlines of each request's tokens."""
    pauses: bool = True
    """Whether a request sits out whose output nobody fetches, and may be preempted for others then."""
    predicts_waits: bool = False
    """Whether it predicts the TTFT of arrivals, and refuses those that would wait for too long."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy at work: what one scheduler plans with."""

    known: Composition
    composer: Composer
    order: Order
    slo: SLOComposer | None
    """Follows objectives; None in policies that do not."""
    admission: Admission | None
    """Predicts the TTFT of arrivals, and rejects some; None in policies that take all."""


def _plain(composer: Callable[[], Composer]) -> Compose:
    return lambda _config, _model: composer()


def slo_composition(
    compose: Callable[[SchedulerConfig, StepTimeModel], SLOComposer] = SLOComposer,
) -> Composition:
    """Return the SLO policy, with its own composer or with one that a study puts in its place."""
    return Composition(
        compose=compose,
        order=first_deadline,
        needs_step_time=True,
        is_bound_by_time=True,
        keeps_deadlines=True,
        predicts_waits=True,
    )


POLICIES: dict[str, Composition] = {
    "static": Composition(
        compose=_plain(BatchAtATime),
        whole_prompts=True,
        reserves_maximum=True,
        holds_finished=True,
        pauses=False,
    ),
    "orca": Composition(
        compose=_plain(DecodesFirst), whole_prompts=True, reserves_maximum=True, pauses=False
    ),
    "prefill-first": Composition(compose=_plain(PrefillsFirst), whole_prompts=True),
    "sarathi": Composition(compose=_plain(DecodesFirst)),
    "slo": slo_composition(),
    "hybrid-only": Composition(compose=_plain(DecodesFirst), whole_prompts=True),
    "chunk-only": Composition(compose=_plain(partial(PrefillsFirst, max_prefill_steps=1))),
    "edf": Composition(compose=_plain(DecodesFirst), order=first_deadline),
}
"""`hybrid-only` and `chunk-only` are halves of `sarathi`, for ablation (Sarathi-Serve, OSDI 2024, table 4):
whole prompts beside decodes, and chunks that take turns with decodes. Their names stand in
`scheduler_config.py` too, where the command line finds them."""


def composition(name: str) -> Composition:
    """Return a policy by its name; raises ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def make_policy(config: SchedulerConfig, model: StepTimeModel | None) -> Policy:
    """Build the configured policy, ready to plan.

    Parameters
    ----------
    model : predicts steps; None where nobody does.

    Raises
    ------
    ConfigError : an unknown name, limits that the policy cannot work with, or no model where it needs one.
    """
    known = composition(config.policy)
    check_policy(config)
    if known.needs_step_time and model is None:
        raise ConfigError(
            f"policy {config.policy!r} plans with predicted step times, but nothing predicts them; "
            "give a step-time model, or use a policy with a token budget (sarathi)"
        )
    composer = known.compose(config, model)
    slo = composer if isinstance(composer, SLOComposer) else None
    return Policy(
        known,
        composer,
        order=known.order or QUEUE_ORDERS[config.scheduling_policy],
        slo=slo,
        admission=None if slo is None else Admission(config, slo),
    )


def check_policy(config: SchedulerConfig) -> None:
    """Raise ConfigError for an unknown policy, or limits that it cannot work with."""
    policy = composition(config.policy)
    if policy.order is not None and config.scheduling_policy != "fcfs":
        raise ConfigError(
            f"policy {config.policy!r} orders requests itself, so scheduling policy "
            f"{config.scheduling_policy!r} has no effect; leave it out and give requests a weight, or "
            "use policy sarathi"
        )
    for name, default in (("shed_order", DEFAULT_SHED_ORDER), ("max_queue_seconds", None)):
        if not policy.predicts_waits and (value := getattr(config, name)) != default:
            raise ConfigError(
                f"policy {config.policy!r} predicts no waits, so {name} ({value}) has no effect; leave it "
                "out, or use policy slo (max_num_queued_reqs and max_num_queued_tokens limit any queue)"
            )
    if policy.whole_prompts and config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"policy {config.policy!r} runs whole prompts, so max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) must be at least max_model_len ({config.max_model_len}); "
            "raise it, lower max_model_len, or use a policy with chunked prefill (sarathi)"
        )
