"""What steps that have come back give to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, repeat
from typing import NamedTuple

from onbeat.core.request import GRAMMAR_FAULT, FinishReason, RequestOutput, TokenLogprobs
from onbeat.core.step import NOTHING_GUIDED, ModelRunnerOutput, ScheduledRequest, SchedulerOutput, new_tuple
from onbeat.core.step_stats import DraftStats
from onbeat.scheduler.replica.guides import learn
from onbeat.scheduler.replica.lockstep import DECODE
from onbeat.scheduler.replica.outputs import Outputs
from onbeat.scheduler.replica.planner import Planner, StepInFlight
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.speculation.drafting import Drafting
from onbeat.scheduler.replica.speculation.verified import correct_shape, draft_stats
from onbeat.scheduler.replica.tracker import Delivered

SampledRow = tuple[list[int], list[TokenLogprobs] | None, int, int | None]
"""Tokens, their log-probabilities, drafts verified, drafts available."""


class _Taken(NamedTuple):
    """A step that has come back, and what its rows gave so far."""

    step_id: int
    result: ModelRunnerOutput
    now: float
    """When it ended, seconds."""
    outputs: list[RequestOutput]
    """Of more than a plain token."""
    delivered: Delivered
    """What of them may be held against deadlines."""
    streams: list[RequestState]
    """Who has a plain token."""
    places: list[int]
    """How many of these are before each of the outputs."""


_ENDED = (RequestStatus.FINISHED, RequestStatus.PADDING)
"""Of requests that get no more tokens."""
_SHARED_KV = "the request shares KV with one that has failed in this step; send it again"


class StepResults:
    """Takes the results of steps, in the order in which they were planned.

    Parameters
    ----------
    table : where the requests are.
    planner : told how long steps took; its policy follows deadlines and lengths, if it does.

    Attributes
    ----------
    drafting : told what became of drafts; None where nothing is speculated.
    drafts : what speculation did in the last step that came back; None where it had no part in it.
    """

    def __init__(self, table: RequestTable, planner: Planner, drafting: Drafting | None) -> None:
        self.drafting = drafting
        self.drafts: DraftStats | None = None
        self._table, self._planner, self._policy = table, planner, planner.policy

    def take(
        self, step: StepInFlight, scheduled: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> Sequence[RequestOutput]:
        """Return what each request got; see `Scheduler.update`."""
        if result.num_drafted is not None:
            correct_shape(scheduled, result.num_drafted)
        failed = result.failed or {}
        outputs = _let_go_of_sharers(step.states, scheduled, failed, self._table) if failed else []
        if result.guided is not None:
            if (model := self._planner.model) is not None:
                model.observe_guides(scheduled.shape.num_guided_rows, result.guided.seconds)
            learn(step.states, result.guided.row_seconds)
        self._planner.observe(
            scheduled.shape, step.planned_at, now, has_run=not failed or _has_run(step.states, failed)
        )
        taken = new_tuple(_Taken, (step.step_id, result, now, outputs, [], [], []))
        self._take_rows(step, scheduled.shape.num_sequences, taken)
        if self._policy.known.keeps_deadlines:
            if self._policy.slo is not None:
                self._policy.slo.tracker.on_deliveries(taken.delivered, now, taken.streams)
            else:
                for state in [*taken.streams, *[state for state, _, _ in taken.delivered]]:
                    state.slo.note_delivery(now)
        if self.drafting is not None:
            self.drafts = draft_stats(scheduled, result, outputs, expected_tokens=step.expected_tokens)
        if not taken.streams or taken.streams[0].times is not None:  # a simulation has the times of all
            return outputs
        return Outputs(taken.streams, outputs, taken.places)

    def _take_rows(self, step: StepInFlight, num_rows: int, taken: _Taken) -> None:
        """Give requests their tokens, and end those that have all; `num_rows` counts all in lockstep, too."""
        states, rows, result, lockstep = step.states, step.rows, taken.result, self._table.lockstep
        if lockstep is not None:
            states, rows = lockstep.end_step(states, rows, taken.now)
        guided = result.guided or NOTHING_GUIDED
        failed = {**(result.failed or {}), **guided.faults}
        is_plain = self.drafting is None and result.logprobs is None and not (failed or guided.completed)
        if is_plain:
            plain = states
            if len(result.sampled_token_ids) < num_rows:
                plain = list(compress(plain, [row.samples for row in rows]))
            self._take_plain(plain, taken)
            if len(plain) == len(rows):
                return
        sampled = zip(
            result.sampled_token_ids,
            repeat(None) if result.logprobs is None else result.logprobs,
            repeat(0) if result.num_drafted is None else result.num_drafted,
            repeat(None) if result.num_available is None else result.num_available,
            strict=False,  # some repeat for ever
        )
        for state, row in zip(states, rows, strict=False):
            got = next(sampled) if row.samples else None
            if state.status in _ENDED or (is_plain and row.samples):
                continue
            if (message := failed.get(state.request_id)) is not None:
                at_fault = state.request_id in guided.faults
                taken.outputs.append(_fail(state, message, self._table, at_fault=at_fault))
            else:
                self._take_row(state, row, got, taken)

    def _take_plain(self, states: list[RequestState], taken: _Taken) -> None:
        """Give requests a token each, of which most are plain.

        This loop runs for each row of each step, and is written flat for it.
        """
        streams, now = taken.streams, taken.now
        for state, token_ids in zip(states, taken.result.sampled_token_ids, strict=False):
            num_before = state.num_tokens
            if (
                num_before >= state.plain_until
                or (state.stop_token_ids and token_ids[0] in state.stop_token_ids)
            ) and not (
                num_before > state.num_prompt_tokens and self._goes_on(state, token_ids, taken.step_id)
            ):
                if state.status not in _ENDED:
                    self._take_row(state, DECODE, (token_ids, None, 0, None), taken)
                continue
            state.num_tokens = num_before + 1
            state.num_in_flight_tokens -= 1
            state.output_token_ids += token_ids
            streams.append(state)
            if state.times is not None:
                state.times.append(now)

    def _goes_on(self, state: RequestState, token_ids: list[int], step_id: int) -> bool:
        """Whether a token is one of many of a request, not its first or last. Ended ones may have none."""
        num_before = state.num_tokens
        if (
            num_before >= state.max_total_tokens - 1
            or state.status is not RequestStatus.RUNNING
            or state.admitted_step_id > step_id
            or token_ids[0] in state.stop_token_ids
        ):
            return False
        if num_before >= state.num_tokens_to_register:
            self._table.kv.register_full_blocks(state, num_before)
        state.plain_until = min(state.max_total_tokens - 1, state.num_tokens_to_register)
        return True

    def _take_row(
        self, state: RequestState, row: ScheduledRequest, got: SampledRow | None, taken: _Taken
    ) -> None:
        """Give a request what its row brought, and end it if it has all."""
        result = taken.result
        # Not those of a row planned before a preemption: they belong to others by now.
        holds_blocks = state.status is RequestStatus.RUNNING and state.admitted_step_id <= taken.step_id
        output = None
        if got is not None:
            output = state.deliver(got[0], got[1], row.num_draft_tokens)
            if result.guided is not None and state.request_id in result.guided.completed:
                output.finish_reason = FinishReason.STOP
            if self.drafting is not None:
                self._note_drafts(state, row, output, got, holds_blocks=holds_blocks)
            # All but the last token sampled; a row planned behind drafts does not know its place itself.
            num_valid = state.num_tokens - 1
        else:
            num_valid = row.num_computed_tokens + row.num_new_tokens
            if state.request.pooling is not None and num_valid >= state.num_tokens:
                state.num_in_flight_tokens = 0
                output = state.output([], FinishReason.STOP, state.num_tokens)
                output.embedding = (result.embeddings or {}).get(state.request_id)
        if holds_blocks and num_valid >= state.num_tokens_to_register:
            self._table.kv.register_full_blocks(state, num_valid)
        if output is None:
            return
        if output.finish_reason is not None:
            self._finish(state, taken.now)
        elif holds_blocks and got is not None:
            state.plain_until = min(state.max_total_tokens - 1, state.num_tokens_to_register)
        if result.prompt_logprobs is not None:
            output.prompt_logprobs = result.prompt_logprobs.get(state.request_id)
        taken.places.append(len(taken.streams))
        taken.outputs.append(output)
        taken.delivered.append((state, len(output.new_token_ids), output))

    def _note_drafts(
        self,
        state: RequestState,
        row: ScheduledRequest,
        output: RequestOutput,
        got: SampledRow,
        *,
        holds_blocks: bool,
    ) -> None:
        """Count what became of the drafts of a row, and learn from it."""
        assert self.drafting is not None
        token_ids, _, num_drafted, num_available = got
        num_accepted = len(token_ids) - 1 if num_drafted else 0
        draft = state.draft
        draft.count(num_drafted, min(num_accepted, len(output.new_token_ids)))  # not beyond its end
        output.num_drafted_tokens, output.num_accepted_tokens = draft.num_drafted, draft.num_accepted
        if holds_blocks and row.num_draft_tokens:
            # What is behind the first rejected draft counts as not computed; its KV slots are used again.
            state.num_computed_tokens -= 1 + row.num_draft_tokens - len(token_ids)
        self.drafting.observe(
            state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
        )

    def _finish(self, state: RequestState, now: float) -> None:
        """End a request that has all its tokens."""
        if state.request.kept_for:
            state.kept_until = now + state.request.kept_for
        if self._policy.slo is not None:
            self._policy.slo.tracker.on_finish(state)
        if self.drafting is not None:
            self.drafting.finish(state)
        if self._policy.known.holds_finished and state.status is RequestStatus.RUNNING:
            self._table.pad(state)
        else:
            self._table.drop(state)


def _fail(state: RequestState, message: str, table: RequestTable, *, at_fault: bool = False) -> RequestOutput:
    """End one request with an error; the others of its step go on.

    Parameters
    ----------
    at_fault : whether its grammar or parameters leave no token: its KV is as good as any other. Else nobody
        reuses it.
    """
    output = state.last_output(FinishReason.ERROR)
    output.error = message
    if at_fault:
        output.error_code = GRAMMAR_FAULT if state.is_guided else "invalid_value"
    else:
        table.kv.distrust(state)
    table.drop(state)
    return output


def _let_go_of_sharers(
    states: list[RequestState], scheduled: SchedulerOutput, failed: Mapping[str, str], table: RequestTable
) -> list[RequestOutput]:
    """Preempt those who share KV with a request that has failed, or end them and return their outputs.

    What was not finite in it is so by now, and nobody else would fail by it: neither who joined after the
    step was planned, nor who had no token of it. Blocks by which another had one are sound.

    Parameters
    ----------
    states : of the step's rows, in their order.
    failed : ids of the requests whose rows failed, and why.
    """
    unsound: set[int] = set()
    sound: set[int] = set()
    lost: set[str] = set()
    for state, row in zip(states, scheduled.rows, strict=True):
        if state.status is not RequestStatus.RUNNING or state.admitted_step_id > scheduled.step_id:
            continue  # it has other blocks than the row had, or none
        if state.request_id in failed:
            lost.add(state.request_id)
            unsound.update(state.held_ids)
        elif row.samples:
            sound.update(state.held_ids)
    unsound -= sound
    outputs = []
    for state in list(table.running):
        is_lost = state.status is not RequestStatus.RUNNING or state.request_id in lost
        if is_lost or unsound.isdisjoint(state.held_ids):
            continue
        if state.num_in_flight_tokens:  # they would be delivered
            outputs.append(_fail(state, _SHARED_KV, table))
        else:
            table.kv.distrust(state)
            table.preempt(state)
    return outputs


def _has_run(states: list[RequestState], failed: Mapping[str, str]) -> bool:
    """Whether a step came to its end: one that raises fails all of its requests.

    Of those that had ended before nobody hears, and a replay does not know that they failed too.
    """
    left = [state.request_id for state in states if state.status not in _ENDED]
    return not left or any(request_id not in failed for request_id in left)
