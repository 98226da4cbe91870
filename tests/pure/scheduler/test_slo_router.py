"""Router slo: what it predicts, what it weighs, and what it knows of prefixes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler import triage
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.slo_router import LoadView, SLORouter, _about
from onbeat.scheduler.replica import admission
from onbeat.scheduler.triage import CostModel, PrefillShare
from tests.pure.scheduler.test_prefix_memory import held
from tests.pure.scheduler.timed import make_request
from tests.pure.scheduler.watch import Watch
from tests.pure.simulator.test_calls import num_calls

COSTS = PrefillCosts(token=1e-4, pair=0.0, step=5e-3, decode=1e-4)


def limits(**changes) -> ReplicaLimits:
    values = {"max_model_len": 8192, "max_num_seqs": 64, "num_blocks": 1000, "block_size": 16, **changes}
    return ReplicaLimits(**values)


def load(num_taken: int = 0, **changes) -> ReplicaLoad:
    values = {"time": 0.0, "num_taken": num_taken, "num_free_blocks": 1000, "costs": COSTS, **changes}
    return ReplicaLoad(**values)


def request(request_id="q", *, num_tokens=1000, blocks=(), ttft: float | None = 1.0, **changes):
    slo = None if ttft is None else SLO(ttft=ttft, tbt=0.1)
    return RoutingRequest(request_id, blocks, num_prompt_tokens=num_tokens, max_tokens=10, slo=slo, **changes)


def router_of(*loads: ReplicaLoad, **changes) -> SLORouter:
    router = SLORouter()
    for number, each in enumerate(loads):
        router.join(number, limits(**changes))
        router.on_report(number, each, 0.0)
    return router


def place(router: SLORouter, asked: RoutingRequest, now: float = 0.0, excluded=frozenset()) -> int:
    choice = router.route(asked, now, excluded)
    assert choice is not None
    return choice.replica


prompts = st.tuples(st.integers(1, 900), st.sampled_from([0.05, 0.2, 0.5, 2.0, None]))


@settings(deadline=None)
@example(queue=[(1, 0.05), (306, 0.05), (771, 0.2)], own=(771, 0.2), num_steps=0)  # equal prompts
@example(queue=[(1, 0.2), (166, 0.05), (400, 0.05), (26, 0.05)], own=(365, 2.0), num_steps=1)  # due at once
@given(queue=st.lists(prompts, max_size=12), own=prompts, num_steps=st.integers(0, 3))
def test_it_predicts_what_the_replica_does(queue, own, num_steps):
    """Nothing is rounded: at most 16 prompts wait, what prompts get of a step is known, and no step is short.

    A replica promises no more than it can keep if a later arrival fills the last step; a router does not.
    """
    driver = Watch()
    for index, (num_tokens, ttft) in enumerate(queue):
        slo = None if ttft is None else SLO(ttft=ttft)
        driver.add(
            make_request(str(index), num_tokens, 2, slo=slo, shed=ShedMode.RELEGATE, arrival=driver.now)
        )
    for _ in range(num_steps):
        driver.step()
    scheduler = driver.scheduler
    report = replace(scheduler.load(driver.now), decode_seconds=0.0)
    shares = []
    prefill_share = CostModel.prefill_share

    def watched(*args):
        shares.append(prefill_share(*args))
        return shares[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "prefill_share", watched)
        own_rules = {**vars(triage), "drain_seconds": lambda *args: -inf}
        patch.setattr(admission, "triage", SimpleNamespace(**own_rules))
        num_tokens, ttft = own
        slo = None if ttft is None else SLO(ttft=ttft)
        arrival = make_request("own", num_tokens, 2, slo=slo, shed=ShedMode.RELEGATE, arrival=driver.now)
        state, plan = scheduler.planner.new_state(arrival), scheduler.planner.new_plan(driver.now)
        scheduler.planner.begin(state, driver.now)
        wait, _ = scheduler.policy.admission._predict(state, plan, driver.now)
        patch.setattr(
            LoadView, "_prefill_share", lambda *args: shares[-1] if shares else PrefillShare(0, 1.0, 1.0)
        )
        view = LoadView(limits())
        view.on_report(report, driver.now)
        assert report.costs is not None
        deadline = inf if ttft is None else driver.now + ttft
        seconds = report.costs.seconds(num_tokens, 0)
        predicted = view.first_token(deadline, ttft or inf, seconds, 0, driver.now)
    assert predicted is not None
    assert wait == inf or predicted.seconds == pytest.approx(wait, rel=1e-6)


def test_steps_of_decodes_are_taken_to_follow_one_another_where_none_is_reported():
    """Each takes 10 ms; of the first, 4 ms were left."""
    view = LoadView(limits())
    view.on_report(load(busy=0.004, num_running=3, num_decodes=3, decode_seconds=0.01), 1.0)
    waits = [view.soonest(0.1, now) - 0.1 for now in (1.001, 1.004, 1.007, 1.05)]
    assert waits == pytest.approx([0.003, 0.0, 0.007, 0.004], abs=1e-6)
    assert view.first_token(inf, inf, 0.1, 0, 1.007).seconds >= view.soonest(0.1, 1.007)


def test_the_least_busy_replica_gets_a_prompt_that_none_holds():
    busy = load(backlog=((0.5, 0.4, 1),), num_waiting=1)
    assert place(router_of(busy, load()), request()) == 1


def test_a_prefix_is_worth_some_waiting_but_not_all():
    blocks = tuple(range(60))
    for seconds, expected in ((0.1, 0), (3.0, 1)):
        router = router_of(load(), load())
        assert place(router, request("first", blocks=blocks)) == 0
        router.on_report(0, load(1, busy=seconds), 0.0)
        assert place(router, request("next", blocks=blocks)) == expected


backlogs = st.lists(st.floats(0.01, 0.5), max_size=3)


steps = st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 0.05), st.floats(0.0, 0.05), st.booleans())


@given(
    backlogs=st.lists(backlogs, min_size=1, max_size=8),
    held=st.lists(st.integers(0, 60), max_size=8),
    steps=st.lists(steps, min_size=8, max_size=8),
    ttft=st.sampled_from([None, 0.02, 1.0]),
)
def test_no_replica_that_is_passed_over_would_be_better(backlogs, held, steps, ttft):
    loads = []
    for queue, (busy, decode, more, predicts) in zip(backlogs, steps, strict=False):
        waiting = tuple((0.1 * (1 + place), each, 1) for place, each in enumerate(queue))
        values = {"busy": busy, "decode_seconds": decode, "full_seconds": decode + more, "prefill_share": 0.5}
        costs = COSTS if predicts else None
        loads.append(load(backlog=waiting, num_waiting=len(queue), costs=costs, **values))
    router = router_of(*loads)
    for number, num_blocks in zip(range(len(loads)), held, strict=False):
        router._prefixes.send(number, tuple(range(num_blocks)))
    asked = request(blocks=tuple(range(60)), ttft=ttft)
    bids = router._bids(asked, 0.0, frozenset())
    offers = [router._offer(bid, asked, 0.0) for bid in bids]
    assert all(bid.least <= offer.cost for bid, offer in zip(bids, offers, strict=True))
    assert router._best(asked, 0.0, frozenset()) == min(offers)


def test_best_effort_weighs_the_wait_for_a_prefix_too():
    blocks = tuple(range(60))
    for seconds, expected in ((0.1, 0), (3.0, 1)):
        router = router_of(load(), load())
        assert place(router, request("first", blocks=blocks)) == 0
        router.on_report(0, load(1, best_effort_work=seconds, num_waiting=1), 0.0)
        assert place(router, request("next", blocks=blocks, ttft=None)) == expected


def test_what_was_sent_since_the_report_counts_once():
    router = router_of(load(), load())
    chosen = [place(router, request(str(index), num_tokens=4000)) for index in range(4)]
    assert chosen == [0, 1, 0, 1]
    router.on_report(0, load(num_taken=2), 0.0)  # both were taken, and are done
    assert place(router, request("next")) == 0
    router.on_report(0, load(num_taken=2), 0.0)  # the third is still on its way
    views = router._views
    assert [each.request_id for each in views[0].sent] == ["next"]
    router.on_finish(0, request("next"))
    assert not views[0].sent


def test_a_slow_replica_gets_what_it_can_still_do_in_time():
    slow = PrefillCosts(token=8e-4, pair=0.0, step=9e-3, decode=1e-4)
    router = router_of(load(), load(costs=slow))
    chosen = [place(router, request(str(index), ttft=2.0)) for index in range(14)]
    assert chosen.count(1) >= 1
    assert chosen.count(0) > chosen.count(1)


def view_of_full_slots(*, num_waiting: int, until: float) -> LoadView:
    """Return a view at time 1 of a replica without free slots, of which one comes free every 50 ms."""
    view = LoadView(limits())
    for index in range(1, 11):
        view.num_ended = 2
        backlog = ((until, 0.01, 1),) * num_waiting
        view.on_report(
            load(num_running=64, num_decodes=64, num_waiting=num_waiting, backlog=backlog), 0.1 * index
        )
    return view


def test_a_wait_for_a_slot_is_known_from_the_pace():
    view = view_of_full_slots(num_waiting=3, until=0.5)
    fourth, first = (4 - 1 / 3) / 20, (1 - 1 / 3) / 20
    assert view.capacity_wait(5.0, 0, 1.0) == pytest.approx(fourth, rel=0.2)
    assert view.capacity_wait(1.4, 0, 1.0) == pytest.approx(first, rel=0.2)  # before those that wait
    assert view.capacity_wait(5.0, 0, 1.1) == pytest.approx(fourth - 0.1, rel=0.2)


def test_a_slot_that_is_kept_is_not_free():
    driver = Watch(max_num_seqs=2)
    driver.serve([make_request("a", 20, 400)], until=0.1)
    assert driver.scheduler.handover.reserve("coming", 100, lease_end=99.0) is not None
    told = driver.scheduler.load(driver.now)
    assert (told.num_running, told.num_kept_slots) == (1, 1)
    view = LoadView(limits(max_num_seqs=2))
    view.on_report(told, driver.now)
    view.on_report(told, driver.now + 0.5)
    assert view.capacity_wait(5.0, 2, driver.now + 0.5) > 0.0


def test_of_requests_that_are_added_up_each_takes_a_slot():
    view = view_of_full_slots(num_waiting=0, until=0.5)
    view.on_report(load(num_running=64, num_decodes=64, num_waiting=9, backlog=((0.9, 0.09, 9),)), 1.0)
    assert view.capacity_wait(5.0, 0, 1.0) == pytest.approx((10 - 1 / 3) / 20, rel=0.2)


def test_slots_come_free_sooner_where_more_streams_run():
    waits = []
    for num_running in (16, 64):
        view = LoadView(limits())
        for index in range(1, 11):
            view.num_ended = 2
            view.on_report(load(num_running=16, num_decodes=16), 0.1 * index)
        view.on_report(load(num_running=num_running, num_decodes=num_running), 1.0)
        view.limits = limits(max_num_seqs=num_running)
        waits.append(view.capacity_wait(5.0, 0, 1.0))
    assert waits[1] == pytest.approx(waits[0] / 4)


def test_under_a_policy_that_goes_by_arrival_all_that_wait_are_ahead():
    view = view_of_full_slots(num_waiting=0, until=0.5)
    view.on_report(load(num_running=64, num_decodes=64, num_waiting=9, backlog=((0.0, 0.09, 9),)), 1.0)
    assert view.capacity_wait(5.0, 0, 1.0) == pytest.approx((10 - 1 / 3) / 20, rel=0.2)


def test_those_that_a_slot_comes_too_late_for_are_given_up():
    view = view_of_full_slots(num_waiting=12, until=0.15)
    assert view.capacity_wait(5.0, 0, 1.0) == pytest.approx((4 - 1 / 3) / 20, rel=0.2)


def test_prompts_that_have_a_slot_are_not_ahead_of_one_that_has_none():
    view = view_of_full_slots(num_waiting=0, until=0.5)
    view.on_report(load(num_running=64, num_decodes=61, backlog=((0.5, 0.01, 0),) * 3), 1.0)
    assert view.capacity_wait(5.0, 0, 1.0) == pytest.approx((1 - 1 / 3) / 20, rel=0.2)


def test_a_predicted_first_token_waits_for_a_slot():
    router = router_of(load(), load())
    router._views[0] = view_of_full_slots(num_waiting=3, until=0.5)
    choice = router.route(request(arrival=1.0), 1.0, excluded={1})
    assert choice is not None
    step = COSTS.step + 64 * COSTS.decode
    assert choice.predicted_ttft == pytest.approx((4 - 1 / 3) / 20 + 0.1 + step, rel=0.2)
    assert place(router, request(arrival=1.0), 1.0) == 1


def test_a_first_token_whose_slot_comes_too_late_is_predicted_as_due_where_prompts_are_given_up():
    view = view_of_full_slots(num_waiting=30, until=0.49)
    for gives_up in (False, True):
        view.load = replace(view.load, gives_up=gives_up)
        found = view.first_token(1.5, 0.5, 0.1, 0, 1.0)
        assert found is not None
        assert found.seconds > 0.55
        assert found.likely == pytest.approx(0.5 if gives_up else found.seconds)


def test_what_goes_by_arrival_is_done_first_although_it_is_due_at_once():
    view = LoadView(limits())
    view.on_report(load(backlog=((0.0, 3.0, 9),), num_waiting=9), 0.0)
    found = view.first_token(1.0, 1.0, 0.1, 0, 0.0)
    assert found is not None
    assert found.seconds == pytest.approx(3.1, rel=0.2)


def view_of_short_memory(**changes) -> LoadView:
    """Return a view at time 1 of 30 streams with 30 blocks each, of which one ends every 107 ms."""
    view = view_of_full_slots(num_waiting=0, until=0.5)
    values = {"num_running": 30, "num_decodes": 30, "num_free_blocks": 100, **changes}
    view.on_report(load(**values), 1.0)
    return view


def wait_for_ends(number: float) -> object:
    """Return the median of the seconds until so many of those streams have ended."""
    return pytest.approx(max(0.0, number - 1 / 3) * 64 / 30 / 20, rel=0.2)


@pytest.mark.parametrize(("num_blocks", "num_ends"), [(100, 0), (130, 1), (400, 10)])
def test_a_prompt_waits_until_streams_have_given_back_its_blocks(num_blocks, num_ends):
    assert view_of_short_memory().capacity_wait(5.0, num_blocks, 1.0) == wait_for_ends(num_ends)


def test_blocks_of_prompts_that_wait_are_not_free():
    waiting = view_of_short_memory(num_waiting=3, backlog=((0.5, 0.3, 3),), num_queued_blocks=90)
    assert waiting.capacity_wait(5.0, 70, 1.0) == wait_for_ends(2)
    assert waiting.capacity_wait(1.4, 70, 1.0) == 0.0  # it is due before them
    waiting.send(1.3, 0.1, 60, "sent")
    assert waiting.capacity_wait(1.4, 70, 1.0) == wait_for_ends(1)


def test_a_long_prompt_goes_where_it_finds_blocks():
    router = router_of(load(), load())
    router._views[0] = view_of_short_memory()
    router._views[1] = view_of_short_memory(num_free_blocks=400, busy=0.05)
    assert place(router, request(num_tokens=800, arrival=1.0), 1.0) == 0
    assert place(router, request(num_tokens=6000, arrival=1.0), 1.0) == 1


def test_blocks_are_waited_for_where_nothing_is_predicted_too():
    router = router_of(load(), load())
    router._views[0] = view_of_short_memory(costs=None)
    router._views[1] = view_of_short_memory(num_free_blocks=400, num_running=60, costs=None)
    assert place(router, request(num_tokens=800, arrival=1.0), 1.0) == 0
    assert place(router, request(num_tokens=6000, arrival=1.0), 1.0) == 1


def test_a_replica_that_is_full_of_streams_that_do_not_end_has_a_long_wait():
    view = LoadView(limits())
    for index in range(1, 40):
        view.on_report(load(num_running=64, num_decodes=64), 0.1 * index)
    assert view.capacity_wait(9.0, 0, 4.0) > 2.0


def test_a_report_ages():
    view = LoadView(limits())
    view.on_report(
        load(busy=0.1, backlog=((1.0, 0.5, 1), (2.0, 0.5, 1)), prefill_share=0.5, num_decodes=1), 10.0
    )
    assert [each.seconds for each in view._jobs(10.1)[0]] == [0.5, 0.5]
    assert [each.seconds for each in view._jobs(10.3)[0]] == pytest.approx([0.4, 0.5])
    assert [each.seconds for each in view._jobs(11.3)[0]] == pytest.approx([0.4])
    assert view.work_left(11.3) == pytest.approx(0.4)


def test_replicas_that_predict_nothing_share_a_load():
    router = router_of(load(costs=None), load(costs=None))
    chosen = [place(router, request(str(index))) for index in range(10)]
    assert chosen.count(0) == 5
    assert router.least_wait(request(), 0.0) is None


def test_the_least_wait_of_the_fleet():
    router = router_of(load(backlog=((3.5, 3.0, 1),)), load(backlog=((3.5, 1.0, 1),)))
    wait = router.least_wait(request(ttft=5.0), 0.0)
    assert wait == pytest.approx(1.1, rel=0.2)


def test_of_many_replicas_the_holders_and_the_idle_are_looked_at():
    router = router_of(*(load(backlog=((0.5, 0.3, 1),)) for _ in range(100)))
    blocks = tuple(range(60))
    router._prefixes.send(77, blocks)
    assert place(router, request("holder", blocks=blocks, ttft=5.0)) == 77
    router.on_report(42, load(), 0.0)
    assert place(router, request("idle")) == 42
    assert place(router, request("other"), excluded={42}) != 42


def test_of_a_large_fleet_some_of_each_device_are_looked_at():
    router = router_of(*(load(costs=replace(COSTS, token=1e-3)) for _ in range(20)), device="slow")
    for number in range(20, 24):
        router.join(number, limits(device="fast"))
        router.on_report(number, load(num_running=2), 0.0)
    assert place(router, request()) >= 20


def test_of_many_that_hold_as_much_others_are_looked_at_each_time():
    router, blocks = router_of(*(load(backlog=((0.5, 0.3, 1),)) for _ in range(20))), tuple(range(60))
    for number in range(20):
        router._prefixes.send(number, blocks)
    assert len({place(router, request(str(index), blocks=blocks, ttft=5.0)) for index in range(20)}) > 10


def test_a_fleet_that_has_grown_large_knows_who_has_the_least_to_do():
    router = router_of(*(load(backlog=((0.5, 0.3, 1),)) for _ in range(7)), load())
    for number in range(8, 20):
        router.join(number, limits())
        router.on_report(number, load(backlog=((0.5, 0.3, 1),)), 0.0)
    assert place(router, request()) == 7


def calls_of(num_replicas: int) -> tuple[float, float]:
    """Return the calls of functions that a choice and a report make on average."""
    busy = load(num_running=8, num_decodes=8, backlog=((0.5, 0.3, 1),))
    router = router_of(*(busy for _ in range(num_replicas)))
    choices = reports = 0
    for index in range(200):
        asked = request(f"q{index}", blocks=tuple(range(index % 20)), ttft=5.0)
        choices += num_calls(partial(place, router, asked, 0.01 * index))
        number = index * 7 % num_replicas
        reports += num_calls(partial(router.on_report, number, load(num_taken=index), 0.01 * index))
    return choices / 200, reports / 200


def test_a_choice_and_a_report_cost_the_same_in_a_large_fleet():
    few, many = calls_of(400), calls_of(4000)
    assert many[0] < 1.1 * few[0]
    assert many[1] < 1.1 * few[1]
    assert calls_of(20)[0] < 1.1 * few[0]


def test_a_replica_that_left_is_forgotten():
    router = router_of(load(), load())
    blocks = tuple(range(60))
    assert place(router, request("first", blocks=blocks)) == 0
    router.leave(0)
    assert held(router._prefixes, blocks) == {}
    assert place(router, request("next", blocks=blocks)) == 1
    router.on_report(0, load(), 1.0)  # late
    router.on_finish(0, request("first"))


TIGHT = load(num_decodes=9, tightest_tbt=0.03, full_seconds=0.0291, prefill_share=0.5, best_effort_work=9.0)


def chosen_after_a_minute(
    work: dict[float | None, float], *reports: ReplicaLoad, of: float | None
) -> set[int]:
    """Return where requests of a TBT objective go, once so many seconds of prefill a second came of each."""
    router = router_of(*(reports or [TIGHT] * 4))

    def send(tbt: float | None, seconds: float, now: float) -> int:
        tokens = int(seconds / COSTS.token)
        return place(router, replace(request(num_tokens=tokens), slo=SLO(ttft=5.0, tbt=tbt)), now)

    for second in range(61):
        for tbt, seconds in work.items():
            send(tbt, seconds, float(second))
    for number, each in enumerate(reports or [TIGHT] * 4):
        router.on_report(number, replace(each, time=61.0, num_taken=1000), 61.0)
    return {send(of, 0.01, 61.0) for _ in range(40)}


@pytest.mark.parametrize(
    ("work", "of", "expected"),
    [
        ({0.03: 0.9, 0.5: 2.1}, 0.03, {0, 1}),  # 0.9 of work fills two replicas, of which half is prefill
        ({0.03: 0.9, 0.5: 2.1}, 0.5, {0, 1, 2, 3}),
        ({0.03: 0.9, None: 2.1}, 0.03, {0, 1}),
        ({0.03: 0.3, 0.02: 0.3, 0.5: 2.1}, 0.02, {0}),
        ({0.03: 0.3, 0.02: 0.3, 0.5: 2.1}, 0.03, {0, 1}),
        ({0.03: 0.3, 0.1: 0.3, 0.5: 2.1}, 0.1, {0, 1, 2, 3}),  # it makes no step short
        ({0.03: 0.7, 0.5: 1.7}, 0.03, {0, 1, 2, 3}),  # nearly all is served in short steps
        ({0.03: 3.0}, 0.03, {0, 1, 2, 3}),  # nobody would gain
    ],
)
def test_tight_classes_share_replicas_where_short_steps_cannot_serve_what_comes(work, of, expected):
    assert chosen_after_a_minute(work, of=of) == expected


def test_classes_are_not_kept_apart_where_no_objective_makes_steps_short_or_nothing_is_left_behind():
    work = {0.03: 0.9, 0.5: 2.1}
    for changes in ({"tightest_tbt": inf}, {"full_seconds": 0.02}, {"best_effort_work": 0.0}):
        assert chosen_after_a_minute(work, *[replace(TIGHT, **changes)] * 4, of=0.03) == {0, 1, 2, 3}


def test_a_tight_stream_goes_elsewhere_where_its_replicas_may_not_be_chosen():
    router = router_of(*[TIGHT] * 4)
    asked = replace(request(), slo=SLO(tbt=0.03))
    router._tiers.closed[_about(asked.slo)] = [2, 3]
    assert place(router, asked, excluded={0}) == 1
    assert place(router, asked, excluded={0, 1}) in (2, 3)


def test_a_minute_of_any_objectives_is_counted_by_few():
    assert len({_about(SLO(tbt=1e-3 * 1.002**step)) for step in range(9_000)}) < 110
    assert _about(SLO(ttft=1.0)) == _about(None) == inf
    assert all(0.84 * tbt < _about(SLO(tbt=tbt)) <= tbt for tbt in (0.001, 0.03, 0.25, 1.0, 7.0))
