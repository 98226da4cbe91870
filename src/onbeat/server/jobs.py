"""Jobs at the server's door: what a request says of its job (`slo.job`, or headers).

Each call gets its share of its job's time before the engine hears of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest, RequestRejected
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE, ShedMode
from onbeat.jobs.call import JobCall, JobEnd, JobReport
from onbeat.server.answer_report import JobState, SLOReport, unjudged_report
from onbeat.server.choices import Choice
from onbeat.server.errors import milliseconds
from onbeat.server.fields import NUMBER, WHOLE, Closed, validated
from onbeat.server.shared import CallEnd, Desk

LONGEST_ID = 128
MOST_CALLS_LEFT = 10_000

JOB_HEADERS = {
    "x-slo-job-id": "id",
    "x-slo-job-deadline-ms": "deadline_ms",
    "x-slo-job-e2e-ms": "e2e_ms",
    "x-slo-job-calls-left": "calls_left",
    "x-slo-job-class": "class",
}
"""Headers that say the same as the object `slo.job`."""

Milliseconds = Annotated[
    float, Field(ge=SHORTEST_OBJECTIVE * 1e3, le=LONGEST_OBJECTIVE * 1e3, allow_inf_nan=False), NUMBER
]


class JobFields(Closed):
    """The object `slo.job`: which job a call is part of. Null is the same as leaving a field out."""

    id: str = Field(min_length=1, max_length=LONGEST_ID)
    """The same in all calls of the job; another caller's job may have the same."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] | None = None
    """When the last call is to have ended, milliseconds since 1970."""
    e2e_ms: Milliseconds | None = None
    """The same, from the arrival of the job's first call."""
    calls_left: Annotated[int, Field(ge=0, le=MOST_CALLS_LEFT), WHOLE] | None = None
    """Calls that follow this one, one after another; 0 is the last. Learnt from earlier jobs if absent."""
    job_class: str | None = Field(None, alias="class", min_length=1, max_length=LONGEST_ID)
    """Jobs of a class are expected to be alike."""


def stated_job(fields: JobFields | None, headers: Headers, tenant: str | None) -> JobCall | None:
    """Return what a request says of its job; its body counts before its headers. None without a job.

    Raises
    ------
    InvalidRequest : a header is wrong.
    """
    of_headers = stated_by_headers(JobFields, JOB_HEADERS, headers)  # wrong ones are told in any case
    fields = fields or of_headers
    if fields is None:
        return None
    return JobCall(
        job_id=fields.id,
        tenant=tenant,
        deadline=None if fields.deadline_ms is None else fields.deadline_ms / 1e3,
        e2e=None if fields.e2e_ms is None else fields.e2e_ms / 1e3,
        calls_left=fields.calls_left,
        kind=fields.job_class or "",
    )


_Model = TypeVar("_Model", bound=BaseModel)


def stated_by_headers(model: type[_Model], names: Mapping[str, str], headers: Headers) -> _Model | None:
    """Return an object whose fields headers state; None where none does.

    Parameters
    ----------
    model : of the object.
    names : of headers -> of the fields; of two headers of one field the later counts.
    headers : the request's.

    Raises
    ------
    InvalidRequest : a header is wrong, or one is missing.
    """
    given = {name: headers[header].strip() for header, name in names.items() if header in headers}
    if not given:
        return None
    try:
        return validated(model, given, [])
    except InvalidRequest as error:
        stating = [header for header, name in names.items() if name == error.param]
        header = next((each for each in reversed(stating) if each in headers), stating[0])
        error.param, error.field, error.code = header, f"the header {header}", "invalid_value"
        raise


class CallTicket:
    """A call of a job from its opening to its end."""

    def __init__(self, shared: Desk, number: int, choices: Sequence[Choice]) -> None:
        self._shared, self._number, self._choices = shared, number, choices
        self._is_open = True
        self._report: JobReport | None = None

    def _end(self, failed: JobEnd | None = None) -> CallEnd:
        self._is_open = False
        records = [choice.record for choice in self._choices if choice.record is not None]
        ends = [record.end for record in records if record.delivery_times]
        now = time.monotonic() if failed is not None else max(ends, default=time.monotonic())
        num_output_tokens = max(choice.num_output_tokens for choice in self._choices)
        return CallEnd(now, num_output_tokens, self._choices[0].placement, failed)

    async def close(self) -> None:
        """Hear that the call has come to its end, before `report`."""
        if self._is_open:
            self._report = await self._shared.close_call(self._number, self._end())

    def fail(self, error: BaseException | None) -> None:
        """Hear that the call ended without its whole answer; nothing happens where it is closed."""
        if self._is_open:
            failed = JobEnd.REFUSED if isinstance(error, RequestRejected) else JobEnd.ABANDONED
            self._shared.fail_call(self._number, self._end(failed))

    def report(self, of_call: SLOReport | None) -> SLOReport:
        """Return the object `slo` of the answer: that of the call, and how its job stands.

        Parameters
        ----------
        of_call : None of a call that was best effort, since its job's deadline had passed.
        """
        job = self._report
        assert job is not None, "it is closed"
        if of_call is None:
            record = self._choices[0].record
            assert record is not None, "it has ended"
            of_call = unjudged_report(record)
        of_call.job = JobState(
            id=job.job_id,
            calls=job.num_calls,
            elapsed_ms=milliseconds(job.elapsed),
            in_calls_ms=milliseconds(job.in_calls),
            remaining_ms=milliseconds(job.remaining) if math.isfinite(job.remaining) else None,
            share_ms=milliseconds(job.share),
            replica=job.replica,
            moved=job.moved,
            met=None if job.end is None else job.end is JobEnd.KEPT,
        )
        return of_call


@asynccontextmanager
async def opened_call(
    shared: Desk, call: JobCall | None, choices: Sequence[Choice]
) -> AsyncIterator[CallTicket | None]:
    """Open a call of a job while the block runs, and give choices the objectives that they have by it.

    Yields None for a call of no job.

    Raises
    ------
    InvalidRequest, Overloaded : see `JobTable.open`.
    ApiError : the job is predicted to be late, and its caller prefers to hear so at once (429).
    """
    if call is None:
        yield None
        return
    first = choices[0].request
    prompts = {choice.prompt_index: len(choice.request.prompt_token_ids) for choice in choices}
    opened = await shared.open_call(
        call,
        first.arrival,
        sum(prompts.values()),
        max(choice.request.sampling.max_tokens for choice in choices),
        refuses=first.shed is ShedMode.REJECT,
    )
    share = opened.share
    for choice in choices:
        request = choice.request
        choice.request = replace(request, slo=share.objectives(request.slo), kept_for=share.kept_for)
    ticket = CallTicket(shared, opened.number, choices)
    try:
        yield ticket
    except BaseException as error:
        ticket.fail(error)
        raise
    ticket.fail(None)
