"""What grammars take of a step is bounded: dear rows take turns, and nobody else waits for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from onbeat.core.request import UNKNOWN_GRAMMAR
from onbeat.core.step import GuidedRows, ModelRunnerOutput
from onbeat.scheduler.replica.guides import MOST_SECONDS
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import BASELINES, SERVING_POLICIES
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import make_config, make_request

DEAR, CHEAP = 3e-3, 5e-5
COSTS = {
    **{f"dear{number}": DEAR for number in range(20)},
    **{f"cheap{number}": CHEAP for number in range(40)},
    **{f"free{number}": 0.0 for number in range(4)},
}
NUM_TOKENS = 30


def run(policy: str, trial: float, cost_of_token=lambda cost, _place: cost) -> dict[str, list[int]]:
    """Return the steps in which each request had a token; `trial` is what one of the dear had shown."""
    limits = {"max_num_seqs": 64, "num_blocks": 640, "max_num_batched_tokens": 256}
    scheduler = Scheduler(make_config(policy, **limits), LinearStepTime())
    for name, cost in COSTS.items():
        seconds = trial if cost == DEAR else CHEAP
        grammar = replace(UNKNOWN_GRAMMAR, seconds=seconds) if cost else None
        scheduler.add(make_request(name, 1 + len(name), NUM_TOKENS, grammar=grammar))
    steps, now = defaultdict[str, list[int]](list), 0.0
    for step in range(2000):
        scheduled = scheduler.schedule(now)
        if scheduled is None:
            break
        now += 0.01
        ids = [row.request_id for row in scheduled.rows if row.samples]
        took = {name: cost_of_token(COSTS[name], len(steps[name])) for name in ids if COSTS[name]}
        for name in ids:
            steps[name].append(step)
        guided = GuidedRows(seconds=sum(took.values()), row_seconds=took)
        scheduler.update(scheduled, ModelRunnerOutput([[1]] * len(ids), guided=guided), now)
        scheduler.check_invariants()
    assert {name: len(places) for name, places in steps.items()} == dict.fromkeys(COSTS, NUM_TOKENS)
    return steps


@pytest.mark.parametrize("policy", [*SERVING_POLICIES, *BASELINES])
def test_dear_rows_take_turns_and_others_do_not_wait(policy: str) -> None:
    steps = run(policy, DEAR)
    per_step = defaultdict[int, float](float)
    for name, places in steps.items():
        for place in places:
            per_step[place] += COSTS[name]
    assert max(per_step.values()) <= MOST_SECONDS + 2 * DEAR  # one prompt and one decode go on in any case
    if policy == "orca-rlb":  # whose batch ends with its slowest row
        return
    gaps = {name: max(late - early for early, late in pairwise(places)) for name, places in steps.items()}
    assert max(gap for name, gap in gaps.items() if COSTS[name] < DEAR) <= 4
    most_turns = 20 * DEAR / (MOST_SECONDS - 40 * CHEAP)
    assert max(gaps.values()) <= 2 * most_turns + 4


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
def test_what_is_dear_is_learnt_and_forgotten(policy: str) -> None:
    """A trial found them cheap; they are dear at first, and cheap from their tenth token on."""
    steps = run(policy, CHEAP, lambda cost, place: cost if place < 10 else CHEAP)
    early, late = (
        [places[end] - places[start] for name, places in steps.items() if COSTS[name] == DEAR]
        for start, end in ((4, 10), (22, 29))
    )
    assert max(early) > 8
    assert set(late) <= {7, 8}
