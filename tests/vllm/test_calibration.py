"""Steps are measured by made-up requests on vLLM's own schedulers, and nobody notices."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

pytest.importorskip("vllm.v1.core.sched.scheduler")

from tests.vllm.harness import BOTH_RUNNERS, Clock, Engine, check_ended, make_scheduler, model_folder
from tests.vllm.test_plans import OBJECTIVES, check_planned, workload

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("how", BOTH_RUNNERS)
def test_decodes_are_measured_with_the_drafts_that_a_model_makes(tmp_path, monkeypatch, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock, folder = Clock(), model_folder(tmp_path / "model")
    options = {"calibrate": "auto"}
    scheduler = make_scheduler(
        folder, clock, **how, num_drafts=3, draft_method="medusa", options=options, max_num_batched_tokens=300
    )
    engine = Engine(scheduler, clock, depth=2 if how["is_async"] else 1, noise=0.02)
    engine.drafts_most = True
    engine.run()
    plugin = scheduler.onbeat
    assert plugin._calibration is None
    assert (plugin.num_faults, plugin._calibration) == (0, None)
    for chunk, num_decodes in ((200, 0), (0, 1), (0, 40), (100, 20)):
        shape = BatchShape()
        for _ in range(num_decodes):
            shape.add(100, 1, samples=True)
        if chunk:
            shape.add(0, chunk, samples=True)
        expected = 0.01 + 3e-4 * (chunk + 4 * num_decodes)
        assert plugin.steps.model.step_time(shape) == pytest.approx(expected, rel=0.15), (chunk, num_decodes)
    requests = workload(40, 4.0, start=clock.now + 0.1, **OBJECTIVES)
    before, plugin.num_planned = engine.num_steps, 0
    engine.add(*requests)
    engine.run()
    check_ended(engine, requests)
    engine.num_steps -= before
    check_planned(engine)
    assert not make_scheduler(
        folder, clock, **how, num_drafts=3, draft_method="medusa", options=options, max_num_batched_tokens=300
    ).has_requests()  # measured once
    assert make_scheduler(
        folder, clock, **how, num_drafts=2, draft_method="medusa", options=options, max_num_batched_tokens=300
    ).has_requests()


def test_where_drafts_come_from_the_text_nothing_is_measured(tmp_path, caplog):
    caplog.set_level("WARNING", "onbeat.vllm")
    folder = model_folder(tmp_path / "model")
    scheduler = make_scheduler(folder, Clock(), num_drafts=3, options={"calibrate": "auto"})
    assert not scheduler.has_requests()
    with pytest.raises(ConfigError, match="ngram"):
        make_scheduler(folder, Clock(), num_drafts=3, options={"calibrate": "always"})


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
    model = plugin.steps.model
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
