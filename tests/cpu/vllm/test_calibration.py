"""Step times inside vLLM: measured at the start by made-up requests, kept, or guessed."""

from __future__ import annotations

import io
import json
import logging
import re
from types import SimpleNamespace

import pytest

from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.vllm import scheduler as plugin_module
from onbeat.vllm.calibrate import StepLimits, largest, waves
from tests.cpu.vllm.fake_scheduler import (
    FakeRequest,
    FakeScheduler,
    add_some,
    planned_scheduler,
    run,
)

LIMITS = [
    StepLimits(8192, 1024, 131_072, 400_000, (1, 2, 4, *range(8, 513, 8))),
    StepLimits(2048, 64, 4096, 160_000),
    StepLimits(2048, 64, 4096, 160_000, num_drafts=7),
    StepLimits(256, 256, 2048, 20_000, num_drafts=3),
    StepLimits(512, 8, 2048, 3200),
    StepLimits(16, 1, 128, 128),
]


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a scheduler's class that measures its steps at the start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(FakeScheduler.options, "calibrate", "auto")
    maker = SimpleNamespace(make=FakeRequest)
    monkeypatch.setattr("onbeat.vllm.calibrate.RequestMaker", lambda scheduler, seed: maker)
    return planned_scheduler(monkeypatch)


def seconds_of(model, num_decodes: int, chunk: int) -> float:
    shape = BatchShape()
    for _ in range(num_decodes):
        shape.add(40, 1, samples=True)
    if chunk:
        shape.add(0, chunk, samples=False)
    return float(model.step_time(shape))


@pytest.mark.parametrize("limits", LIMITS)
def test_waves_fit_into_the_cache_and_grow(limits):
    made = waves(limits)
    sizes = [largest(wave, limits) for wave in made]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= limits.num_tokens
    for wave in made:
        assert len(wave) <= limits.num_seqs
        assert sum(each.num_prompt + each.num_output for each in wave) <= limits.num_kv_tokens
        assert all(each.num_prompt + each.num_output <= limits.max_model_len for each in wave)


def test_sizes_of_cuda_graphs_are_measured_on_both_sides():
    (decodes,) = [wave for wave in waves(LIMITS[0]) if len(wave) == 512]
    ends = [each.num_output for each in decodes]
    sizes = {sum(end > step for end in ends) for step in range(1, max(ends))}
    assert {1, 256, 512} <= sizes
    assert sum({size, size + 1} <= sizes for size in LIMITS[0].graph_sizes) > 10


def test_steps_are_measured_kept_and_read_by_the_next_start(make, caplog, tmp_path):
    caplog.set_level(logging.INFO, "onbeat.vllm")
    scheduler = make()
    assert scheduler.has_requests()
    outputs = run(scheduler)
    plugin = scheduler.onbeat
    assert plugin._calibration is None
    assert not outputs
    assert not scheduler.requests
    assert (plugin.num_faults, plugin.num_mismatches) == (0, 0)
    assert plugin.num_planned > 50
    assert "measured in" in caplog.text
    for num_decodes, chunk in ((1, 0), (8, 0), (0, 300), (4, 200)):
        told = 0.01 + 2e-4 * (num_decodes + chunk)
        assert seconds_of(plugin.steps.model, num_decodes, chunk) == pytest.approx(told, rel=0.02)
    (path,) = (tmp_path / "onbeat" / "profiles" / "vllm").iterdir()
    again = make()
    assert not again.has_requests()
    assert f"({path})" in caplog.text
    path.write_text("{}")
    assert make().has_requests()
    assert "measured again" in caplog.text
    changed = make(max_num_seqs=4)
    assert changed.has_requests()


def test_a_simulation_takes_the_profile_that_was_kept(make, tmp_path):
    run(make())
    (profile,) = (tmp_path / "onbeat" / "profiles" / "vllm").iterdir()
    found = tmp_path / "found.json"
    flags = ["--model", "smollm2-135m", "--device", "cpu", "--step-time", "fitted"]
    load = ["--request-rate", "2", "--num-prompts", "10", "--input-len", "100", "--output-len", "20"]
    assert main(["simulate", *flags, "--profile", str(profile), *load, "--json", str(found)]) == 0
    assert json.loads(found.read_text())


def test_a_request_has_the_machine_at_once_and_measuring_goes_on_later(make):
    scheduler = make()
    for _ in range(7):
        output = scheduler.schedule()
        scheduler.now += 0.02
        scheduler.update_from_output(output, None)
    assert any(name.startswith("onbeat-") for name in output.num_scheduled_tokens)
    requests = add_some(scheduler, 4)
    assert set(scheduler.requests) == {"r0", "r1", "r2", "r3"}
    rows = set()
    while scheduler.requests:
        output = scheduler.schedule()
        rows |= output.num_scheduled_tokens.keys()
        scheduler.now += 0.02
        scheduler.update_from_output(output, None)
    assert rows == {"r0", "r1", "r2", "r3"}
    assert all(request.is_finished() for request in requests)
    assert scheduler.has_requests()
    run(scheduler)
    assert scheduler.onbeat._calibration is None
    assert scheduler.onbeat.steps.model.errors is not None


@pytest.mark.parametrize(("version", "is_on"), [("0.33.1", True), ("0.34.0", False), ("1.0", False)])
def test_on_a_newer_version_one_measured_row_that_is_not_as_planned_is_enough(
    make, monkeypatch, version, is_on
):
    monkeypatch.setattr(plugin_module, "engine_version", lambda: version)
    scheduler = make()

    def differs_once(imposed, *_):
        names = list(imposed.decodes)[: not scheduler.onbeat.num_mismatches]
        return dict.fromkeys(names[:1], (1, 2))

    monkeypatch.setattr(plugin_module, "mismatch", differs_once)
    run(scheduler)
    assert (scheduler.onbeat.num_mismatches, scheduler.onbeat.is_on) == (1, is_on)
    requests = add_some(scheduler, 4)
    run(scheduler)
    assert all(request.is_finished() for request in requests)
    assert not scheduler.has_requests()


def test_a_fault_in_measuring_ends_it_and_no_step(make, monkeypatch, caplog):
    monkeypatch.setattr("onbeat.vllm.calibrate.RequestMaker", lambda scheduler, seed: SimpleNamespace())
    scheduler = make()
    requests = add_some(scheduler, 4)
    run(scheduler)
    assert all(request.is_finished() for request in requests)
    assert (scheduler.onbeat.is_on, scheduler.onbeat.num_faults) == (True, 0)
    assert caplog.text.count("not measured") == 1


def test_where_steps_take_too_long_for_requests_to_wait_it_is_said(make, monkeypatch, caplog):
    monkeypatch.setattr("onbeat.vllm.calibrate.LONGEST_STEP", 0.013)
    run(make())
    assert "16 tokens" in caplog.text
    assert "not measured" in caplog.text
    assert "Traceback" not in caplog.text


def test_all_aborted_or_paused_it_lets_the_engine_rest(make):
    paused, aborted = make(), make()
    paused.schedule()
    paused._pause_state.name = "PAUSED_ALL"
    paused.schedule()
    assert not paused.has_requests()
    paused._pause_state.name = "UNPAUSED"
    assert paused.has_requests()
    output = aborted.schedule()
    assert output.num_scheduled_tokens
    aborted.onbeat.forget_ended(None)  # as vLLM does at its end
    assert not aborted.has_requests()
    aborted.update_from_output(output, None)
    assert aborted.onbeat._calibration is None


def test_where_it_cannot_be_measured_that_is_said(make, monkeypatch, caplog):
    monkeypatch.setattr("onbeat.vllm.calibrate.hindrance", lambda scheduler: "a connector is there")
    assert not make().has_requests()
    assert "(a connector" in caplog.text
    monkeypatch.setitem(FakeScheduler.options, "calibrate", "always")
    with pytest.raises(ConfigError, match=r"calibrate.*a connector"):
        make()
    monkeypatch.setitem(FakeScheduler.options, "profile", "/p.json")
    with pytest.raises(ConfigError, match=r"'always'.*/p\.json"):
        make()


def test_without_a_profile_what_is_used_is_said(make, monkeypatch, caplog):
    monkeypatch.setitem(FakeScheduler.options, "calibrate", "off")
    make()
    assert "(calibrate is off)" in caplog.text


def test_an_objective_that_no_step_can_keep_is_said_at_the_start(make, monkeypatch, caplog):
    run(make())
    assert "class default" not in caplog.text
    monkeypatch.setitem(FakeScheduler.options, "tbt_ms", 3)
    make()
    assert re.search(r"class default: TBT 3 ms.* 10 ms", caplog.text)


def test_what_is_said_comes_where_vllms_own_lines_come(make, monkeypatch):
    lines = logging.StreamHandler(text := io.StringIO())
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [lines])
    monkeypatch.setattr(logging.getLogger("onbeat"), "handlers", [])
    logging.getLogger("vllm").setLevel(logging.INFO)
    before = logging.getLogger("onbeat").level
    try:
        make()
    finally:
        logging.getLogger("onbeat").setLevel(before)
        logging.getLogger("vllm").setLevel(logging.NOTSET)
    assert "guessed" in text.getvalue()
