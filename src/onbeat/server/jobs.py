"""Jobs at the server's door: what a request says of its job (`slo.job`, or headers).

Each call gets its share of its job's time before the engine hears of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest, RequestRejected, SLOUnattainable
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE, ShedMode
from onbeat.jobs.call import JobCall, JobEnd, JobReport
from onbeat.jobs.table import JobTable, OpenCall
from onbeat.metrics.counts import JobCounts
from onbeat.server.answer_report import JobState, SLOReport, unjudged_report
from onbeat.server.choices import Choice
from onbeat.server.errors import job_unattainable, milliseconds
from onbeat.server.fields import NUMBER, WHOLE, Closed, validated

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
_CLOCK_STEP = 0.1
"""Seconds by which two clocks part if one was set anew, or the machine has slept."""


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


class JobCalls:
    """Keeps the table of jobs of one server.

    Parameters
    ----------
    counts : are told of each job that ended.
    """

    def __init__(self, counts: JobCounts) -> None:
        self._counts = counts
        self._table = JobTable(on_end=counts.end)
        self._since_1970 = 0.0

    @contextmanager
    def call(self, call: JobCall | None, choices: Sequence[Choice]) -> Iterator[CallTicket | None]:
        """Give choices the objectives that their call has by its job; yields None for one of no job.

        Raises
        ------
        InvalidRequest, Overloaded : see `JobTable.open`.
        ApiError : the job is predicted to be late, and its caller prefers to hear so at once (429).
        """
        if call is None:
            yield None
            return
        ticket = self._open(call, choices)
        try:
            yield ticket
        except BaseException as error:
            ticket.fail(error)
            raise
        finally:
            ticket.close()
            self._counts.num_open = len(self._table)

    def _open(self, call: JobCall, choices: Sequence[Choice]) -> CallTicket:
        if call.deadline is not None:
            since_1970 = time.time() - time.monotonic()
            if abs(since_1970 - self._since_1970) > _CLOCK_STEP:
                self._since_1970 = since_1970
            call = replace(call, deadline=call.deadline - self._since_1970)
        first = choices[0].request
        prompts = {choice.prompt_index: len(choice.request.prompt_token_ids) for choice in choices}
        try:
            opened = self._table.open(
                call,
                first.arrival,
                num_prompt_tokens=sum(prompts.values()),
                max_tokens=max(choice.request.sampling.max_tokens for choice in choices),
                refuses=first.shed is ShedMode.REJECT,
            )
        except SLOUnattainable as error:
            raise job_unattainable(error) from error
        finally:
            self._counts.num_open = len(self._table)
        for choice in choices:
            request = choice.request
            share = opened.share
            choice.request = replace(request, slo=share.objectives(request.slo), kept_for=share.kept_for)
        return CallTicket(self._table, opened, choices)


class CallTicket:
    """A call of a job from its opening to its end."""

    def __init__(self, table: JobTable, opened: OpenCall, choices: Sequence[Choice]) -> None:
        self._table = table
        self._opened = opened
        self._choices = choices
        self._report: JobReport | None = None

    def close(self, failed: JobEnd | None = None) -> JobReport:
        """Hear that the call has ended; return how its job stands. Only the first time counts.

        Parameters
        ----------
        failed : why, if it did not come to its end.
        """
        if self._report is None:
            records = [choice.record for choice in self._choices if choice.record is not None]
            ends = [record.end for record in records if record.delivery_times]
            now = time.monotonic() if failed is not None else max(ends, default=time.monotonic())
            self._report = self._table.close(
                self._opened,
                now,
                num_output_tokens=max(choice.num_output_tokens for choice in self._choices),
                why=failed,
                placement=self._choices[0].placement,
            )
        return self._report

    def fail(self, error: BaseException) -> None:
        """Hear that the call ended without its answer, or with a part of it."""
        self.close(JobEnd.REFUSED if isinstance(error, RequestRejected) else JobEnd.ABANDONED)

    def report(self, of_call: SLOReport | None) -> SLOReport:
        """Return the object `slo` of the answer: that of the call, and how its job stands.

        Parameters
        ----------
        of_call : None of a call that was best effort, since its job's deadline had passed.
        """
        job = self.close()
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
