"""The parts of a record's calls: what each looks like in the file."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Any

from onbeat.core.request import Request, RequestOutput
from onbeat.core.slo import ShedMode
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.recording.log import DEADLINES, RecordedAdoption


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
        call["adoption"] = _adoption_list(adoption)


def _adoption_list(adoption: RecordedAdoption) -> list[Any]:
    """Return an adoption as a list; JSON has no infinity, so that is null."""
    deadlines = adoption.deadlines
    stood = None
    if deadlines is not None:
        values = (getattr(deadlines, name) for name in DEADLINES)
        stood = [None if isinstance(value, float) and isinf(value) else value for value in values]
    return [printable(adoption.handover_id), *adoption[1:4], stood]


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
