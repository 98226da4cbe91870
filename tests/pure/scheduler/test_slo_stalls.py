"""What streams have in hand for steps that take far longer than predicted."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLO_MODES, ShedMode, SLOMode
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.slo.rules import EARNED_SHARE
from onbeat.scheduler.replica.slo.stalls import Stalls, Stream
from onbeat.scheduler.replica.slo.work import PrefillWork
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import FakeStepTime, make_request

TBT = 0.1
LIMIT = TBT * (1 - EARNED_SHARE)


def stalled(*steps: tuple[float, float], tbt: float = TBT) -> Stalls:
    """Return what has seen steps, begun at some times and predicted to take 0.05 s, since time 0."""
    stalls = Stalls()
    stalls.since, stalls.tightest, stalls.shortest = 0.0, tbt, 2 * tbt
    for begun, seconds in steps:
        stalls.note(begun, begun + seconds, 0.05)
    return stalls


def streams(num: int = 100, *, tbt: float = TBT, slack: float = 0.0, num_tokens: int = 200) -> list[Stream]:
    return [Stream(tbt=tbt, slack=slack, num_tokens=num_tokens, context=500.0)] * num


def weighed(stalls: Stalls, running: list[Stream], now: float = 150.0, fixed: float = 5e-3) -> float:
    """Return the share to earn on a device whose steps cost something beside their tokens."""
    model = FakeStepTime(fixed=fixed, per_token=1e-4, per_context=0.0, per_pair=0.0)
    stalls.weigh(running, PrefillWork(model, None), LIMIT, now)
    return stalls.share


class TestStalls:
    def test_of_a_stall_one_objective_is_left_out(self):
        assert stalled((10.0, 2.15)).size == pytest.approx(2.0)

    @pytest.mark.parametrize("seconds", [0.01, 0.05, 0.149, 0.199])
    def test_what_is_shorter_is_none(self, seconds):
        assert stalled((10.0, seconds)).size == 0.0

    def test_a_step_that_was_expected_to_be_long_is_none(self):
        stalls = stalled()
        stalls.note(10.0, 12.0, 1.95)
        assert stalls.size == 0.0

    def test_without_streams_nothing_is_one(self):
        assert stalled((10.0, 5.0), tbt=inf).size == 0.0

    @given(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=6))
    def test_it_is_known_where_to_look(self, lengths):
        stalls, ends, now = stalled(), [], 5.0
        for length in lengths:
            now += length
            ends.append(now)
        if abs(max(lengths) - 2 * TBT) > 1e-6:
            assert stalls.may_be_in(5.0, ends) == (max(lengths) > 2 * TBT)


class TestReserve:
    def test_once_a_stall_is_overdue_less_is_kept_for_it(self):
        stalls = stalled((100.0, 2.15), (150.0, 2.15))
        assert weighed(stalls, streams()) > 0
        kept = [stalls.reserve(now) for now in (160.0, 200.0, 300.0, 650.0)]
        assert kept == pytest.approx([2, 2, 2 / 3, 0.2])

    def test_one_at_the_start_is_soon_forgotten(self):
        stalls = stalled((10.0, 2.15))
        assert weighed(stalls, streams(), now=30.0) > 0
        assert stalls.reserve(1010.0) == pytest.approx(0.02)

    def test_nothing_is_kept_where_earning_it_does_not_pay(self):
        stalls = stalled((100.0, 2.15))
        assert weighed(stalls, streams(slack=5.0)) == stalls.reserve(101.0) == 0.0

    def test_steps_in_a_row_are_one(self):
        """A machine that has become slower says so step after step: that is not how often stalls come."""
        row = stalled((10.0, 1.0), (11.0, 2.0), (13.0, 0.5))
        alone = stalled((10.0, 2.0))
        assert weighed(row, streams()) == weighed(alone, streams()) > 0
        assert row.reserve(40.0) == alone.reserve(40.0) > 0


class TestShare:
    def test_without_stalls_nothing_is_earned(self):
        assert weighed(stalled(), streams()) == 0.0

    def test_the_rarer_they_are_the_less_is_earned(self):
        shares = [weighed(stalled((100.0, 2.15)), streams(), 100 + every) for every in (100, 1000, 10_000)]
        assert shares[0] > 0 == shares[-1]
        assert shares == sorted(shares, reverse=True)

    def test_the_dearer_steps_are_the_less_is_earned(self):
        shares = [weighed(stalled((100.0, 2.15)), streams(), fixed=f) for f in (1e-3, 5e-3, 0.02, 0.06)]
        assert shares[0] > 0 == shares[-1]
        assert shares == sorted(shares, reverse=True)

    def test_nothing_is_earned_for_answers_that_end_before(self):
        assert weighed(stalled((100.0, 9.15)), streams(num_tokens=20)) == 0.0
        assert weighed(stalled((100.0, 9.15)), streams(num_tokens=2000)) > 0.0

    def test_nothing_is_earned_for_streams_that_have_it(self):
        first = streams(slack=1.9)
        assert weighed(stalled((100.0, 2.15)), first) < weighed(stalled((100.0, 2.15)), streams())

    def test_those_with_longer_objectives_earn_anyway(self):
        few = streams(5) + streams(95, tbt=1.0)
        assert weighed(stalled((100.0, 2.15)), few) < weighed(stalled((100.0, 2.15)), streams())

    def test_best_effort_loses_nothing(self):
        assert weighed(stalled((100.0, 2.15)), streams(tbt=inf)) == 0.0
        both = streams() + streams(tbt=inf)
        assert weighed(stalled((100.0, 2.15)), both) > 0.0

    @given(
        st.floats(0.1, 20.0),
        st.floats(1.0, 1e4),
        st.floats(0.0, 2.0),
        st.integers(1, 4000),
        st.integers(1, 200),
    )
    def test_it_is_the_best_of_those_that_are_looked_at(self, size, every, slack, num_tokens, num):
        """By streams in hand, counted token by token."""
        stalls = stalled((every, size + TBT + 0.05))
        fixed, running = 5e-3, streams(num, slack=slack, num_tokens=num_tokens)
        share = weighed(stalls, running, now=every, fixed=fixed)
        model = FakeStepTime(fixed=fixed, per_token=1e-4, per_context=0.0, per_pair=0.0)
        work = PrefillWork(model, None)

        def lost(share: float) -> float:
            length = LIMIT * (1 - share)
            num_short = sum(slack + k * (TBT - length) < stalls.size - 1e-9 for k in range(num_tokens))
            decodes = BatchShape.of_decodes(round((1 - share) * num), round((1 - share) * num * 500))
            return float(min(1.0, num_short * length / every) - work.room_beside(decodes, length, inf).share)

        one_token = TBT / every
        assert all(lost(share) <= lost(other) + one_token + 1e-9 for other in (0.0, 0.125, 0.25, 0.375, 0.5))


class Stalling(Watch):
    """One step every 8 s takes 1 s longer."""

    num_stalls = 0

    def collect(self) -> None:
        if self.now // 8 > self.num_stalls:
            self.num_stalls += 1
            self.now = self._last_end = self.now + 1.0
        super().collect()


def beside_prompts(mode: SLOMode, driver: type[Watch] = Stalling, num: int = 800) -> Watch:
    """Return a run of streams beside more prompts than there is time for, 20 a second."""
    model = FakeStepTime(fixed=5e-3, per_pair=0.0)
    run = driver(model, slo_mode=mode, max_num_seqs=512, num_blocks=1 << 15)
    slo = SLO(ttft=0.3, tbt=TBT)
    run.serve(
        make_request(f"r{i}", 300, 100, arrival=0.05 * i, slo=slo, shed=ShedMode.RELEGATE) for i in range(num)
    )
    return run


def num_late_streams(run: Watch) -> int:
    """Return how many, of those that came after two stalls, had their first token in time, not the others."""
    times = {name: run.times[name] for name in run.times if run.requests[name].arrival > 18}
    return sum(run.ttft(name) <= 0.3 and not run.is_good(name) for name in times)


class TestSteps:
    def test_most_streams_outlast_a_stall_once_two_were_seen(self, monkeypatch):
        late = num_late_streams(beside_prompts("stream"))
        monkeypatch.setattr(Stalls, "note", lambda *_: None)
        assert num_late_streams(beside_prompts("stream")) > 4 * late

    def test_steps_become_shorter_and_no_stream_sits_out_for_it(self):
        run = beside_prompts("stream")
        before = [step for step, at in zip(run.log, run.planned_at, strict=True) if at < 8]
        after = [step for step, at in zip(run.log, run.planned_at, strict=True) if 20 < at < 40]
        assert min(step.budget for step in before if step.budget and step.shape.num_chunks) == pytest.approx(
            LIMIT
        )
        beside = [step for step in after if step.shape.num_chunks]
        for step in beside:
            shape = BatchShape.of_decodes(step.shape.num_decodes, step.shape.decode_context_tokens)
            decodes = run.model.step_time(shape)
            assert decodes < step.budget < 0.9 * LIMIT
        assert beside

    def test_in_gap_mode_nothing_can_be_earned(self, monkeypatch):
        run = beside_prompts("gap", num=400)
        assert run.num_stalls > 1
        monkeypatch.setattr(Stalls, "note", lambda *_: None)
        assert beside_prompts("gap", num=400).log == run.log

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_without_stalls_nothing_changes(self, mode, monkeypatch):
        log = beside_prompts(mode, Watch, num=200).log
        monkeypatch.setattr(Stalls, "note", lambda *_: None)
        assert beside_prompts(mode, Watch, num=200).log == log
