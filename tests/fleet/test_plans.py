"""A plan from end to end: planned, served by stand-ins of the planned devices, held to its promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onbeat.cluster.start import engine_of
from onbeat.core.errors import ConfigError
from onbeat.core.kinds import ReplicaGroup, parse_kind
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.hub.known import DEFAULT_MODEL
from onbeat.hub.resolve import resolve_model
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from tests.cpu.e2e.program import run_program, serving

KINDS = ("device=h100-sxm,replicas=1", "device=l4,tp=2,replicas=2")


def test_kinds_are_read_as_they_are_written() -> None:
    kinds = tuple(map(parse_kind, KINDS))
    assert kinds[1] == ReplicaGroup(device="l4", tensor_parallel_size=2, replicas=2)
    assert parse_kind(str(kinds[0])) == kinds[0]
    assert parse_kind("policy=slo") == ReplicaGroup(policy="slo")
    assert FleetConfig(replicas=3, kinds=kinds).replicas == 3
    with pytest.raises(ConfigError, match=r"3 .*--replicas is 2"):
        FleetConfig(replicas=2, kinds=kinds)


@pytest.mark.parametrize(
    "text", ["", "l4", "device=l4,tp=0", "policy=", "device=l4,gpus=2", "device=", "device=a,device=b"]
)
def test_what_is_no_kind_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{text!r} is no kind")):
        parse_kind(text)


def test_each_replica_is_of_its_kind() -> None:
    kinds = tuple(map(parse_kind, KINDS))
    files = ModelFiles(kind="hf", path=Path("x"), name="x")
    engine = EngineConfig(model=files, load_format="stand-in", device="h100-sxm")
    found = [engine_of(f"r{number}", engine, kinds) for number in range(4)]
    assert [(each.device, each.tensor_parallel_size) for each in found] == [
        ("h100-sxm", 1),
        *[("l4", 2)] * 3,  # what is added is like the last
    ]
    assert engine_of("r0", engine, ()) is engine
    other = engine_of("r0", EngineConfig(model=files), (parse_kind("policy=sarathi"),))
    assert (other.limits.policy, other.device) == ("sarathi", "auto"), "engines that compute may differ so"
    with pytest.raises(ConfigError, match="--replicas"):
        engine_of("r0", EngineConfig(model=files), kinds)


@pytest.mark.slow
def test_a_planned_fleet_keeps_its_promise_and_a_smaller_one_does_not(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    load = ["--dataset-name", "random", "--input-len", "200", "--output-len", "32", "--num-prompts", "200"]
    model = ["--model", "meta-llama/Llama-3.1-8B", "--max-num-seqs", "2", "--max-model-len", "4096"]
    promise = ["--rate", "14", "--slo-ttft-ms", "1500", "--slo-tbt-ms", "300", "--repeats", "2"]
    planned = run_program("plan", *model, *load, *promise, "--gpus", "h100-sxm=2", "--tp", "1", "-o", plan)
    assert planned.returncode == 0, planned.stderr
    tokenizer = resolve_model(DEFAULT_MODEL).path
    stand_in: list[str | Path] = [
        "--load-format",
        "stand-in",
        "--tokenizer",
        tokenizer,
    ]
    check: list[str | Path] = ["bench", "serve", "--check-plan", plan, "--disable-tqdm", "--base-url"]
    with serving("--config", plan, *stand_in) as server:
        kept = run_program(*check, server.url)
        assert "promise kept" in kept.stdout, kept.stdout + kept.stderr
        assert kept.returncode == 0
        other = run_program(*check, server.url, "--request-rate", "3")
        assert "--request-rate" in other.stderr
    with serving("--config", plan, *stand_in, "--replicas", "1") as server:
        broken = run_program(*check, server.url)
        assert "promise broken" in broken.stdout, broken.stdout + broken.stderr
        assert broken.returncode == 3
