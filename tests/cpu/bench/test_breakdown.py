"""Who pays, as `onbeat bench serve` shows and saves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.bench.background import SMALL, Background, bench, load
from tests.fake_openai import FakeOpenAI


def test_tenants_are_scored_apart_and_each_run_of_a_sweep_names_its_worst_decile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "slo.yaml"
    config.write_text(
        "classes: [{name: own, ttft_ms: 60000, share: 0.75, tenant: a}, {name: free, e2e_ms: 1, share: 0.25}]"
    )
    path = tmp_path / "r.json"
    flags = ["--random-range-ratio", "0.9", "--num-prompts", "12", "--sweep-concurrency", "2,3"]

    with Background(FakeOpenAI()) as server:
        assert bench(server, *SMALL, *flags, "--slo-config", str(config), "--json", str(path)) == 0

    out = capsys.readouterr().out
    for run in load(path)["runs"]:
        of_tenants = [(own["tenant"], own["offered"]) for own in run["attainment_by_tenant"]]
        assert of_tenants == [("a", 9), (None, 3)]
        assert sum(own["good"] for own in run["attainment_by_tenant"]) == run["good"] >= 9
        deciles = run["attainment_by_prompt_decile"]
        assert sum(own["offered"] for own in deciles) == 12
        assert run["worst_decile"] in deciles
        worst = run["worst_decile"]["longest_wait_ms"]
        assert 0 < worst <= max(own["longest_wait_ms"] for own in deciles)
        assert f"{run['title']}: Worst decile " in out
