"""Write down what a scheduler is asked and what it decides, while it serves.

The parts of a record's calls: what each looks like in the file.

The identity of a request's prefix blocks, kept beside the scheduler's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import msgspec

from onbeat.background_file import BackgroundFile
from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import UNKNOWN_GRAMMAR, FinishReason, Request, RequestOutput
from onbeat.core.step import AdmittedRequest, ModelRunnerOutput, SchedulerOutput
from onbeat.recording import log
from onbeat.typed import Hash

LOGGED_BYTES = 8
"""Of each 16-byte hash: among a thousand million blocks two would be mixed up with odds of 1 in 37."""


class HashChain:
    """Hashes the full blocks of a growing token sequence, and keeps none of them.

    Parameters
    ----------
    block_size : tokens a block holds.
    root : `root_hash` of the request.
    """

    __slots__ = ("_block_size", "_open_ids", "_parent")

    def __init__(self, block_size: int, root: bytes) -> None:
        self._block_size = block_size
        self._parent = root
        self._open_ids: list[int] = []
        """Tokens of the last block, which is not full."""

    def extend(self, token_ids: Sequence[int]) -> list[Hash]:
        """Append tokens; return the hashes of the blocks that this filled, shortened."""
        pending, size = self._open_ids, self._block_size
        pending += token_ids
        if len(pending) < size:
            return []
        hashes = hash_blocks(self._parent, pending, size)
        self._parent = hashes[-1]
        del pending[: len(hashes) * size]
        return [Hash(each[:LOGGED_BYTES]) for each in hashes]


logger = logging.getLogger("onbeat.recording")

_ENCODER = msgspec.json.Encoder(enc_hook=bytes.hex)


P = ParamSpec("P")


class _OpenRequest:
    """What the writer must know of a request as long as the scheduler may name it."""

    __slots__ = ("chain", "has_ended", "is_in_batch", "number")

    def __init__(self, number: int, chain: HashChain | None) -> None:
        self.number = number
        self.chain = chain
        self.is_in_batch = False
        self.has_ended = False


def _guarded(
    method: Callable[Concatenate[RecordWriter, P], None],
) -> Callable[Concatenate[RecordWriter, P], None]:
    """Let a failure of the record end the record only: the step loop that calls it goes on."""

    @wraps(method)
    def guarded(writer: RecordWriter, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if writer.sink.is_broken:
            return
        try:
            method(writer, *args, **kwargs)
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

    def __init__(self, sink: BackgroundFile, header: log.RecordHeader) -> None:
        self.sink = sink
        self._block_size: int = header.scheduler["block_size"]
        self._logs_hashes: bool = header.scheduler["enable_prefix_caching"]
        self._open: dict[str, _OpenRequest] = {}
        self._num_requests = 0
        self._num_calls = 0
        self._is_idle = False
        """Whether the last call was one that planned nothing."""
        self._logs_idle_plans = header.step_time is not None
        self._append({"file": log.FILE_KIND, "schema_version": log.SCHEMA_VERSION, **asdict(header)})

    @_guarded
    def add(
        self,
        request: Request,
        now: float,
        *,
        refusal: Overloaded | SLOUnattainable | None = None,
        adoption: log.RecordedAdoption | None = None,
    ) -> None:
        """Log a request that the scheduler took, or refused for want of capacity; or that it adopted.

        Parameters
        ----------
        now : the time that it was given; seconds.
        refusal : what it raised.
        adoption : by which hand-over it came, and how it stood; None of one that was added.
        """
        root = root_hash(request.cache_salt, request.adapter)
        chain = HashChain(self._block_size, root) if self._logs_hashes else None
        opened = _OpenRequest(self._num_requests, chain)
        self._num_requests += 1
        if refusal is None:
            self._open[request.request_id] = opened
        slo, grammar, whole = request.slo, request.sampling.grammar, request.whole
        hashes: list[Hash] = []
        if chain is not None:
            hashes = chain.extend(request.prompt_token_ids) + chain.extend(request.resumed_token_ids)
        call = log.AddCall(
            now=now,
            request=opened.number,
            request_id=printable(request.request_id),
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            block_hashes=tuple(hashes),
            slo=None if slo is None else (slo.ttft, slo.tbt, slo.e2e),
            slo_class=request.slo_class and printable(request.slo_class),
            tenant=request.tenant and printable(request.tenant),
            whole=None if whole is None else (printable(whole.whole_id), *whole[1:]),
            refused=None if refusal is None else log.RecordedRefusal.of(refusal),
            num_resumed_tokens=len(request.resumed_token_ids),
            first_token_time=request.first_token_time if request.resumed_token_ids else None,
            adoption=adoption and adoption._replace(handover_id=printable(adoption.handover_id)),
            is_scored=request.num_prompt_logprobs is not None,
            is_guided=grammar is not None,
            guide_seconds=UNKNOWN_GRAMMAR.seconds if grammar is None else grammar.seconds,
            **{name: getattr(request, name) for name in log.AS_THEY_ARE},
        )
        self._write(call)

    @_guarded
    def handover(
        self,
        verb: log.HandoverVerb,
        name: str,
        now: float,
        *,
        num_tokens: int | None = None,
        block_ids: Sequence[int] | None = None,
        is_out: bool | None = None,
    ) -> None:
        """Log a verb of `Handovers`, all but `adopt`; see `HandoverCall`."""
        if verb == "free" and (opened := self._open.get(name)) is not None:
            self._end(name, opened)
        blocks = None if block_ids is None else tuple(block_ids)
        self._write(log.HandoverCall(now, verb, printable(name), num_tokens, blocks, is_out))

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
            self._write(log.AbortCall(now, tuple(numbers)))

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
        gone = tuple(self._expire(output.request_id) for output in expired)
        if scheduled is None:
            if num_preempted or expired or self._logs_idle_plans or not self._is_idle:
                self._write(log.ScheduleCall(now, expired=gone))
                self._is_idle = True
            return
        released = tuple(self._release(request_id) for request_id in scheduled.released_ids)
        for admission in scheduled.admitted:
            self._open[admission.request.request_id].is_in_batch = True
        rows: list[int] = []
        drafts: list[int] = []
        blocks: dict[int, tuple[int, ...]] = {}
        for place, (name, computed, new, block_ids, samples, num_drafts) in enumerate(scheduled.rows):
            rows += (self._open[name].number, computed, new, 1 if samples else 0)
            drafts.append(num_drafts)
            if block_ids:
                blocks[place] = block_ids
        self._write(
            log.ScheduleCall(
                now,
                scheduled.step_id,
                tuple(rows),
                tuple(drafts) if any(drafts) else None,
                blocks,
                tuple(map(self._admission, scheduled.admitted)),
                released,
                predicted_seconds,
                gone,
            )
        )

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
        finished: dict[int, FinishReason] = {}
        failed: list[int] = []
        faults: list[int] = []
        hashes: dict[int, tuple[Hash, ...]] = {}
        guide_seconds, row_seconds = None, {}
        if (guided := result.guided) is not None:
            took = [(self._open.get(name), own) for name, own in guided.row_seconds.items()]
            guide_seconds, row_seconds = guided.seconds, {each.number: own for each, own in took if each}
        for output in outputs:
            opened = self._open[output.request_id]
            if opened.chain is not None and (full := opened.chain.extend(output.new_token_ids)):
                hashes[opened.number] = tuple(full)
            if output.finish_reason is FinishReason.ERROR:
                failed.append(opened.number)
                if output.error_code is not None:
                    faults.append(opened.number)
            elif output.finish_reason is not None:
                finished[opened.number] = output.finish_reason
            if output.finish_reason is not None:
                self._end(output.request_id, opened)
        counts, undelivered = _counts(scheduled, result, outputs)
        has_drafts = any(row.num_draft_tokens for row in scheduled.rows)
        self._write(
            log.UpdateCall(
                now,
                scheduled.step_id,
                seconds,
                counts=counts,
                drafted=_tuple(result.num_drafted) if has_drafts else None,
                available=_tuple(result.num_available),
                undelivered=undelivered,
                finished=finished,
                failed=tuple(failed),
                faults=tuple(faults),
                guide_seconds=guide_seconds,
                row_guide_seconds=row_seconds,
                block_hashes=hashes,
            )
        )

    def close(self) -> None:
        """Write the trailer and close the file."""
        self._append(log.Trailer(self._num_calls))
        self.sink.close()

    def _admission(self, admitted: AdmittedRequest) -> log.RecordedAdmission:
        number = self._open[admitted.request.request_id].number
        return log.RecordedAdmission(number, len(admitted.output_token_ids), tuple(admitted.block_ids))

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

    def _write(self, call: log.Call) -> None:
        self._is_idle = False
        self._num_calls += 1
        self._append(call)

    def _append(self, line: log.Call | log.Trailer | Mapping[str, Any]) -> None:
        self.sink.write(_ENCODER.encode(line) + b"\n")


def _counts(
    scheduled: SchedulerOutput, result: ModelRunnerOutput, outputs: Sequence[RequestOutput]
) -> tuple[tuple[int, ...] | None, dict[int, int]]:
    """Return the tokens of each row that samples, and beyond the end of its request; None: one each."""
    counts = tuple(len(token_ids) for token_ids in result.sampled_token_ids)
    if counts.count(1) == len(counts):
        return None, {}
    taken = {output.request_id: len(output.new_token_ids) for output in outputs}
    ids = (row.request_id for row in scheduled.rows if row.samples)
    delivered = tuple(taken.get(name, count) for name, count in zip(ids, counts, strict=True))
    pairs = enumerate(zip(counts, delivered, strict=True))
    return delivered, {row: count - own for row, (count, own) in pairs if count > own}


def _tuple(numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


def printable(name: str) -> str:
    """Return an id as it can stand in a file: clients may send halves of characters."""
    return name.encode(errors="backslashreplace").decode()


def create_record(path: Path) -> Callable[[log.RecordHeader], RecordWriter]:
    """Create a record file; return what starts the record once the header is known.

    Raises
    ------
    ConfigError : the file cannot be created.
    """
    sink = BackgroundFile(path, "record", is_packed=True)
    return lambda header: RecordWriter(sink, header)
