"""What became of a step's drafts, as counts for metrics."""

from __future__ import annotations

from onbeat.core.request import RequestOutput
from onbeat.core.step import DraftStats, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.rows import sampled_rows


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
    for row, (token_ids, _, num_drafted, _) in zip(
        (row for row in scheduled.rows if row.samples), sampled_rows(result), strict=True
    ):
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
