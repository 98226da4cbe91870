"""What a step leaves to prompts beside streams with a pace."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.slo.composer import PACED_BEHIND_STREAMS, PACED_SHARE
from tests.pure.scheduler.watch import Watch


@pytest.mark.parametrize(("streams_first", "share"), [(False, PACED_SHARE), (True, PACED_BEHIND_STREAMS)])
def test_prompts_keep_less_of_a_step_where_each_makes_running_streams_late(
    streams_first: bool, share: float
) -> None:
    assert limit_of([0.021, 0.5], streams_first=streams_first) == pytest.approx(0.02 / (1 - share))


@pytest.mark.parametrize(
    ("paces", "limit"),
    [([0.01, 0.05], 0.05), ([0.01, 0.019], 0.02 / (1 - PACED_SHARE)), ([], inf)],
    ids=["one cannot be kept", "none can", "none is asked for"],
)
def test_a_pace_that_decodes_alone_cannot_keep_binds_no_step_where_another_can_be_kept(
    paces: list[float], limit: float
) -> None:
    assert limit_of(paces, streams_first=False) == pytest.approx(limit)


def limit_of(paces: list[float], *, streams_first: bool) -> float:
    """Return how long a step may take whose decodes take 20 ms."""
    rules = Watch().scheduler.policy.slo.rules  # type: ignore[union-attr]
    view = cast(Any, SimpleNamespace(deadline=inf, tightest=inf, paces=paces))
    return rules.limit(view, 0.02, 0.0, queue_grows=True, streams_first=streams_first)


@pytest.mark.parametrize(
    ("own", "share"), [(SLO(e2e=9.0), PACED_BEHIND_STREAMS), (SLO(ttft=9.0), PACED_SHARE)]
)
def test_a_prompt_with_a_ttft_objective_keeps_its_share(own: SLO, share: float) -> None:
    driver = Watch()
    seen = paces_first(driver)
    driver.ask("stream", 10, slo=SLO(e2e=5.0), max_tokens=50)
    driver.step()
    driver.ask("late", 900, slo=SLO(e2e=0.01), shed=ShedMode.RELEGATE)
    driver.ask("prompt", 900, slo=own)
    driver.step()
    assert seen[-1] is (share == PACED_BEHIND_STREAMS)


@pytest.mark.parametrize("kept_for", [0.0, 10.0], ids=["a request of its own", "a call that others follow"])
def test_prompts_keep_less_while_a_call_runs_that_has_lost_its_job(kept_for: float) -> None:
    driver = Watch()
    seen = paces_first(driver)
    driver.ask("lost", 10, slo=SLO(e2e=0.5), max_tokens=500, kept_for=kept_for)
    driver.ask("stream", 10, slo=SLO(e2e=60.0), max_tokens=500)
    while driver.now <= 0.4:
        driver.step()
    assert not any(seen)
    while driver.now <= 0.6:
        driver.step()
    assert seen[-1] is (kept_for > 0)


def paces_first(driver: Watch) -> list[bool]:
    """Return a list that grows by a value a step: whether paces go before prompts in it."""
    seen: list[bool] = []
    slo = driver.scheduler.policy.slo
    assert slo is not None
    limit = slo.rules.limit

    def watched(*args: Any, streams_first: bool = False, **named: Any) -> float:
        seen.append(streams_first)
        return limit(*args, streams_first=streams_first, **named)

    slo.rules.limit = watched  # type: ignore[method-assign]
    return seen
