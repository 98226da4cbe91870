"""Write what steps and requests did as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

Each replica has a process by its name (`engine r0`), with its steps and counters of its queues and KV use.
Each open request has a track with its spans: `queued` (arrival to first step), `prefill` (to the first
delivery), `decode` (to the end), and marks for prompt chunks, preemptions, relegation and refusal. Tracks are
used again, so there are as many as requests were ever open at once.

The file is a JSON array written event by event: memory stays bounded, and of a killed run everything is
readable but the last second: viewers accept an array without its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from onbeat.background_file import BackgroundFile
from onbeat.core.fleet import replica_id
from onbeat.core.slo import Fate
from onbeat.core.step_stats import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.tracker import RunListener

_REQUESTS = 1
"""Process number of the requests' tracks; those of the replicas' steps and counters come after it."""


class Timeline(RunListener):
    """A `metrics.tracker.RunListener` that writes Chrome's trace event format.

    Parameters
    ----------
    file : whoever opened it ends the array.
    """

    def __init__(self, file: BackgroundFile) -> None:
        self._file = file
        self._tracks: dict[str, int] = {}
        self._refusals: dict[str, str] = {}
        """Request -> why it is being refused."""
        self._free_tracks: list[int] = []
        self._num_tracks = 0
        self._engines: dict[int, int] = {}
        """Replica -> the process number of its steps."""
        self._has_budgets = False
        """Whether the policy has given any step a budget."""
        file.write(b"[\n" + orjson.dumps(_name_event("process_name", "requests", pid=_REQUESTS)))

    def on_request(self, record: RequestRecord) -> None:
        """Give a request its track."""
        if self._free_tracks:
            self._tracks[record.request_id] = heapq.heappop(self._free_tracks)
            return
        self._tracks[record.request_id] = self._num_tracks
        self._write(
            _name_event("thread_name", f"request {self._num_tracks}", pid=_REQUESTS, tid=self._num_tracks)
        )
        self._num_tracks += 1

    def on_step(self, stats: StepStats, replica: int = 0) -> None:
        """Write a step, the counters after it, and marks for its prompt chunks."""
        shape = stats.shape
        engine = self._engine(replica)
        self._write(
            {
                **_span("step", engine, 0, stats.start, stats.end),
                "args": {
                    "step": stats.step_id,
                    "tokens": shape.num_new_tokens,
                    "rows": shape.num_sequences,
                    "decodes": shape.num_decodes,
                    "chunks": shape.num_chunks,
                    "chunk_tokens": shape.num_chunk_tokens,
                    "decode_context_tokens": shape.decode_context_tokens,
                    "running": stats.num_running,
                    "waiting": stats.num_waiting,
                    "preemptions": stats.num_preemptions,
                    "schedule_us": round(stats.schedule_seconds * 1e6, 1),
                    "update_us": round(stats.update_seconds * 1e6, 1),
                    **_judgement(stats),
                    **_drafts(stats),
                },
            }
        )
        self._has_budgets |= stats.budget_seconds is not None
        if expected := self._expected(stats):
            # At the start of the step, so that the counter's level lies over the step that it is of.
            actual = _milliseconds(stats.end - stats.start)
            self._write(_counter("step time (ms)", engine, stats.start, actual=actual, **expected))
        if stats.mbu is not None and stats.mfu is not None:
            self._write(
                _counter("utilisation", engine, stats.start, mbu=round(stats.mbu, 4), mfu=round(stats.mfu, 4))
            )
        if drafts := _drafts(stats):
            self._write(_counter("draft tokens", engine, stats.start, **drafts))
        self._write(
            _counter("requests", engine, stats.end, running=stats.num_running, waiting=stats.num_waiting)
        )
        self._write(_counter("kv blocks", engine, stats.end, used=stats.num_used_blocks))
        about = {"step": stats.step_id, "replica": replica_id(replica)}
        for request_id in stats.chunk_request_ids:
            if request_id in self._tracks:
                self._mark("chunk", self._tracks[request_id], stats.start, **about)

    def on_delivery(self, record: RequestRecord) -> None:
        """Write what came before the first delivery, and begin the decode span there."""
        if len(record.delivery_times) > 1:
            return
        track, first = self._tracks[record.request_id], record.delivery_times[0]
        scheduled = first if record.scheduled is None else record.scheduled
        name = {"request": record.request_id}
        cached = {"prompt_tokens": record.num_prompt_tokens, "cached_tokens": record.num_cached_tokens}
        self._write({**_span("queued", _REQUESTS, track, record.arrival, scheduled), "args": name})
        self._write({**_span("prefill", _REQUESTS, track, scheduled, first), "args": {**name, **cached}})
        self._write({**_event("decode", "B", _REQUESTS, track, first), "args": name})

    def on_preemption(self, record: RequestRecord, now: float) -> None:
        """Mark a preemption."""
        self._mark("preempted", self._tracks[record.request_id], now, preemptions=record.num_preemptions)

    def on_relegation(self, record: RequestRecord, now: float) -> None:
        """Mark that a request is served as best effort from now on."""
        self._mark("relegated", self._tracks[record.request_id], now)

    def on_refusal(self, record: RequestRecord, reason: str) -> None:
        """Remember why; the end of the request shows it."""
        self._refusals[record.request_id] = reason

    def on_finish(self, record: RequestRecord) -> None:
        """End a request's span and free its track."""
        track = self._tracks.pop(record.request_id)
        if record.fate in (Fate.REJECTED, Fate.EXPIRED, Fate.OVERDUE):
            self._mark_refusal(record, track)
        heapq.heappush(self._free_tracks, track)
        args = {
            "request": record.request_id,
            "output_tokens": record.num_output_tokens,
            "finish": record.finish_reason,
            "preemptions": record.num_preemptions,
        }
        if record.delivery_times:
            self._write({**_event("decode", "E", _REQUESTS, track, record.end), "args": args})
        else:
            self._write({**_span("no output", _REQUESTS, track, record.arrival, record.end), "args": args})

    def _mark_refusal(self, record: RequestRecord, track: int) -> None:
        """Mark that a request was rejected or expired, and why as far as that is known."""
        args: dict[str, Any] = {}
        if reason := self._refusals.pop(record.request_id, None):
            args["reason"] = reason
        if record.predicted_ttft is not None:
            args["predicted_ttft_ms"] = _milliseconds(record.predicted_ttft)
        self._mark(record.finish_reason or "rejected", track, record.end, **args)

    def _expected(self, stats: StepStats) -> dict[str, float]:
        """Return the levels beside a step's time; a policy with budgets has 0 where none bound the step."""
        levels: dict[str, float] = {}
        if stats.predicted_seconds is not None:
            levels["predicted"] = _milliseconds(stats.predicted_seconds)
        if self._has_budgets:
            levels["budget"] = _milliseconds(stats.budget_seconds or 0.0)
        return levels

    def _engine(self, replica: int) -> int:
        """Return the process number of a replica's steps; a new one gets its name."""
        if replica not in self._engines:
            engine = self._engines[replica] = _REQUESTS + 1 + replica
            self._write(_name_event("process_name", f"engine {replica_id(replica)}", pid=engine))
            self._write(_name_event("thread_name", "steps", pid=engine))
        return self._engines[replica]

    def _mark(self, name: str, track: int, time: float, **args: Any) -> None:
        self._write({**_event(name, "i", _REQUESTS, track, time), "s": "t", "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        # the comma goes first, so that the file is one bracket away from valid JSON at any time
        self._file.write(b",\n" + orjson.dumps(event))


@contextmanager
def open_timeline(path: Path, *, is_live: bool = False) -> Iterator[Timeline]:
    """Write a timeline to a file while the block runs; a new one is for this user alone.

    Parameters
    ----------
    is_live : never wait for the disk: one that hangs ends the file.

    Raises
    ------
    ConfigError : the file cannot be created.
    """
    file = BackgroundFile(path, "timeline", is_packed=False, waits=not is_live)
    try:
        yield Timeline(file)
    finally:
        file.write(b"\n]\n")
        file.close()


def _event(name: str, phase: str, pid: int, tid: int, time: float) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": pid, "tid": tid, "ts": _microseconds(time)}


def _span(name: str, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    duration = max(_microseconds(end) - _microseconds(start), 0.0)
    return {**_event(name, "X", pid, tid, start), "dur": round(duration, 3)}


def _judgement(stats: StepStats) -> dict[str, float | str]:
    """Return what was expected of a step and what it reached, as far as that is known."""
    values: dict[str, float | str] = {"actual_ms": _milliseconds(stats.end - stats.start)}
    if stats.predicted_seconds is not None:
        values["predicted_ms"] = _milliseconds(stats.predicted_seconds)
    if stats.budget_seconds is not None:
        values["budget_ms"] = _milliseconds(stats.budget_seconds)
    if stats.budget_request_id is not None:
        values["budget_set_by"] = stats.budget_request_id
    if stats.mbu is not None:
        values["mbu"] = round(stats.mbu, 4)
    if stats.mfu is not None:
        values["mfu"] = round(stats.mfu, 4)
    return values


def _drafts(stats: StepStats) -> dict[str, int]:
    """Return the drafts of a step: planned, verified (the proposer may have had fewer), accepted."""
    drafts = stats.drafts
    if drafts is None:
        return {}
    return {
        "drafts_planned": sum(length * num_rows for length, num_rows in enumerate(drafts.lengths)),
        "drafts_verified": sum(drafts.drafted_at),
        "drafts_accepted": sum(drafts.accepted_at),
    }


def _counter(name: str, engine: int, time: float, **values: float) -> dict[str, Any]:
    return {**_event(name, "C", engine, 0, time), "args": values}


def _name_event(kind: str, name: str, *, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 4)
