"""What a step leaves to prompts beside streams with a pace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.slo.rules import PACED_BEHIND_STREAMS, PACED_SHARE
from tests.pure.scheduler.watch import Watch


@pytest.mark.parametrize(("streams_first", "share"), [(False, PACED_SHARE), (True, PACED_BEHIND_STREAMS)])
def test_prompts_keep_less_of_a_step_where_each_makes_running_streams_late(
    streams_first: bool, share: float
) -> None:
    rules = Watch().scheduler.policy.slo.rules  # type: ignore[union-attr]
    view = cast(Any, SimpleNamespace(deadline=1e9, tightest=float("inf"), pace=0.01))
    limit = rules.limit(view, 0.02, 0.0, queue_grows=True, streams_first=streams_first)
    assert limit == pytest.approx(0.02 / (1 - share))


@pytest.mark.parametrize(
    ("own", "share"), [(SLO(e2e=9.0), PACED_BEHIND_STREAMS), (SLO(ttft=9.0), PACED_SHARE)]
)
def test_a_prompt_with_a_ttft_objective_keeps_its_share(own: SLO, share: float) -> None:
    seen = []
    driver = Watch()
    slo = driver.scheduler.policy.slo
    assert slo is not None
    limit = slo.rules.limit

    def watched(*args: Any, streams_first: bool = False, **named: Any) -> float:
        seen.append(streams_first)
        return limit(*args, streams_first=streams_first, **named)

    slo.rules.limit = watched  # type: ignore[method-assign]
    driver.ask("stream", 10, slo=SLO(e2e=5.0), max_tokens=50)
    driver.step()
    driver.ask("late", 900, slo=SLO(e2e=0.01), shed=ShedMode.RELEGATE)
    driver.ask("prompt", 900, slo=own)
    driver.step()
    assert seen[-1] is (share == PACED_BEHIND_STREAMS)
