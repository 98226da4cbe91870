"""Write down what a scheduler is asked and what it decides, while it serves.

The parts of a record's calls: what each looks like in the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

import orjson

from onbeat.background_file import BackgroundFile
from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import ShedMode
from onbeat.core.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.recording.hash_chain import HashChain
from onbeat.recording.log import (
    FILE_KIND,
    SCHEMA_VERSION,
    HandoverVerb,
    RecordedAdoption,
    RecordHeader,
)


def put_kv(call: dict[str, Any], request: Request, adoption: RecordedAdoption | None) -> None:
    """Put in what comes from another replica, and what says how the prefix cache is used."""
    if request.num_prompt_logprobs is not None:
        call["is_scored"] = True
    if request.pooling is not None:
        call["pooling"] = request.pooling
    if request.sampling.grammar is not None:
        call["is_guided"], call["guide_seconds"] = True, request.sampling.grammar.seconds
    if request.kept_for:
        call["kept_for"] = request.kept_for
    if request.num_external_tokens:
        call["num_external_tokens"] = request.num_external_tokens
    if adoption is not None:
        call["adoption"] = [printable(adoption.handover_id), *adoption[1:]]


def put_objectives(call: dict[str, Any], request: Request) -> None:
    """Put in what decides how a request is treated beside others; defaults are left out."""
    if (slo := request.slo) is not None:
        call["slo"] = [slo.ttft, slo.tbt, slo.e2e]
    if request.slo_class is not None:
        call["slo_class"] = printable(request.slo_class)
    if request.weight != 1:
        call["weight"] = request.weight
    if request.tenant is not None:
        call["tenant"] = printable(request.tenant)
    if request.shed is not ShedMode.OFF:
        call["shed"] = request.shed.value


def put_counts(
    call: dict[str, Any],
    scheduled: SchedulerOutput,
    result: ModelRunnerOutput,
    outputs: Sequence[RequestOutput],
) -> None:
    """Put in how many tokens each row gave that samples, where not one; drafts; what grammars took."""
    counts = [len(token_ids) for token_ids in result.sampled_token_ids]
    if counts.count(1) != len(counts):
        delivered = _delivered_counts(counts, scheduled, outputs)
        call["counts"] = delivered
        pairs = enumerate(zip(counts, delivered, strict=True))
        if undelivered := {str(row): count - taken for row, (count, taken) in pairs if count > taken}:
            call["undelivered"] = undelivered
    if result.num_drafted is not None and any(row.num_draft_tokens for row in scheduled.rows):
        call["drafted"] = result.num_drafted
    if result.num_available is not None:
        call["available"] = result.num_available


def _delivered_counts(
    counts: Sequence[int], scheduled: SchedulerOutput, outputs: Sequence[RequestOutput]
) -> list[int]:
    """Return how many tokens of each row that samples were taken: what follows a request's end is not."""
    taken = {output.request_id: len(output.new_token_ids) for output in outputs}
    ids = (row.request_id for row in scheduled.rows if row.samples)
    return [taken.get(request_id, count) for request_id, count in zip(ids, counts, strict=True)]


def printable(request_id: str) -> str:
    """Return the id as it can stand in a file: clients may send halves of characters."""
    return request_id.encode(errors="backslashreplace").decode()


logger = logging.getLogger("onbeat.recording")


P = ParamSpec("P")


class LineSink(Protocol):
    """Where lines go."""

    @property
    def is_broken(self) -> bool: ...

    def write(self, line: bytes) -> None: ...

    def close(self) -> None: ...

    def give_up(self, reason: object) -> None: ...


class _OpenRequest:
    """What the writer must know of a request as long as the scheduler may name it."""

    __slots__ = ("chain", "has_ended", "is_in_batch", "number")

    def __init__(self, number: int, chain: HashChain | None) -> None:
        self.number = number
        self.chain = chain
        self.is_in_batch = False
        self.has_ended = False


def _guarded(
    log: Callable[Concatenate[RecordWriter, P], None],
) -> Callable[Concatenate[RecordWriter, P], None]:
    """Let a failure of the record end the record only: the step loop that calls it goes on."""

    @wraps(log)
    def guarded(writer: RecordWriter, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if writer.sink.is_broken:
            return
        try:
            log(writer, *args, **kwargs)
        except Exception as error:
            logger.exception("cannot record this call")
            writer.sink.give_up(f"{type(error).__name__}: {error}")

    return guarded


class RecordWriter:
    """Logs the calls of one scheduler; each method is called right after the scheduler's of the same name.

    Memory is bounded by the open requests and by what waits for the disk. No method raises: a record that
    cannot be written must not end the requests that are being served.

    Parameters
    ----------
    sink : takes the lines; `close` closes it.
    header : the file's first line.
    """

    def __init__(self, sink: LineSink, header: RecordHeader) -> None:
        self.sink = sink
        self._block_size: int = header.scheduler["block_size"]
        self._logs_hashes: bool = header.scheduler["enable_prefix_caching"]
        self._open: dict[str, _OpenRequest] = {}
        self._num_requests = 0
        self._num_calls = 0
        self._is_idle = False
        """Whether the last call was one that planned nothing."""
        self._logs_idle_plans = header.step_time is not None
        self._append({"file": FILE_KIND, "schema_version": SCHEMA_VERSION, **asdict(header)})

    @property
    def num_open_requests(self) -> int:
        """Requests that the scheduler may still name."""
        return len(self._open)

    @_guarded
    def add(
        self,
        request: Request,
        now: float,
        *,
        refusal: Overloaded | SLOUnattainable | None = None,
        adoption: RecordedAdoption | None = None,
    ) -> None:
        """Log a request that the scheduler took, or refused for want of capacity; or that it adopted.

        Parameters
        ----------
        now : the time that it was given; seconds.
        refusal : what it raised.
        adoption : by which hand-over it came, and how it stood; None of one that was added.
        """
        chain = HashChain(self._block_size, request.cache_salt) if self._logs_hashes else None
        opened = _OpenRequest(self._num_requests, chain)
        self._num_requests += 1
        if refusal is None:
            self._open[request.request_id] = opened
        call: dict[str, Any] = {
            "call": "add",
            "now": now,
            "request": opened.number,
            "request_id": printable(request.request_id),
            "arrival": request.arrival,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "max_tokens": request.sampling.max_tokens,
        }
        if request.whole is not None:
            call["whole"] = [printable(request.whole.whole_id), *request.whole[1:]]
        if request.priority:
            call["priority"] = request.priority
        if request.resumed_token_ids:
            call["num_resumed_tokens"] = len(request.resumed_token_ids)
            call["first_token_time"] = request.first_token_time
        put_kv(call, request, adoption)
        if chain is not None:
            token_ids = (request.prompt_token_ids, request.resumed_token_ids)
            if hashes := [each for ids in token_ids for each in chain.extend(ids)]:
                call["block_hashes"] = hashes
        put_objectives(call, request)
        if refusal is not None:
            call["refused"] = [refusal.code]
            if isinstance(refusal, SLOUnattainable):
                call["refused"] += [refusal.predicted_ttft, refusal.retry_after]
            elif refusal.retry_after is not None:
                call["refused"] += [None, refusal.retry_after]
        self._write(call)

    @_guarded
    def handover(
        self,
        verb: HandoverVerb,
        name: str,
        now: float,
        *,
        num_tokens: int | None = None,
        block_ids: Sequence[int] | None = None,
        is_out: bool | None = None,
    ) -> None:
        """Log a verb of `Handovers`, all but `adopt`; see `HandoverCall`."""
        call: dict[str, Any] = {"call": "handover", "now": now, "verb": verb, "id": printable(name)}
        for key, value in (("num_tokens", num_tokens), ("block_ids", block_ids), ("is_out", is_out)):
            if value is not None:
                call[key] = value
        if verb == "free" and (opened := self._open.get(name)) is not None:
            self._end(name, opened)
        self._write(call)

    @_guarded
    def abort(self, request_ids: Iterable[str], now: float) -> None:
        """Log requests that were dropped; ids that the scheduler does not know change nothing in it."""
        numbers = []
        for request_id in request_ids:
            opened = self._open.get(request_id)
            if opened is not None and not opened.has_ended:
                numbers.append(opened.number)
                self._end(request_id, opened)
        if numbers:
            self._write({"call": "abort", "now": now, "requests": numbers})

    @_guarded
    def schedule(
        self,
        scheduled: SchedulerOutput | None,
        now: float,
        *,
        num_preempted: int,
        predicted_seconds: float | None = None,
        expired: Sequence[RequestOutput] = (),
    ) -> None:
        """Log a plan.

        Of calls in a row that neither plan nor preempt nor give up anything only the first is logged: they
        change nothing, and an engine that asks again and again must not fill the disk. With a step-time model
        all are, since a policy that plans by time may care when it is asked.

        Parameters
        ----------
        scheduled : what `Scheduler.schedule` returned.
        now : the time that it was given; seconds.
        num_preempted : requests that it took out of the batch.
        predicted_seconds : what the scheduler's step-time model then expected of the step.
        expired : last outputs of the requests that it ended in the queue.
        """
        call: dict[str, Any] = {"call": "schedule", "now": now}
        if expired:
            call["expired"] = [self._expire(output.request_id) for output in expired]
        if scheduled is None:
            if num_preempted or expired or self._logs_idle_plans or not self._is_idle:
                self._write(call)
                self._is_idle = True
            return
        call["step_id"] = scheduled.step_id
        if predicted_seconds is not None:
            call["predicted_seconds"] = predicted_seconds
        if scheduled.released_ids:
            call["released"] = [self._release(request_id) for request_id in scheduled.released_ids]
        if scheduled.admitted:
            admitted = []
            for admission in scheduled.admitted:
                opened = self._open[admission.request.request_id]
                opened.is_in_batch = True
                admitted.append([opened.number, len(admission.output_token_ids), admission.block_ids])
            call["admitted"] = admitted
        self._put_rows(call, scheduled.rows)
        self._write(call)

    @_guarded
    def update(
        self,
        scheduled: SchedulerOutput,
        result: ModelRunnerOutput,
        outputs: Sequence[RequestOutput],
        *,
        now: float,
        seconds: float,
    ) -> None:
        """Log a step that came back.

        Parameters
        ----------
        scheduled, result : what the scheduler was given.
        outputs : what it answered.
        now : the time that it was given; seconds.
        seconds : how long the step took.
        """
        call: dict[str, Any] = {
            "call": "update",
            "now": now,
            "step_id": scheduled.step_id,
            "seconds": seconds,
        }
        put_counts(call, scheduled, result, outputs)
        if result.guided is not None:
            call["guide_seconds"] = result.guided.seconds
            took = [(self._open.get(name), seconds) for name, seconds in result.guided.row_seconds.items()]
            call["row_guide_seconds"] = {str(each.number): seconds for each, seconds in took if each}
        finished: dict[str, str] = {}
        failed: list[int] = []
        faults: list[int] = []
        hashes: dict[str, list[str]] = {}
        for output in outputs:
            opened = self._open[output.request_id]
            if opened.chain is not None and (full := opened.chain.extend(output.new_token_ids)):
                hashes[str(opened.number)] = full
            if output.finish_reason is FinishReason.ERROR:
                failed.append(opened.number)
                if output.error_code is not None:
                    faults.append(opened.number)
                self._end(output.request_id, opened)
            elif output.finish_reason is not None:
                finished[str(opened.number)] = output.finish_reason.value
                self._end(output.request_id, opened)
        for name, value in (("finished", finished), ("failed", failed), ("faults", faults)):
            if value:
                call[name] = value
        if hashes:
            call["block_hashes"] = hashes
        self._write(call)

    def close(self) -> None:
        """Write the trailer and close the file."""
        self._append({"call": "end", "calls": self._num_calls})
        self.sink.close()

    def _put_rows(self, call: dict[str, Any], scheduled_rows: Sequence[ScheduledRequest]) -> None:
        """Put the rows in as one flat list of four numbers each: a step may have hundreds.

        Drafts are a list of their own, which is there only where a row has any.
        """
        open_requests = self._open
        rows: list[int] = []
        blocks: dict[str, tuple[int, ...]] = {}
        has_drafts = False
        for index, row in enumerate(scheduled_rows):
            request_id, num_computed, num_new, block_ids, samples, num_drafts = row
            rows += (open_requests[request_id].number, num_computed, num_new, 1 if samples else 0)
            if block_ids:
                blocks[str(index)] = block_ids
            has_drafts |= num_drafts > 0
        call["rows"] = rows
        if has_drafts:
            call["drafts"] = [row.num_draft_tokens for row in scheduled_rows]
        if blocks:
            call["new_block_ids"] = blocks

    def _end(self, request_id: str, opened: _OpenRequest) -> None:
        """Note that a request delivers no more; the scheduler still names it until its batch lets it go."""
        opened.has_ended = True
        if not opened.is_in_batch:
            del self._open[request_id]

    def _expire(self, request_id: str) -> int:
        opened = self._open[request_id]
        self._end(request_id, opened)
        return opened.number

    def _release(self, request_id: str) -> int | str:
        opened = self._open.get(request_id)
        if opened is None:
            return printable(request_id)
        opened.is_in_batch = False
        if opened.has_ended:
            del self._open[request_id]
        return opened.number

    def _write(self, call: dict[str, Any]) -> None:
        self._is_idle = False
        self._num_calls += 1
        self._append(call)

    def _append(self, line: dict[str, Any]) -> None:
        self.sink.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def create_record(path: Path) -> Callable[[RecordHeader], RecordWriter]:
    """Create a record file; return what starts the record once the header is known.

    Raises
    ------
    ConfigError : the file cannot be created.
    """
    sink = BackgroundFile(path, "record", is_packed=True)
    return lambda header: RecordWriter(sink, header)
