"""Simulated fleets: deaths, drains, restarts and changes of size, decided as in a live one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, ShedMode
from onbeat.recording.fleet_log import FleetRecording, fleet_record, plain
from onbeat.scheduler.cluster.events import Delivered, Joined, Lost, Refuse, Refused, Send
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.simulator.replay.decisions import replay_fleet
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, FleetTimes, ReplicaKind
from onbeat.workload.slo_classes import SLOClass
from tests.pure.simulator.loads import ShapeTime, linear_time, make_config, make_load, random_load

SECOND = ShapeTime(lambda shape: 1.0)


def kill(when: float, replica: int) -> FleetChange:
    return FleetChange(when, "kill", replica)


def test_replicas_that_are_simulated_apart_are_those_of_a_fleet():
    load = random_load(200, rate=20.0, seed=4)
    config = make_config(router="round-robin", replicas=3)
    alone = simulate(load, config, linear_time()).records
    fleet = simulate(load, config, linear_time(), on_decision=lambda event, now, actions: None).records
    assert fleet == alone


@pytest.mark.parametrize("policy", ["sarathi", "slo"])
@pytest.mark.parametrize("max_concurrency", [None, 12])
def test_one_replica_does_the_same_without_a_fleet(policy, max_concurrency):
    load = random_load(200, rate=40.0, seed=4).with_classes(
        (SLOClass(name="standard", slo=SLO(ttft=0.5, tbt=0.05)),), seed=1
    )
    limits = {"max_num_seqs": 4, "max_num_queued_reqs": 4}
    config = make_config(policy, scheduler=limits, shed=ShedMode.REJECT, max_concurrency=max_concurrency)
    alone = simulate(load, config, linear_time())
    fleet = simulate(load, config, linear_time(), on_decision=lambda event, now, actions: None)
    assert alone.records == fleet.records
    assert alone.replicas == fleet.replicas
    assert alone.num_rejected > 0


@pytest.mark.parametrize(
    ("policy", "router"), [("slo", "slo"), ("sarathi", "least-outstanding"), ("orca", "least-outstanding")]
)
def test_a_router_that_nobody_names_is_that_of_the_policy(policy, router):
    assert make_config(policy, replicas=2).router == router
    named = make_config(policy, replicas=2, router="prefix-affinity")
    assert named.router == "prefix-affinity"


ROUTERS_OF_FLEETS = ["round-robin", "least-outstanding", "prefix-affinity", "slo"]


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding", "prefix-affinity"])
@pytest.mark.parametrize("policy", ["sarathi", "slo"])
def test_what_one_replica_refuses_another_takes(router, policy):
    """The first runs one, and has room for one that waits."""
    load = make_load([8] * 6, [9] * 6, [0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    config = make_config(policy, router=router, replicas=2)
    small = replace(config.scheduler, max_num_seqs=1, max_num_queued_reqs=1)
    kinds = tuple(ReplicaKind(scheduler=each, step_time=SECOND) for each in (small, config.scheduler))
    result = simulate(load, replace(config, kinds=kinds), SECOND)
    assert [record.replica for record in result.records] == ["0", "1", "0", "1", "1", "1"]
    assert result.num_completed == 6
    assert result.decisions["retried"] == 2


@pytest.mark.parametrize("router", ROUTERS_OF_FLEETS)
def test_the_same_requests_are_refused_whoever_listens(router):
    load = random_load(200, rate=200.0, seed=4)
    limits = {"max_num_seqs": 2, "max_num_queued_reqs": 2}
    config = make_config(scheduler=limits, router=router, replicas=3)
    events = []
    fleet = simulate(load, config, linear_time(), on_decision=lambda *told: events.append(told))
    assert fleet.records == simulate(load, config, linear_time()).records
    refused = [each.request_id for _, _, actions in events for each in actions if isinstance(each, Refuse)]
    assert refused == [each.request_id for each in fleet.records if each.is_rejected]
    num_refusals = sum(isinstance(event, Refused) for event, _, _ in events)
    assert num_refusals == fleet.decisions["retried"] + len(refused) > len(refused) > 0


def test_streams_go_on_behind_their_tokens_when_their_replica_dies():
    config = make_config(
        replicas=2,
        router="round-robin",
        fleet_changes=(kill(3.5, 0),),
        fleet_times=FleetTimes(start_seconds=2.0),
    )
    result = simulate(make_load([8] * 2, [6] * 2, [0.0, 0.0]), config, SECOND)
    moved, stayed = result.records
    assert list(stayed.delivery_times) == [1, 2, 3, 4, 5, 6]
    # 3 tokens by then; the step under way on the other replica ends at 4, and prompt and tokens take one
    assert list(moved.delivery_times) == [1, 2, 3, 5, 6, 7]
    assert moved.replica == "1"
    assert (moved.num_output_tokens, moved.is_completed) == (6, True)
    assert result.decisions == {"turn": 2, "start": 3, "resumed": 1}


@pytest.mark.parametrize("num_prompt_tokens", [32, 33, 34])
def test_the_fleet_hears_of_a_first_token_whatever_the_last_chunk_was(num_prompt_tokens):
    """A chunk has 32 tokens at most: one of a single token looks like a decode."""
    config = make_config(replicas=2, router="round-robin", fleet_changes=(FleetChange(4.5, "drain", 0),))
    heard = []

    def watch(event, now, actions):
        if isinstance(event, Delivered):
            heard.append((event.request_id, event.is_finished))

    load = make_load([num_prompt_tokens, 8], [9, 9], [0.0, 0.0])
    stayed, other = simulate(load, config, SECOND, on_decision=watch).records
    assert sorted(heard) == [("0", False), ("0", True), ("1", False), ("1", True)]
    assert (stayed.replica, other.replica) == ("0", "1")  # the drain gives streams their time


def test_a_drain_sends_on_what_no_plan_has_seen():
    """The third comes while the first one's step runs, beside which the next step is planned already."""
    config = make_config(
        replicas=2, router="round-robin", steps_ahead=1, fleet_changes=(FleetChange(1.75, "drain", 0),)
    )
    load = make_load([8] * 3, [4] * 3, [0.0, 0.0, 1.25])
    result = simulate(load, config, SECOND)
    assert [record.replica for record in result.records] == ["0", "1", "1"]
    assert result.num_completed == 3


def test_what_a_replica_refuses_is_not_taken_from_it():
    """Each has room for one that runs and one that waits, and all drain at one instant."""
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    config = make_config(
        replicas=3, router="round-robin", scheduler=limits, fleet_changes=(FleetChange(0.5, "scale", 0),)
    )
    result = simulate(make_load([8] * 6, [4] * 6, [0.0] * 3 + [0.25] * 3), config, SECOND)
    assert result.num_completed + result.num_rejected == 6
    assert result.decisions["moved"] == 5


def test_with_one_replica_streams_wait_for_its_restart():
    config = make_config(fleet_changes=(kill(2.0, 0),), fleet_times=FleetTimes(start_seconds=5.0))
    [record] = simulate(make_load([8], [4], [0.0]), config, SECOND).records
    assert list(record.delivery_times) == [1, 2, 8.5, 9.5]  # half a second, and five to start


def test_the_tokens_of_a_run_of_steps_stay_with_those_who_had_them():
    """A run of decode steps is taken at once; a death in it comes between two of them."""
    load = make_load([8], [40], [0.0])
    for when in (10.25, 10.0):
        config = make_config(replicas=2, fleet_changes=(kill(when, 0),))
        [record] = simulate(load, config, SECOND).records
        assert list(record.delivery_times) == [*range(1, 11), *(when + i for i in range(1, 31))]


def test_three_deaths_in_a_minute_keep_a_replica_down():
    changes = (kill(1.0, 0), kill(4.0, 0), kill(8.0, 0))
    config = make_config(replicas=2, fleet_changes=changes, fleet_times=FleetTimes(start_seconds=1.0))
    result = simulate(random_load(300, rate=10.0, seed=1), config, ShapeTime(lambda shape: 0.1))
    assert result.num_completed == 300
    assert not any(each.replica == "0" and each.arrival > 8.0 for each in result.records)
    assert result.decisions["start"] == 4


def test_a_request_dies_with_its_third_replica():
    changes = (kill(1.5, 0), kill(2.4, 1), kill(3.3, 2))
    config = make_config(replicas=4, fleet_changes=changes)
    [record] = simulate(make_load([8], [9], [0.0]), config, SECOND).records
    assert record.finish_reason == "error"
    assert len(record.delivery_times) == 1  # each next step was cut short
    assert (record.num_output_tokens, list(record.delivery_sizes)) == (1, [1])


def test_a_drain_loses_nothing_and_a_rolling_restart_neither():
    changes = (FleetChange(5.0, "restart", 0), FleetChange(30.0, "restart", 1), FleetChange(60.0, "drain", 2))
    config = make_config(
        replicas=3,
        fleet_changes=changes,
        fleet_times=FleetTimes(start_seconds=3.0, drain_seconds=4.0),
        router="slo",
    )
    result = simulate(random_load(900, rate=10.0, seed=1), config, ShapeTime(lambda shape: 0.2))
    assert result.num_completed == 900
    assert result.decisions["stop"] == 3
    assert result.decisions["moved"] > 0
    assert all(each.num_leaked_blocks == 0 for each in result.replicas)
    assert not any(each.replica == "2" and each.arrival > 60.0 for each in result.records)


def test_a_fleet_grows_and_shrinks():
    changes = (FleetChange(5.0, "scale", 4), FleetChange(40.0, "scale", 1))
    config = make_config(
        fleet_changes=changes, router="least-outstanding", fleet_times=FleetTimes(start_seconds=5.0)
    )
    result = simulate(random_load(200, rate=2.5, seed=1), config, ShapeTime(lambda shape: 0.2))
    assert result.num_completed == 200
    of = {name: [each.arrival for each in result.records if each.replica == name] for name in "0123"}
    assert all(min(of[name]) >= 10.0 for name in "123")
    assert sum(max(arrivals) > 40.0 for arrivals in of.values()) == 1
    assert len(result.replicas) == 4


def test_a_replica_that_is_stopped_while_it_starts_and_started_again_takes_its_whole_time():
    changes = (FleetChange(1.0, "scale", 2), FleetChange(3.0, "scale", 1), FleetChange(4.0, "scale", 2))
    config = make_config(
        fleet_changes=changes, router="least-outstanding", fleet_times=FleetTimes(start_seconds=5.0)
    )
    joined = []

    def hear(event, now, actions):
        if isinstance(event, Joined):
            joined.append((event.replica, now))

    simulate(random_load(40, rate=2.0, seed=1), config, ShapeTime(lambda shape: 0.2), on_decision=hear)
    assert joined == [("r0", 0.0), ("r1", 9.0)]


def test_replicas_of_several_kinds_share_a_load_by_what_they_can():
    config = make_config(replicas=2, router="slo")
    short = replace(config.scheduler, max_model_len=64)
    config = replace(
        config,
        kinds=(
            ReplicaKind(scheduler=config.scheduler, step_time=linear_time(), device="large"),
            ReplicaKind(scheduler=short, step_time=linear_time(), device="small"),
        ),
    )
    load = make_load([200, 10] * 50, [4] * 100, [0.1 * index for index in range(100)])
    records = simulate(load, config, linear_time()).records
    assert all(each.is_completed for each in records)
    assert {each.replica for each in records if each.num_prompt_tokens == 200} == {"0"}
    assert "1" in {each.replica for each in records if each.num_prompt_tokens == 10}


@settings(deadline=None)
@given(
    router=st.sampled_from(["round-robin", "least-outstanding", "slo", "prefix-affinity"]),
    changes=st.lists(
        st.builds(
            FleetChange,
            st.floats(0, 12),
            st.sampled_from(["kill", "drain", "restart", "scale"]),
            st.integers(0, 3),
        ),
        max_size=8,
    ),
    drain=st.floats(0, 5),
    seed=st.integers(0, 100),
)
def test_whatever_happens_everybody_ends_with_all_tokens_or_is_told(router, changes, drain, seed):
    changes = [each for each in changes if (each.number if each.kind == "scale" else each.number < 3)]
    config = make_config(
        replicas=3,
        router=router,
        fleet_changes=tuple(changes),
        fleet_times=FleetTimes(start_seconds=1.0, drain_seconds=drain),
        policy="slo",
    )
    load = random_load(60, rate=6.0, seed=seed)

    def watch(event, now, actions):
        sent_to = [each.replica for each in actions if isinstance(each, Send)]
        assert not (isinstance(event, Lost) and event.replica in sent_to)

    result = simulate(load, config, linear_time(), on_decision=watch)
    assert len(result.records) == 60
    for record in result.records:
        assert record.finish_reason is not None
        times = list(record.delivery_times)
        assert times == sorted(times)
        if record.is_completed:
            assert len(times) == record.offered_output_tokens
        else:
            assert record.finish_reason in ("error", "rejected")
    assert all(each.num_leaked_blocks == 0 for each in result.replicas)


def test_impossible_changes_are_refused():
    with pytest.raises(ConfigError, match="0 or"):
        make_config(fleet_changes=(kill(-1.0, 0),))
    with pytest.raises(ConfigError, match="2 kill 3: there is no such replica; this fleet has at most 3"):
        make_config(replicas=2, fleet_changes=(FleetChange(1.0, "scale", 3), kill(2.0, 3)))
    with pytest.raises(ConfigError, match="replica_start_seconds is -1"):
        FleetTimes(start_seconds=-1.0)


def test_a_fleet_that_scales_itself_follows_a_load_and_its_decisions_are_made_again(tmp_path):
    load = random_load(1000, rate=10.0, seed=3)
    arrivals = load.arrivals.copy()
    arrivals[800:] += 400.0
    load = replace(load, arrivals=arrivals).with_classes(
        (SLOClass(name="standard", slo=SLO(ttft=2.0, tbt=0.2)),), seed=1
    )
    config = make_config(
        policy="slo",
        router="slo",
        autoscale=ScaleBounds(0, 3),
        scale_down_seconds=60.0,
        fleet_times=FleetTimes(start_seconds=5.0),
    )
    path = tmp_path / "fleet.gz"
    about = {"router": "slo", "fleet": plain(config.fleet_rules)}
    with fleet_record(path, about) as on_decision:
        result = simulate(
            load, config, ShapeTime(lambda shape: 0.02 + 2e-3 * shape.num_new_tokens), on_decision=on_decision
        )
    numbers = [each.num_replicas for each in result.sizes]
    assert numbers[0] == 1
    assert max(numbers) >= 2
    assert 0 in numbers, "nobody asked for six minutes"
    assert {"work", "arrival", "spare"} <= {each.why for each in result.sizes}
    assert all(0 <= number <= 3 for number in numbers)
    assert result.num_completed == len(load)
    assert result.replica_seconds < 3 * result.duration
    found = replay_fleet(FleetRecording(path))
    assert found.is_identical, found.difference
    assert found.actions["arrival"] == 1


def test_replica_seconds_of_a_fixed_fleet_are_those_of_the_run():
    config = make_config(replicas=2, router="slo")
    result = simulate(random_load(20, rate=5.0, seed=1), config, linear_time())
    assert result.replica_seconds == pytest.approx(2 * result.duration, rel=0.01)


def test_scaling_by_the_objective_needs_predictions():
    with pytest.raises(ConfigError, match=r"--policy.*--router"):
        make_config(policy="sarathi", autoscale=ScaleBounds(1, 2))
