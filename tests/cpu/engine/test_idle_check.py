"""What an engine says at its start of objectives that it cannot meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.engine.tiny_config import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(
        write_tiny_directory(tmp_path_factory.mktemp("model") / "tiny"),
        max_model_len=64,
        step_time_profile="roofline",
        max_num_queued_reqs=7,
        max_num_queued_tokens=700,
        slo_mode="gap",
        shed_order="longest-wait",
    )


def said(config: EngineConfig) -> list[str]:
    lines: list[str] = []
    core, _ = build_engine(config, lines.append)
    core.shutdown()
    return [line for line in lines if line.startswith("class ")]


def test_classes_out_of_reach_are_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # the tiny model is fast; a roofline of a thousandth of the speed is not
    from onbeat.perfmodel.predictor import Predictor

    true_time = Predictor.step_time
    monkeypatch.setattr(Predictor, "step_time", lambda self, shape, q=None: 1e3 * true_time(self, shape, q))
    classes = {"fast": SLO(tbt=0.001), "slow": SLO(ttft=3600.0, tbt=3600.0, e2e=86400.0)}
    (line,) = said(change(config, slo_classes=classes))
    assert line.startswith("class fast: TBT 1 ms, ")


def test_without_a_step_time_model_nothing_is_said(config: EngineConfig, tmp_path: Path) -> None:
    classes = {"fast": SLO(ttft=0.001, tbt=0.001)}
    config = change(config, policy="sarathi", shed_order="most", step_time_profile="none")
    assert said(change(config, slo_classes=classes)) == []


def test_the_scheduler_gets_its_limits_and_mode(config: EngineConfig) -> None:
    core, _ = build_engine(config, lambda _: None)
    core.shutdown()
    limits = core.scheduler.config
    assert (limits.max_num_queued_reqs, limits.max_num_queued_tokens) == (7, 700)
    assert (limits.slo_mode, limits.shed_order) == ("gap", "longest-wait")
