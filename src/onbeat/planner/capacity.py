"""The capacity of a configuration: the highest rate that keeps an objective, over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.planner.cases import Case, Labels, case_name, run_trial
from onbeat.planner.objectives import Objective, Verdict
from onbeat.planner.parallel import TaskContext
from onbeat.planner.search import Bracket, SearchOptions, Stopped, Trial, rate_interval, search_rate
from onbeat.report.units import rate_text
from onbeat.scheduler.replica.token_budget import full_step, mean_decode_context
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.job_kinds import unit_of
from onbeat.workload.offered import OfferedLoad

COARSE = 0.15
"""Width of the bracket of the first answer, as a share of its lower end."""
MORE_LOAD = (1.25, 2.0)
"""Times the found rate, that are run beside a search."""


class SearchEnd(StrEnum):
    """What became of a search."""

    FOUND = "found"
    INFEASIBLE = "infeasible"
    """No rate keeps the objective, or the configuration cannot run at all."""
    UNBOUNDED = "unbounded"
    """No rate missed the objective: the load is too short to saturate the replicas."""
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTask:
    """One repeat of one case.

    Parameters
    ----------
    load : of this repeat; its arrivals are stretched and squeezed to the rates that are tried, so that all
        rates see the same requests in the same order.
    """

    case: Case
    load: OfferedLoad
    objective: Objective
    options: SearchOptions
    has_more_load: bool = False
    """Whether more than the found rate is run too."""
    is_coarse: bool = False
    """Whether only a first answer is wanted."""
    near: Bracket | None = None
    """What a coarse search found, of this repeat or of another."""
    is_other: bool = False
    """Whether it was another; else its bracket is halved further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What one repeat found."""

    bracket: Bracket | None
    """None where the configuration cannot run; `reason` says why."""
    reason: str
    num_devices: int = 0
    details: dict[str, Any] | None = None
    """Settings that were resolved: token budget, KV blocks."""
    beyond: tuple[Trial, ...] = ()
    """Runs to their end: the lowest rate that missed, then those of `CapacityTask.has_more_load`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of one case."""

    labels: Labels
    outcome: SearchEnd
    rate: float
    """Requests per second: the mean of the highest rates that kept the objective; 0 where none did."""
    interval: tuple[float, float]
    """Of `rate` (`rate_interval`)."""
    num_devices: int
    reason: str
    """What binds: why slightly more is too much, or why nothing fits."""
    repeats: tuple[Repeat, ...]

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices if self.num_devices else 0.0

    @property
    def beyond(self) -> tuple[Trial, ...]:
        """Runs with more than it serves, of the first repeat."""
        return self.repeats[0].beyond if self.repeats else ()

    @property
    def curve(self) -> list[tuple[float, Verdict]]:
        """Rates that the first repeat ran to the end, with what came of them; the lowest first."""
        bracket = self.repeats[0].bracket if self.repeats else None
        whole = {} if bracket is None else {trial.rate: trial.verdict for trial in bracket.trials}
        whole |= {trial.rate: trial.verdict for trial in self.beyond}
        return [(rate, whole[rate]) for rate in sorted(whole) if whole[rate].measures]

    @property
    def warning(self) -> str:
        """Of the highest rate that kept the objective; see `SimulationResult.beyond`."""
        kept = [
            trial
            for repeat in self.repeats
            if repeat.bracket is not None
            for trial in repeat.bracket.trials
            if trial.verdict.is_met
        ]
        return max(kept, key=lambda trial: trial.rate).verdict.beyond if kept else ""

    @property
    def values(self) -> dict[str, Any]:
        """As a file has it."""
        return {
            "name": case_name(self.labels),
            "case": dict(self.labels),
            "outcome": self.outcome,
            "request_rate": self.rate,
            "request_rate_interval": self.interval,
            "num_gpus": self.num_devices,
            "request_rate_per_gpu": self.rate_per_device,
            "reason": self.reason,
            "resolved": next((repeat.details for repeat in self.repeats if repeat.details), {}),
            "repeats": self.repeats,
        }


def service_rate(config: SimulationConfig, step_time: StepTimeModel, load: OfferedLoad) -> float:
    """Return about how many requests per second all replicas serve when their batches are always full.

    Each step decodes a full batch and takes in as many prompt tokens as keep it full: per decode the mean
    prompt over the mean output, but no more than the token budget has room for. Latency is not looked at.
    """
    limits = config.scheduler
    mean_prompt = float(load.num_prompt_tokens.mean())
    mean_output = max(1.0, float(load.num_output_tokens.mean()))  # an embedding takes a step, too
    context = mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    num_decodes = max(1, min(limits.max_num_seqs, limits.num_requests(context), len(load)))
    num_prompt_tokens = num_decodes * mean_prompt / mean_output
    room = max(1.0, limits.max_num_batched_tokens - num_decodes)
    num_steps_each = mean_output * max(1.0, num_prompt_tokens / room) / num_decodes
    budget = num_decodes + max(1, round(min(num_prompt_tokens, room)))
    shape = full_step(budget, max_num_seqs=num_decodes, context_tokens=context)
    seconds = step_time.step_time(shape) + config.host_overhead
    return config.num_replicas / (num_steps_each * seconds)


def find_capacity(task: CapacityTask, context: TaskContext) -> Repeat:
    """Search one repeat of one case; a worker of `parallel.Pool`. Reports each `Trial`."""
    try:
        built = task.case.build()
        limits = built.config.scheduler
        task.load.check_lengths(limits.max_model_len, overlong="error")
        bracket = _search(task, context, service_rate(built.config, built.step_time, task.load))
        reason, beyond = _explain(task, context, bracket)
    except ConfigError as error:
        return Repeat(bracket=None, reason=str(error))
    if not bracket.is_finished:
        context.stop()
    return Repeat(
        bracket=bracket,
        reason=reason,
        num_devices=built.num_devices,
        details={
            "policy": limits.policy,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "num_blocks": limits.num_blocks,
        },
        beyond=beyond,
    )


def _search(task: CapacityTask, context: TaskContext, start: float) -> Bracket:
    """Return the bracket of a repeat, from what a coarse search found on.

    Parameters
    ----------
    start : of a search that knows nothing, requests per second.
    """
    near, options, low, high = task.near, task.options, 0.0, inf
    if task.is_coarse:
        options = replace(options, tolerance=max(options.tolerance, COARSE))
    if near is not None and not task.is_other:
        if near.low == 0 or near.high == inf:
            return near
        low, high = near.low, near.high
    elif near is not None and near.low > 0:
        start, options = near.low, replace(options, growth=1 + COARSE)
    bracket = search_rate(
        lambda rate: run_trial(task.case, task.load.at_rate(rate), task.objective, context.is_stopped),
        start=start,
        options=options,
        low=low,
        high=high,
        on_trial=context.report,
    )
    return bracket if near is None or task.is_other else replace(bracket, trials=near.trials + bracket.trials)


def _explain(task: CapacityTask, context: TaskContext, bracket: Bracket) -> tuple[str, tuple[Trial, ...]]:
    """Return what binds, with the numbers of a whole run: the search ends a run that misses early."""
    if task.is_coarse or not bracket.is_finished or bracket.high == inf:
        return bracket.limit.reason, ()
    more = MORE_LOAD if task.has_more_load and bracket.low > 0 else ()

    def whole(rate: float) -> Trial:
        load, stopped = task.load.at_rate(rate), context.is_stopped
        verdict = run_trial(task.case, load, task.objective, stopped, to_the_end=True)
        return Trial(rate=rate, verdict=verdict)

    try:
        beyond = tuple(map(whole, (bracket.high, *(bracket.low * factor for factor in more))))
    except Stopped:
        context.stop()
        return bracket.limit.reason, ()
    high = rate_text(bracket.high, 4, of=unit_of(task.load))
    where = "even for requests that meet no others" if bracket.low == 0 else f"at {high}"
    return f"{where}: {beyond[0].verdict.reason}", beyond


def combine_repeats(labels: Labels, repeats: Sequence[Repeat | None]) -> Capacity:
    """Put the repeats of a case together; None stands for one that did not run.

    A case is infeasible if one of its repeats is.
    """
    ran = [repeat for repeat in repeats if repeat is not None]
    outcome = _outcome(repeats)
    brackets = [repeat.bracket for repeat in ran if repeat.bracket is not None and repeat.bracket.trials]
    reason = next((repeat.reason for repeat in ran if _outcome([repeat]) is outcome), "it did not run")
    if outcome is SearchEnd.INTERRUPTED and ran and not brackets:
        reason = "interrupted before a run ended"
    if outcome is SearchEnd.INFEASIBLE or not brackets:
        rate, interval = 0.0, (0.0, 0.0 if outcome is SearchEnd.INFEASIBLE else inf)
    else:
        rate, interval = rate_interval(brackets)
    return Capacity(
        labels=labels,
        outcome=outcome,
        rate=rate,
        interval=interval,
        num_devices=max((repeat.num_devices for repeat in ran), default=0),
        reason=reason,
        repeats=tuple(ran),
    )


def _outcome(repeats: Sequence[Repeat | None]) -> SearchEnd:
    found = [repeat for repeat in repeats if repeat is not None]
    if any(repeat.bracket is None or repeat.bracket.is_infeasible for repeat in found):
        return SearchEnd.INFEASIBLE
    if len(found) < len(repeats) or any(not repeat.bracket.is_finished for repeat in found if repeat.bracket):
        return SearchEnd.INTERRUPTED
    if any(repeat.bracket.is_finished and repeat.bracket.high == inf for repeat in found if repeat.bracket):
        return SearchEnd.UNBOUNDED
    return SearchEnd.FOUND
