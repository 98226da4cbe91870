"""How many tokens a step of the policy slo may have where nobody says: what a server would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.core.options import make
from onbeat.perfmodel.device_spec import cpu_device
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET
from onbeat.simulator import resolve as resolving
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from tests.pure.perfmodel.test_models import MODEL, write_fitted


def default_budget(**settings: object) -> int:
    deployment = make(Deployment, model=MODEL.name, policy="slo", max_num_seqs=64, **settings)
    return resolve(deployment).config.scheduler.max_num_batched_tokens


def test_a_cpu_has_no_data_sheet_to_take_it_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = cpu_device(memory_bandwidth=1e11, peak_flops=1e12, memory_bytes=2**38)
    monkeypatch.setattr(resolving, "find_device", lambda name: cpu)
    assert default_budget(device="cpu") == LARGEST_BUDGET


def test_what_a_profile_measured_does_not_change_it(tmp_path: Path) -> None:
    write_fitted(tmp_path / "p.json")  # of a machine with a third of the rates
    sheets = default_budget(device="h100-sxm")
    assert sheets < LARGEST_BUDGET
    assert default_budget(device="h100-sxm", step_time="fitted", profile=tmp_path / "p.json") == sheets
