"""Whatever happens to a fleet, in whatever order: one owner for each request, and nothing is forgotten."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onbeat.scheduler.cluster.routers import ROUTERS
from tests.pure.scheduler.carrier import CHANCES, Carrier, new_carrier, run

pytestmark = pytest.mark.usefixtures("comparators")

STEPS = {kind.__name__: kind for kind, _ in CHANCES}


class FleetMachine(RuleBasedStateMachine):
    """Any event at any moment."""

    carrier: Carrier

    @initialize(
        router=st.sampled_from([*ROUTERS, "freeness"]),
        num_prefill=st.integers(0, 2),
        pool_rule=st.sampled_from(["adaptive", "distserve", "splitwise"]),
        move_rule=st.sampled_from(["mend", "llumnix"]),
    )
    def start(self, router: str, num_prefill: int, pool_rule: str, move_rule: str) -> None:
        self.carrier = new_carrier(router, num_prefill, pool_rule, move_rule)

    @rule(
        step=st.sampled_from(sorted(STEPS)), seed=st.integers(0, 2**16), wait=st.sampled_from((0.0, 0.1, 9))
    )
    def happen(self, step: str, seed: int, wait: float) -> None:
        self.carrier.now += wait
        STEPS[step](self.carrier, Random(seed))

    @invariant()
    def one_owner(self) -> None:
        if hasattr(self, "carrier"):
            self.carrier.check()

    def teardown(self) -> None:
        if hasattr(self, "carrier"):
            self.carrier.settle(Random(0))


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(deadline=None, stateful_step_count=60)


@pytest.mark.parametrize("router", [*ROUTERS, "freeness"])
def test_thousands_of_random_events_lose_nothing(router):
    carrier = run(router, num_events=2000, seed=11)
    assert carrier.num_arrived > 200


@pytest.mark.parametrize("pools", [(0, "adaptive"), (1, "adaptive"), (1, "distserve")], ids=str)
@pytest.mark.parametrize("move_rule", ["mend", "llumnix"])
def test_requests_that_move_with_their_kv_are_not_lost_either(pools, move_rule):
    carrier = run("slo", num_events=4000, seed=3, pools=pools, move_rule=move_rule)
    assert carrier.num_moved > 3
