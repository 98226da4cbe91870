"""The table of jobs: shares, what is learnt, what is refused, and that nothing stays for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import InvalidRequest, Overloaded, SLOUnattainable
from onbeat.core.request import Placement
from onbeat.core.slo import LONGEST_OBJECTIVE, SLO
from onbeat.jobs import table as module
from onbeat.jobs.call import CallShare, JobCall, JobEnd, call_seconds
from onbeat.jobs.table import FORGOTTEN_AFTER, LONGEST_KEPT, MOST_KINDS, MOST_TENANTS, JobTable, OpenCall


def call(name: str = "a", **stated: Any) -> JobCall:
    return JobCall(job_id=name, **{"e2e": 10.0, "calls_left": 1, **stated})


def opened(
    table: JobTable, now: float, *, prompt: int = 128, refuses: bool = False, **stated: Any
) -> OpenCall:
    return table.open(call(**stated), now, num_prompt_tokens=prompt, max_tokens=60, refuses=refuses)


def run(table: JobTable, now: float, seconds: float = 1.0, **stated: Any) -> None:
    """Let a call come and go."""
    table.close(opened(table, now, **stated), now + seconds, num_output_tokens=60, why=None)


def test_a_first_call_shares_by_work_while_nothing_is_known() -> None:
    share = opened(JobTable(), 0.0, calls_left=4).share
    assert share.e2e == pytest.approx(10.0 * 65 / (65 + 4 * 260))
    assert share.predicted_job is None


def test_a_call_may_take_all_but_what_later_calls_usually_take() -> None:
    table = JobTable()
    run(table, 0.0, name="x", calls_left=0)  # 65 units of work in a second
    first = opened(table, 1.0, calls_left=2)
    assert first.share.e2e == pytest.approx(10.0 - 2.0)
    assert first.share.predicted_job == pytest.approx(3.0)
    table.close(first, 2.0, num_output_tokens=60, why=None)
    last = opened(table, 4.0, prompt=128 + 60 + 128, calls_left=0)
    assert last.new_tokens == 128, "the prompt goes on behind the one before it"
    assert last.share.e2e == pytest.approx(7.0), "ten seconds, of which three have passed"


def test_where_time_is_too_short_for_all_calls_they_share_it_by_work() -> None:
    table = JobTable()
    run(table, 0.0, name="x", calls_left=0)
    assert opened(table, 1.0, calls_left=3, e2e=3.0).share.e2e == pytest.approx(max(3.0 / 4, 1.0))
    assert call_seconds(8.0, own_work=1.0, later_work=3.0, pace=0.0) == pytest.approx(2.0)
    assert call_seconds(8.0, own_work=1.0, later_work=3.0, pace=1.0) == pytest.approx(5.0)


def test_calls_left_and_times_between_calls_are_learnt_by_class() -> None:
    table = JobTable()
    for number in range(8):
        for stage in range(3):
            left = 0 if stage == 2 else None
            run(
                table, 100.0 * number + 3.0 * stage, name=str(number), kind="agent", calls_left=left, e2e=60.0
            )
    share = opened(table, 900.0, kind="agent", calls_left=None, e2e=60.0).share
    assert share.e2e == pytest.approx(60.0 - 2 * (2.0 + 1.0), rel=0.05)
    other = opened(table, 900.0, name="b", kind="other", calls_left=None, e2e=60.0).share
    assert other.e2e != share.e2e


def test_a_call_may_take_what_is_left_of_its_job_however_little_and_is_best_effort_once_nothing_is() -> None:
    table = JobTable()
    run(table, 0.0, calls_left=1)  # no call was quicker than a second
    last = opened(table, 9.5, calls_left=0).share
    assert last.objectives(SLO(ttft=1.0)) == SLO(ttft=1.0, e2e=0.5)
    late = opened(table, 10.0, calls_left=0).share
    assert (late.e2e, late.objectives(SLO(ttft=1.0))) == (None, None)


def test_the_tighter_of_own_objective_and_share_counts() -> None:
    share = CallShare(e2e=4.0, predicted_job=None)
    assert share.objectives(SLO(ttft=1.0, e2e=2.0)) == SLO(ttft=1.0, e2e=2.0)
    assert share.objectives(None) == SLO(e2e=4.0)


@pytest.mark.parametrize(("seconds", "end"), [(1.0, JobEnd.KEPT), (11.0, JobEnd.LATE)])
def test_the_last_call_says_how_the_job_ended(seconds: float, end: JobEnd) -> None:
    ends: list[tuple[JobEnd, float, float]] = []
    table = JobTable(on_end=lambda *each: ends.append(each))
    run(table, 0.0)
    last = opened(table, 2.0, calls_left=0)
    report = table.close(last, 2.0 + seconds, num_output_tokens=1, why=None)
    assert (report.end, report.num_calls, len(table)) == (end, 2, 0)
    assert ends == [(end, 1.0 + seconds, 1.0)]


def test_calls_at_once_end_the_job_together() -> None:
    table = JobTable()
    one, other = opened(table, 0.0, calls_left=0), opened(table, 0.5, calls_left=0)
    assert table.close(one, 2.0, num_output_tokens=1, why=None).end is None
    report = table.close(other, 3.0, num_output_tokens=1, why=None)
    assert (report.end, report.in_calls) == (JobEnd.KEPT, 3.0)


def test_a_refused_call_may_be_sent_again() -> None:
    table = JobTable()
    first = opened(table, 0.0)
    assert table.close(first, 0.1, num_output_tokens=0, why=JobEnd.REFUSED).end is None
    again = opened(table, 1.0, calls_left=0)
    assert again.share.e2e == pytest.approx(9.0), "the deadline counts from the first try"
    assert table.close(again, 2.0, num_output_tokens=1, why=None).end is JobEnd.KEPT


def test_a_refused_call_teaches_nothing_of_later_ones() -> None:
    table = JobTable()
    table.close(opened(table, 0.0, calls_left=4), 0.1, num_output_tokens=0, why=JobEnd.REFUSED)
    again = opened(table, 1.0, calls_left=4, prompt=2 * 128)
    assert again.new_tokens == 2 * 128, "none of them was computed"
    assert again.share.e2e == pytest.approx(9.0 * 66 / (66 + 4 * 260)), "as a first call has it"
    table.close(again, 2.0, num_output_tokens=60, why=None)
    run(table, 3.0, calls_left=0)
    next_job = opened(table, 4.0, name="b", calls_left=None).share
    assert next_job.predicted_job == pytest.approx(3.0, rel=0.05), (
        "two calls, and the second that was between"
    )


def test_a_job_that_cannot_be_done_in_time_is_refused_where_its_caller_asks_for_that() -> None:
    table = JobTable()
    run(table, 0.0, name="x", calls_left=0)
    with pytest.raises(SLOUnattainable, match=r"10 s.*5 s"):
        opened(table, 1.0, calls_left=9, e2e=5.0, refuses=True)
    assert len(table) == 0
    assert opened(table, 1.0, calls_left=9, e2e=5.0).share.e2e is not None


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"e2e": None}, "job 'a'"),
        ({"e2e": None, "deadline": 3.0}, "was 2 s ago; state a time to come"),
        ({"e2e": None, "deadline": 1e6}, "at most 24 h are allowed"),
    ],
)
def test_a_first_call_states_a_deadline_to_come(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        opened(JobTable(), 5.0, **stated)


@given(now=st.floats(0, 1e7) | st.floats(45e3, 65e3))
def test_the_longest_deadline_is_open_to_a_job_at_any_time_of_the_clock(now: float) -> None:
    assert opened(JobTable(), now, e2e=LONGEST_OBJECTIVE).share.e2e


@pytest.mark.parametrize("stated", [{"e2e": 20.0}, {"e2e": None, "deadline": 30.0}])
def test_calls_of_a_job_state_one_deadline(stated: dict[str, Any]) -> None:
    table = JobTable()
    run(table, 0.0)
    with pytest.raises(InvalidRequest, match="first call"):
        opened(table, 1.0, **stated)
    opened(table, 1.0, e2e=None)  # it need not be said again


def test_nobody_joins_a_job_of_another_tenant() -> None:
    table = JobTable()
    run(table, 0.0, tenant="one")
    with pytest.raises(InvalidRequest, match="not open"):
        opened(table, 1.0, tenant="other", e2e=None)


def test_open_jobs_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_JOBS", 20)
    monkeypatch.setattr(module, "MOST_OF_TENANT", 8)
    ends: list[JobEnd] = []
    table = JobTable(on_end=lambda end, _in_calls, _between: ends.append(end))
    for number in range(8):
        run(table, 0.0, name=str(number), tenant="t")
    with pytest.raises(Overloaded, match="8 jobs"):
        opened(table, 0.0, name="more", tenant="t")
    for number in range(12):
        run(table, 0.0, name=str(number))
    assert (len(table), ends) == (20, [])
    for name in ("later", "last"):  # a call looks at some of them
        opened(table, 10.0 + 1.0 + FORGOTTEN_AFTER, name=name)
    assert (len(table), set(ends), len(ends)) == (2, {JobEnd.ABANDONED}, 20)


def test_a_full_book_makes_room_by_the_job_that_has_been_idle_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller who opens jobs without end keeps nobody out, and ends no job that has calls."""
    monkeypatch.setattr(module, "MOST_JOBS", 20)
    ends: list[JobEnd] = []
    table = JobTable(on_end=lambda end, _in_calls, _between: ends.append(end))
    busy = opened(table, 0.0, name="busy", e2e=900.0)
    run(table, 0.0, name="mine", e2e=900.0)
    for number in range(100):
        run(table, 5.0 + number, name=str(number), e2e=900.0)
        if number % 10 == 0:
            run(table, 5.0 + number, name="mine", e2e=900.0)
    assert (len(table), len(ends), set(ends)) == (20, 82, {JobEnd.ABANDONED})
    assert opened(table, 106.0, name="mine", calls_left=0, e2e=900.0).share.e2e == pytest.approx(
        900.0 - 106.0
    )
    assert table.close(busy, 107.0, num_output_tokens=1, why=None).num_calls == 1
    monkeypatch.setattr(module, "MOST_JOBS", 1)
    opened(other := JobTable(), 0.0, name="a")
    with pytest.raises(Overloaded, match="1 jobs"):
        opened(other, 0.0, name="b")


def test_of_many_jobs_that_are_over_a_call_ends_a_few() -> None:
    table = JobTable()
    for number in range(1000):
        run(table, 0.0, name=str(number))
    run(table, 100.0, name="x", calls_left=0)
    assert 1000 - module._MOST_LOOKED_AT <= len(table) < 1000
    with pytest.raises(InvalidRequest, match="not open"):
        opened(table, 100.0, name="999", e2e=None)  # whose turn has not come
    for _ in range(100):
        run(table, 100.0, name="x", calls_left=0)
    assert (len(table), len(table._turns)) == (0, 1)


def test_ids_that_are_used_a_million_times_leave_nothing() -> None:
    table = JobTable()
    for number in range(5000):
        run(table, float(number % 7), name=str(number), calls_left=0, kind=str(number), tenant=str(number))
        run(table, float(number % 7), name="a", calls_left=0, kind=str(number))
    assert len(table) == len(table._per_tenant) == 0
    assert len(table._turns) < 100
    known = table._lessons._tenants
    assert (len(known), len(known[""][1])) == (MOST_TENANTS, MOST_KINDS)


@pytest.mark.parametrize("teaches", ["between", "work", "pace"])
def test_a_tenant_learns_nothing_of_anothers_jobs_but_a_guess_to_begin_with(teaches: str) -> None:
    table = JobTable()

    def share(tenant: str, now: float, name: str) -> CallShare:
        return opened(table, now, name=name, tenant=tenant, kind="support", calls_left=3, e2e=20.0).share

    def learn(tenant: str, now: float, between: float, num_tokens: int, seconds: float) -> None:
        for number in range(8):
            one = opened(table, now, name=tenant, tenant=tenant, kind="support", calls_left=9, e2e=9e3)
            now += seconds
            table.close(one, now, num_output_tokens=num_tokens, why=None)
            now += between * (number < 7)

    learn("one", 0.0, 0.1, 60, 1.0)
    before = share("one", 100.0, "a")
    between, num_tokens, seconds = {"between": (6.0, 60, 1.0), "work": (0.1, 8000, 120.0)}.get(
        teaches, (0.1, 60, 40.0)
    )
    learn("other", 200.0, between, num_tokens, seconds)
    first = share("new", 2000.0, "c")
    assert share("one", 2000.0, "b") == before
    assert before.e2e is not None
    assert first.e2e is not None
    assert first.predicted_job is None, "a guess"
    assert first.e2e < before.e2e, "as the last tenant's jobs of the class"
    learn("new", 3000.0, 0.1, 60, 1.0)
    assert share("new", 4000.0, "d").e2e == pytest.approx(before.e2e)


def test_the_least_recently_used_kinds_of_a_tenant_are_forgotten_and_no_others() -> None:
    table = JobTable()
    for name in ("one", "other"):
        run(table, 0.0, name="x", calls_left=0, tenant=name, kind="agent")
    for number in range(2 * MOST_KINDS):
        run(table, 1.0, name="x", calls_left=0, tenant="one", kind=str(number))
        run(table, 1.0, name="x", calls_left=0, tenant="one", kind="often")
    kinds = {name: set(kinds) for name, (_, kinds) in table._lessons._tenants.items()}
    assert kinds["other"] == {"agent"}
    assert len(kinds["one"]) == MOST_KINDS
    assert "often" in kinds["one"]
    assert not {"agent", "0"} & kinds["one"]


@pytest.mark.parametrize(("calls_left", "kind"), [(9, "new"), (None, "new"), (None, "known")])
def test_a_first_call_is_not_refused_for_a_guess(calls_left: int | None, kind: str) -> None:
    table = JobTable()
    run(table, 0.0, name="x", kind="known", seconds=30.0)  # a call, and no job that has ended
    taken = opened(table, 40.0, kind=kind, calls_left=calls_left, e2e=2.0, refuses=True)
    assert taken.share.predicted_job is None
    run(table, 40.0, name="x", kind="known", e2e=None, calls_left=0)
    with pytest.raises(SLOUnattainable):
        opened(table, 50.0, name="b", kind="known", calls_left=calls_left, e2e=2.0, refuses=True)


def test_a_job_whose_calls_do_not_say_how_many_follow_ends_when_it_is_forgotten() -> None:
    ends: list[JobEnd] = []
    table = JobTable(on_end=lambda end, _in_calls, _between: ends.append(end))
    run(table, 0.0, calls_left=None)
    run(table, 100.0, name="b", calls_left=0)
    assert ends == [JobEnd.KEPT, JobEnd.KEPT]


def test_kv_is_kept_while_calls_are_to_follow_and_no_longer_than_the_job_may_last() -> None:
    table = JobTable()
    assert opened(table, 0.0, calls_left=1).share.kept_for == 10.0
    assert opened(table, 0.0, name="long", e2e=600.0).share.kept_for == LONGEST_KEPT
    assert opened(table, 0.0, name="last", calls_left=0).share.kept_for == 0.0


def test_a_call_that_another_replica_served_says_why() -> None:
    table = JobTable()
    moved = []
    for number, placement in enumerate(
        (Placement("r0", "cost"), Placement("r0", "prefix"), None, Placement("r1", "load"))
    ):
        call = opened(table, float(number))
        report = table.close(call, number + 0.5, num_output_tokens=8, why=None, placement=placement)
        moved.append((report.replica, report.moved))
    assert moved == [("r0", None), ("r0", None), ("r0", None), ("r1", "load")]
