"""A plan, as vLLM's own `schedule` is made to carry it out: by order, skips, quotas and its queue."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.vllm.kv_view import VLLMKVView
from onbeat.vllm.steps import EngineTable
from onbeat.vllm.surface import EngineRequest, Surface


@dataclass(frozen=True, slots=True)
class Imposed:
    """What the next step of vLLM is held to.

    Attributes
    ----------
    decodes : ids of the requests that get what a decode wants.
    ends : request id -> tokens of it that are computed once the step has run; of prompts.
    quota : request id -> tokens of the step, likewise.
    admitted : who joins the batch, in this order.
    with_prefix : of these, those that the prefix cache has a part of.
    total : tokens of the step at most; None where vLLM plans some requests itself.
    known : ids of requests that plans admit.
    """

    decodes: frozenset[str]
    ends: dict[str, int]
    quota: dict[str, int]
    admitted: list[EngineRequest] = field(default_factory=list)
    with_prefix: list[EngineRequest] = field(default_factory=list)
    total: int | None = None
    known: Container[str] = ()

    def limit(self, request_id: str, num_computed: int, num_new: int) -> int:
        """Return the tokens that a request gets of those that vLLM would give it.

        More of its prefix may be cached by now than when it was planned; it ends at the same token then.
        """
        if request_id not in self.quota:
            return num_new
        return min(num_new, self.quota[request_id], max(self.ends[request_id] - num_computed, 1))

    @contextmanager
    def during(self, surface: Surface, kv: VLLMKVView) -> Iterator[None]:
        """Hold vLLM to it for one call of `schedule`."""
        waiting = surface.only_waiting(self.admitted, self.known)
        with kv.holding(self.with_prefix), waiting, surface.keeping_loras():
            if surface.has_quota:
                with surface.limiting(self.limit) if self.quota else nullcontext():
                    yield
            else:
                with nullcontext() if self.total is None else surface.total(self.total):
                    yield


def impose(
    plan: StepPlan, table: EngineTable, surface: Surface, loss: Callable[[RequestState], tuple[float, ...]]
) -> Imposed:
    """Preempt, sort and skip as a plan says; return what is left to hold vLLM to while it schedules.

    Parameters
    ----------
    loss : key of running requests, the greatest is the first that vLLM may preempt where blocks run short.
    """
    requests, preempted, own = table.requests, plan.preempted, table.foreign
    for state in preempted:
        surface.preempt(requests[state.request_id])
    rows = [*plan.decodes, *(state for state, _ in plan.chunks)]
    left: list[RequestState] = []
    if len(rows) + len(preempted) < len(table.running):
        taken = {state.request_id for state in (*rows, *preempted)}
        left = sorted([each for each in table.running if each.request_id not in taken], key=loss)
    for state in left:
        surface.skip(requests[state.request_id])
    surface.scheduler.running[:] = [*own, *[requests[state.request_id] for state in (*rows, *left)]]
    ends = {state.request_id: state.num_computed_tokens + num for state, num in plan.chunks}
    quota = {state.request_id: num for state, num in plan.chunks}
    block_size = plan.block_size
    admissions = [each for each in plan.admissions if table.may_join(each.state)]
    for admission in admissions:
        name, num = admission.state.request_id, admission.num_new_tokens
        quota[name], ends[name] = num, len(admission.cached_block_ids) * block_size + num
    total = len(plan.decodes) * (1 + surface.num_drafts) + sum(quota.values())
    return Imposed(
        frozenset([state.request_id for state in plan.decodes]),
        ends,
        quota,
        [requests[each.state.request_id] for each in admissions],
        [requests[each.state.request_id] for each in admissions if each.cached_block_ids],
        None if own else total,
        table.states,
    )


def mismatch(imposed: Imposed, output: Any, table: EngineTable) -> dict[str, tuple[int, int]]:
    """Return where a step of vLLM is not what it was held to: request id -> (planned, actual).

    Tokens of decodes are counted as one; of prompts, up to where they are computed.
    """
    different: dict[str, tuple[int, int]] = {}
    rows: Mapping[str, int] = output.num_scheduled_tokens
    drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
    for name in imposed.decodes - rows.keys():
        different[name] = (1, 0)
    for name, end in imposed.ends.items():
        num_drafts = len(drafts.get(name, ()))
        actual = table.requests[name].num_computed_tokens - num_drafts if name in rows else 0
        # Of a prompt that is cached whole, one token has to be computed all the same.
        has_more_cached = actual > end and rows[name] == 1 + num_drafts
        if actual != end and not has_more_cached:
            different[name] = (end, actual)
    if len(rows) > len(imposed.decodes) + len(imposed.ends) - len(different):
        known = imposed.decodes | imposed.ends.keys()
        others = [name for name in rows if name not in known and name in table.states]
        different.update({name: (0, rows[name]) for name in others})
    return different
