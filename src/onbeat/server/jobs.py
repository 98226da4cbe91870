"""Jobs at the server's door: each call gets its share of its job's time before the engine hears of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from onbeat.core.errors import RequestRejected, SLOUnattainable
from onbeat.core.slo import ShedMode
from onbeat.jobs.book import JobBook, OpenCall
from onbeat.jobs.call import JobCall, JobEnd, JobReport
from onbeat.metrics.counts import JobCounts
from onbeat.server.answer_report import record_of
from onbeat.server.choices import Choice
from onbeat.server.errors import job_unattainable, milliseconds
from onbeat.server.slo_report import unjudged_report


class JobDesk:
    """Keeps the book of jobs of one server.

    Parameters
    ----------
    counts : are told of each job that ended.
    """

    def __init__(self, counts: JobCounts) -> None:
        self._counts = counts
        self._book = JobBook(on_end=counts.end)
        self._since_1970 = time.time() - time.monotonic()

    @contextmanager
    def call(self, call: JobCall | None, choices: Sequence[Choice]) -> Iterator[CallTicket | None]:
        """Give choices the objectives that their call has by its job; yields None for one of no job.

        Raises
        ------
        InvalidRequest, Overloaded : see `JobBook.open`.
        ApiError : the job is predicted to be late, and its caller prefers to hear so at once (429).
        """
        if call is None:
            yield None
            return
        ticket = self._open(call, choices)
        failed: JobEnd | None = JobEnd.ABANDONED
        try:
            yield ticket
            failed = None
        except RequestRejected:
            failed = JobEnd.REFUSED
            raise
        finally:
            ticket.close(failed)
            self._counts.num_open = len(self._book)

    def _open(self, call: JobCall, choices: Sequence[Choice]) -> CallTicket:
        if call.deadline is not None:
            call = replace(call, deadline=call.deadline - self._since_1970)
        first = choices[0].request
        prompts = {choice.prompt_index: len(choice.request.prompt_token_ids) for choice in choices}
        try:
            opened = self._book.open(
                call,
                first.arrival,
                num_prompt_tokens=sum(prompts.values()),
                max_tokens=max(choice.request.sampling.max_tokens for choice in choices),
                refuses=first.shed is ShedMode.REJECT,
            )
        except SLOUnattainable as error:
            raise job_unattainable(error) from error
        finally:
            self._counts.num_open = len(self._book)
        for choice in choices:
            request = choice.request
            choice.request = replace(request, slo=opened.share.objectives(request.slo))
        return CallTicket(self._book, opened, choices)


class CallTicket:
    """A call of a job from its opening to its end."""

    def __init__(self, book: JobBook, opened: OpenCall, choices: Sequence[Choice]) -> None:
        self._book = book
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
            times = [choice.delivery_times[-1] for choice in self._choices if choice.delivery_times]
            now = time.monotonic() if failed is not None else max(times, default=time.monotonic())
            self._report = self._book.close(
                self._opened,
                now,
                num_output_tokens=max(choice.num_output_tokens for choice in self._choices),
                why=failed,
            )
        return self._report

    def report(self, of_call: dict[str, Any] | None) -> dict[str, Any]:
        """Return the object `slo` of the answer: that of the call, and how its job stands.

        Parameters
        ----------
        of_call : None of a call that was best effort, since its job was late for certain.
        """
        job = self.close()
        if of_call is None:
            of_call = unjudged_report(record_of(self._choices[0]))
        return of_call | {
            "job": {
                "id": job.job_id,
                "calls": job.num_calls,
                "elapsed_ms": milliseconds(job.elapsed),
                "in_calls_ms": milliseconds(job.in_calls),
                "remaining_ms": milliseconds(job.remaining) if math.isfinite(job.remaining) else None,
                "share_ms": milliseconds(job.share),
                "met": None if job.end is None else job.end is JobEnd.KEPT,
            }
        }
