"""What became of the drafts of a step, for metrics and for what the step has cost."""

from __future__ import annotations

from itertools import repeat

from onbeat.core.request import RequestOutput
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_stats import DraftStats


def draft_stats(
    scheduled: SchedulerOutput,
    result: ModelRunnerOutput,
    outputs: list[RequestOutput],
    *,
    expected_tokens: float,
) -> DraftStats | None:
    """Count what speculation did in a step.

    Parameters
    ----------
    scheduled : the step.
    result : what the model runner gave for it.
    outputs : what `Scheduler.update` returns for it. Rows of requests that had ended before are not counted.
    expected_tokens : that its decode rows were expected to deliver.

    Returns
    -------
    None where the step had no decode row.
    """
    if not expected_tokens:
        return None
    stats = DraftStats([], [], [], 0, expected_tokens)
    # A step of decodes alone without drafts is the most common, and needs no look at its rows.
    if result.num_drafted is None and not (scheduled.admitted or scheduled.shape.num_chunks):
        stats.num_tokens = sum([len(output.new_token_ids) for output in outputs])
        stats.lengths = [len(outputs)]
        return stats
    delivered = {output.request_id: len(output.new_token_ids) for output in outputs}
    admitted_ids = {admitted.request.request_id for admitted in scheduled.admitted}
    sampling = (row for row in scheduled.rows if row.samples)
    num_drafted_of = repeat(0) if result.num_drafted is None else result.num_drafted
    for row, token_ids, num_drafted in zip(sampling, result.sampled_token_ids, num_drafted_of, strict=False):
        is_decode = row.num_new_tokens - row.num_draft_tokens == 1 and row.request_id not in admitted_ids
        if not is_decode or row.request_id not in delivered:
            continue
        stats.num_tokens += delivered[row.request_id]
        _count(stats.lengths, row.num_draft_tokens)
        for position in range(num_drafted):
            _count(stats.drafted_at, position)
        for position in range(len(token_ids) - 1 if num_drafted else 0):
            _count(stats.accepted_at, position)
    return stats


def _count(counts: list[int], index: int) -> None:
    """Add one at an index; the list grows as far as that."""
    if index >= len(counts):
        counts += [0] * (index + 1 - len(counts))
    counts[index] += 1


def correct_shape(scheduled: SchedulerOutput, drafted: list[int]) -> None:
    """Take the drafts out of a step's shape that were planned but could not be proposed.

    Parameters
    ----------
    drafted : `ModelRunnerOutput.num_drafted`.
    """
    if not scheduled.shape.num_draft_tokens:
        return
    shape = scheduled.shape
    sampling = (row for row in scheduled.rows if row.samples)
    for row, num_drafted in zip(sampling, drafted, strict=True):
        num_missing = row.num_draft_tokens - num_drafted
        if num_missing:
            shape.num_new_tokens -= num_missing
            shape.num_draft_tokens -= num_missing
            shape.num_lm_head_rows -= num_missing
            shape.decode_context_tokens -= num_missing
            shape.num_verify_rows -= num_drafted == 0
