"""Counts of a step's drafts, as metrics report them."""

from __future__ import annotations

from onbeat.core.request import RequestOutput
from onbeat.core.step import AdmittedRequest, BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.scheduler.replica.speculation.verified import draft_stats
from tests.pure.scheduler.speculating import SpeculatingDriver, make_config, make_request


def make_step(rows: list[ScheduledRequest], *, admitted=()) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), tuple(admitted), (), BatchShape())


def decode(request_id: str, num_drafts: int) -> ScheduledRequest:
    return ScheduledRequest(request_id, 10, 1 + num_drafts, (), True, num_drafts)


def delivery(request_id: str, num_tokens: int) -> RequestOutput:
    return RequestOutput(request_id, [1] * num_tokens)


def test_counts_rows_by_length_and_drafts_by_position():
    step = make_step([decode("a", 3), decode("b", 0), decode("c", 3), decode("d", 1)])
    result = ModelRunnerOutput([[1, 1, 1], [1], [1], [1]], num_drafted=[3, 0, 2, 0])
    outputs = [delivery("a", 3), delivery("b", 1), delivery("c", 1), delivery("d", 1)]
    stats = draft_stats(step, result, outputs, expected_tokens=5.5)
    assert stats is not None
    assert stats.lengths == [1, 1, 0, 2]
    assert stats.drafted_at == [2, 2, 1]
    assert stats.accepted_at == [1, 1]
    assert (stats.num_tokens, stats.expected_tokens) == (6, 5.5)


def test_counts_what_was_delivered_not_what_came_behind_the_end():
    step = make_step([decode("a", 3), decode("gone", 2)])
    result = ModelRunnerOutput([[1, 1, 1, 1], [1, 1, 1]], num_drafted=[3, 2])
    stats = draft_stats(step, result, [delivery("a", 2)], expected_tokens=1.0)
    assert stats is not None
    assert stats.num_tokens == 2
    assert stats.lengths == [0, 0, 0, 1]
    assert stats.accepted_at == [1, 1, 1]


def test_leaves_out_chunks_and_admissions():
    request = make_request("new", 5, 2)
    rows = [
        decode("a", 0),
        ScheduledRequest("chunk", 0, 4, (), True),
        ScheduledRequest("new", 4, 1, (), True),
    ]
    step = make_step(
        [*rows, ScheduledRequest("half", 0, 4, (), False)], admitted=[AdmittedRequest(request, (), ())]
    )
    result = ModelRunnerOutput([[1], [1], [1]])
    outputs = [delivery(name, 1) for name in ("a", "chunk", "new")]
    stats = draft_stats(step, result, outputs, expected_tokens=1.0)
    assert stats is not None
    assert (stats.lengths, stats.drafted_at, stats.num_tokens) == ([1], [], 1)


def test_says_nothing_where_nothing_is_speculated():
    result, step = ModelRunnerOutput([[1]]), make_step([decode("a", 0)])
    assert draft_stats(step, result, [delivery("a", 1)], expected_tokens=0.0) is None


def test_agrees_with_what_requests_are_told():
    driver = SpeculatingDriver(make_config(k=5), seed=2)
    for index in range(6):
        driver.add(make_request(f"r{index}", 20, 50))
    driver.run()
    driver.check_end()
    drafted = sum(sum(stats.drafted_at) for stats in driver.stats)
    accepted = sum(sum(stats.accepted_at) for stats in driver.stats)
    assert (drafted, accepted) == tuple(map(sum, zip(*driver.counts.values(), strict=True)))
    first_tokens = len(driver.requests)
    assert sum(stats.num_tokens for stats in driver.stats) == 6 * 50 - first_tokens
