"""Steps are measured by made-up requests on vLLM's own schedulers, and nobody notices."""

from __future__ import annotations

import pytest

from onbeat.core.step import BatchShape

pytest.importorskip("vllm.v1.core.sched.scheduler")

from tests.vllm.harness import Clock, Engine, check_ended, make_scheduler, model_folder
from tests.vllm.test_plans import OBJECTIVES, check_planned, workload

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_measured_between_requests_and_nothing_is_left(
    tmp_path, monkeypatch, is_async, prefix_caching
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = Clock()
    scheduler = make_scheduler(
        model_folder(tmp_path / "model"),
        clock,
        is_async=is_async,
        prefix_caching=prefix_caching,
        options={"calibrate": "auto"},
    )
    engine = Engine(scheduler, clock, depth=2 if is_async else 1, noise=0.02)
    first = workload(3, 4.0, start=1001.0, **OBJECTIVES)
    engine.add(*first)
    engine.run()
    check_ended(engine, first)
    assert {name.startswith("onbeat-") for name in engine.tokens} == {False}
    plugin = scheduler.onbeat
    assert plugin._calibration is None
    model = plugin.keeper.model
    for chunk, num_decodes in ((500, 0), (0, 1), (0, 40), (200, 20)):
        shape = BatchShape()
        for _ in range(num_decodes):
            shape.add(100, 1, samples=True)
        if chunk:
            shape.add(0, chunk, samples=True)
        expected = 0.01 + 3e-4 * chunk + 2e-4 * num_decodes
        # The fit knows no machine on which a token of a prompt costs more than a decode, as it does here.
        assert model.step_time(shape) == pytest.approx(expected, rel=0.25), (chunk, num_decodes)
    assert len(list((tmp_path / "onbeat" / "profiles" / "vllm").iterdir())) == 1
    plugin.num_planned, before = 0, engine.num_steps
    engine.ended.clear()
    engine.tokens.clear()
    requests = workload(40, 4.0, start=clock.now + 0.1, **OBJECTIVES)
    engine.add(*requests)
    engine.run()
    check_ended(engine, requests)
    engine.num_steps -= before
    check_planned(engine)
