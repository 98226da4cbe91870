"""`onbeat plan`: flags, the answer on the terminal and in files, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from onbeat.cli.args import INFEASIBLE
from onbeat.cli.main import main
from onbeat.cli.plan import parse_gpus
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import parse_pools
from onbeat.planner.plan_file import read_promise

MODEL = ["--model", "meta-llama/Llama-3.1-8B", "--max-num-seqs", "2", "--max-model-len", "4096", "--tp", "1"]
LOAD = ["--dataset-name", "random", "--input-len", "200", "--output-len", "16", "--slo-ttft-ms", "500"]
QUICK = ["--num-prompts", "60", "--repeats", "2", "--disable-tqdm", "--jobs", "1"]


def plan(*flags: str) -> int:
    return main(["plan", *MODEL, *LOAD, *QUICK, *flags])


def test_reads_lists_of_devices() -> None:
    assert parse_gpus("h100-sxm=8, l4") == {"h100-sxm": 8, "l4": float("inf")}
    assert parse_gpus("L4=2, NVIDIA H100 80GB HBM3=1") == {"l4": 2, "h100-sxm": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no device"),
        ("l4,,a10g", "no device"),
        ("l5=2", "unknown device 'l5'"),
        ("l4=0", "whole number"),
        ("l4=many", "whole number"),
        ("l4=1,l4=2", "twice"),
        ("l4=1,L4=2", "l4 twice"),
    ],
)
def test_says_what_is_wrong_with_devices(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["", "two", "1,,2"])
def test_refuses_degrees_that_are_none(text: str) -> None:
    with pytest.raises(SystemExit):
        plan("--gpus", "l4", "--rate", "1", "--tp", text)


def test_refuses_a_degree_of_none() -> None:
    assert plan("--gpus", "l4", "--rate", "1", "--tp", "0") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "l4"], "give --rate"),
        (["--gpus", "l40s", "--rate", "2"], "price of l40s "),
        (["--gpus", "l4", "--rate", "2", "--headroom", "-5"], "headroom is -5"),
        (["--gpus", "l4", "--rate", "2", "--objective", "vidur"], "a share"),
        (["--gpus", "l4", "--rate", "2", "--objective", "sarathi"], "a share"),
        (["--gpus", "l4", "--rate", "2", "--objective", "attainment:0.99"], "too short"),
        (["--gpus", "l4", "--rate", "2", "--max-concurrency", "4"], "leave out --max-concurrency"),
        (["--gpus", "l4", "--rate", "2", "--rate-steps", "2:60,8:30"], "leave out --rate-steps"),
        (["--gpus", "l4", "--rate-steps", "2:60,8:30"], "leave out --rate-steps"),
        (["--gpus", "l4", "--rate", "2", "--max-num-batched-tokens", "auto"], "give a number of tokens"),
        (["--gpus", "l4", "--rate", "2", "--prices", "/nowhere.yaml"], "the prices"),
        (["--gpus", "l4", "--rate", "2", "--model", "nobody/knows"], "unknown model"),
    ],
)
def test_bad_input_is_a_sentence(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--slo-ttft-ms", "500"],
        ["--rate", "2"],
        ["--rate", "2", "--slo-ttft-ms", "500", "--objective", "vidur"],
        ["--rate", "2", "--slo-ttft-ms", "500", "--num-prompts", "9"],
        ["--rate", "2", "--slo-ttft-ms", "500", "--dataset-name", "lanes"],
    ],
    ids=["rate", "objectives", "objective", "length", "jobs"],
)
def test_flags_are_checked_before_any_work(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("onbeat.cli.plan.Pool")
    assert main(["plan", *MODEL, "--gpus", "l4", *flags]) == 2


def test_calls_of_jobs_are_not_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--dataset-name", "agents", "--num-prompts", "60", "--slo-ttft-ms", "500"]
    assert main(["plan", *MODEL, *load, "--max-model-len", "20000", "--gpus", "l4", "--rate", "2"]) == 2
    assert "agents load" in capsys.readouterr().err


def test_plans_a_fleet_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("plan.yaml", "plan.json", "plan.html")}
    output = ["-o", str(files["plan.yaml"]), "--json", str(files["plan.json"])]
    flags = ["--gpus", "h100-sxm=2,l4=4", "--rate", "2", "--slo-tbt-ms", "100"]
    flags += ["--report", str(files["plan.html"])]
    assert plan(*flags, *output) == 0
    shown = capsys.readouterr().out
    assert re.search(r" serve 2 requests/s ", shown)
    assert "Plan: " in shown
    found = json.loads(files["plan.json"].read_text())
    assert found["best"]["is_kept"]
    assert all(fleet["usd_per_hour"] >= found["best"]["usd_per_hour"] for fleet in found["alternatives"])
    assert all(not fleet["is_kept"] for fleet in found["failed"])
    written = yaml.safe_load(files["plan.yaml"].read_text())
    assert written["fleet"]["replicas"] == sum(found["best"]["fleet"].values())
    assert written["plan"]["promise"]["request-rate"] == 2
    assert "Fleets that keep the promise" in files["plan.html"].read_text()


def test_a_plan_of_one_kind_names_its_device_and_makes_the_folders_of_its_files(tmp_path: Path) -> None:
    files = {flag: tmp_path / flag / "new" / "file" for flag in ("-o", "--json", "--report")}
    flags = [str(word) for pair in files.items() for word in pair]
    assert plan("--gpus", "l4=4", "--rate", "1", "--slo-tbt-ms", "100", *flags) == 0
    assert all(path.is_file() for path in files.values())
    written = yaml.safe_load(files["-o"].read_text())
    assert written["device"] == "l4"
    warnings = json.loads(files["--json"].read_text())["warnings"]
    assert any("promised 1" in line for line in warnings), "of two runs nothing is sure"


def test_files_that_cannot_be_written_are_named_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for flag in ("-o", "--json", "--report"):
        assert plan("--gpus", "nonsense", "--rate", "1", flag, str(tmp_path / "file" / "plan.yaml")) == 2
        assert "cannot write" in capsys.readouterr().err
    bad = str(tmp_path / "file" / "x.json")
    assert main(["capacity", "--model", "nobody/knows", "--device", "l4", "--json", bad]) == 2
    assert "--json: cannot write" in capsys.readouterr().err
    assert main(["simulate", "--model", "nobody/knows", "--device", "l4", "--records", bad]) == 2
    assert "--records: cannot write" in capsys.readouterr().err


def test_plans_with_a_device_and_an_engine_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device, prices, output = (tmp_path / name for name in ("mine.yaml", "prices.yaml", "plan.yaml"))
    device.write_text(
        "{memory_gib: 48, memory_bandwidth_gb_s: 900, peak_tflops: {bf16: 300}, tdp_watts: 300}"
    )
    prices.write_text(f"{device}: 0.4\n")
    flags = ["--gpus", f"{device}=4", "--rate", "2", "--engine", "vllm@0.6", "-o", str(output)]
    assert plan(*flags) == 2
    assert f"price of {device} " in " ".join(capsys.readouterr().err.split())
    assert plan(*flags, "--prices", str(prices)) == 0
    written = yaml.safe_load(output.read_text())
    section = written["plan"]
    assert written["device"] == str(device)
    assert str(device) in section["fleet"]
    assert "vllm@0.6" in section["step-times"]
    assert read_promise(output).share > 0


def test_classes_with_traces_of_their_own_are_planned_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "num_prefill_tokens,num_decode_tokens\n"
    (tmp_path / "chat.csv").write_text(header + "200,16\n300,20\n")
    (tmp_path / "code.csv").write_text(header + "1500,4\n")
    classes, output = tmp_path / "classes.yaml", tmp_path / "out" / "plan.yaml"
    classes.write_text(
        "classes:\n- {name: chat, share: 0.75, ttft_ms: 500, trace: chat.csv}\n"
        "- {name: code, share: 0.25, ttft_ms: 2000, trace: code.csv}\n"
    )
    flags = ["--gpus", "h100-sxm=2,l4=2", "--rate", "8", "--slo-config", str(classes), "-o", str(output)]
    assert main(["plan", *MODEL, *QUICK, *flags, "--json", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "by class: chat " in shown
    section = yaml.safe_load(output.read_text())["plan"]
    assert section["load"]["slo-config"] == "../classes.yaml"
    assert set(section["verified"]["by-class"]) == {"chat", "code"}
    shares = json.loads((tmp_path / "plan.json").read_text())["best"]["by_class"]
    together = json.loads((tmp_path / "plan.json").read_text())["best"]["attainment"][0]
    assert 0.75 * shares["chat"] + 0.25 * shares["code"] == pytest.approx(together)
    assert read_promise(output).load["slo-config"] == str(output.parent / "../classes.yaml")
    (tmp_path / "code.csv").write_text(header + "1500,5\n")
    with pytest.raises(ConfigError, match="plan again"):
        read_promise(output)


def test_what_cannot_be_kept_says_what_binds_and_what_could_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus", "l4=1", "--rate", "4") == INFEASIBLE
    shown = capsys.readouterr().out
    assert re.search(r"INFEASIBLE: .*1 . L4", shown)
    assert "attainment:0." in shown
    assert "--slo-ttft-ms " in shown
    assert plan("--gpus", "l4", "--rate", "4", "--slo-tbt-ms", "20") == INFEASIBLE
    shown = capsys.readouterr().out
    assert "--slo-tbt-ms" in shown


@pytest.mark.parametrize(
    ("flags", "num_suggested"),
    [
        # Runs differ: what one of them keeps, or their mean, is no promise.
        pytest.param(["--gpus", "l4=1", "--rate", "8", "--burstiness", "0.2"], 3, marks=pytest.mark.slow),
        # No replica serves a request in time even alone.
        (["--gpus", "l4=1", "--rate", "1", "--slo-ttft-ms", "30"], 1),
        (["--gpus", "l4", "--rate", "10", "--slo-ttft-ms", "30"], 1),
    ],
)
def test_what_is_said_to_be_kept_is_kept(
    flags: list[str], num_suggested: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*flags) == INFEASIBLE
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Nearest")]
    suggested = line.partition(": ")[2].split("; or ")
    assert len(suggested) == num_suggested
    for each in suggested:
        assert plan(*flags, *each.split()) == 0, each


@pytest.mark.parametrize(
    ("dtype", "kv", "served", "not_served"),
    [
        ("fp32", "auto", {"dtype": "float32"}, None),
        ("int8", "auto", {"quantization": "int8"}, None),
        ("fp16", "bf16", {}, "no weights in fp16"),
        ("fp8", "fp8", {"quantization": "fp8", "kv-cache-dtype": "fp8"}, None),
        ("int4", "int8", {}, "no weights in int4 and no KV cache in int8"),
    ],
)
def test_a_plan_says_which_number_formats_it_is_for(
    dtype: str,
    kv: str,
    served: dict[str, str],
    not_served: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "plan.yaml"
    formats = ["--dtype", dtype, "--kv-cache-dtype", kv, "--gpu-memory-utilization", "0.95"]
    assert plan("--gpus", "h100-sxm=2", "--rate", "2", *formats, "-o", str(output)) == 0
    written = yaml.safe_load(output.read_text())
    assert {
        key: written[key] for key in ("dtype", "quantization", "kv-cache-dtype") if key in written
    } == served
    section = written["plan"]
    assert (section["dtype"], section["kv-cache-dtype"], section["gpu-memory-utilization"]) == (
        dtype,
        kv,
        0.95,
    )
    warned = capsys.readouterr().err
    if not_served is None:
        assert "note" not in section
        assert "warning" not in warned
    else:
        assert not_served in section["note"]
        assert not_served in warned


def test_headroom_buys_what_the_promise_alone_does_not_need(tmp_path: Path) -> None:
    """The fleet keeps the rate with its headroom; what the file promises, and a test sends, is the rate."""
    plans = {}
    for headroom in ("0", "100"):
        output = tmp_path / f"{headroom}.yaml"
        flags = ["--gpus", "h100-sxm=4", "--rate", "20", "--headroom", headroom, "-o", str(output)]
        assert plan(*flags) == 0
        plans[headroom] = yaml.safe_load(output.read_text())["plan"]
    bare, roomy = plans["0"], plans["100"]
    assert "headroom" not in bare["promise"]
    assert roomy["promise"] == bare["promise"] | {"headroom": 100}
    assert roomy["load"] == bare["load"]
    assert roomy["verified"]["capacity"][0] >= 40 > bare["verified"]["capacity"][0]
    assert roomy["verified"]["attainment"][0] >= bare["verified"]["attainment"][0]
    assert roomy["cost-per-hour"] > bare["cost-per-hour"]


def test_two_processes_plan_what_one_plans(tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        output = tmp_path / f"{jobs}.json"
        flags = ["--gpus", "h100-sxm=2,l4=4", "--rate", "12", "--jobs", jobs, "--json", str(output)]
        assert plan(*flags) == 0
        document = json.loads(output.read_text())
        found.append({name: document[name] for name in ("best", "alternatives", "failed", "units")})
    assert found[0] == found[1]


def test_the_size_of_a_planned_fleet_is_not_left_to_a_scaler(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan("--gpus", "l4", "--rate", "8", "--autoscale", "4..4")
    assert "unknown flag --autoscale" in capsys.readouterr().err


@pytest.mark.slow
def test_pools_are_planned_where_they_are_cheaper_and_the_file_starts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A TBT objective near the time of a step of decodes alone: chunks of prompts do not fit."""
    file = tmp_path / "plan.yaml"
    load = ["--random-input-len", "8000", "--random-output-len", "100", "--num-prompts", "400"]
    slo = ["--slo-ttft-ms", "2000", "--slo-tbt-ms", "19"]
    model = ["--model", "Llama-3.1-70B", "--tp", "4", "--gpus", "h100-sxm=64", "--rate", "5"]
    assert main(["plan", *model, *load, *slo, "--repeats", "1", "--disable-tqdm", "-o", str(file)]) == 0
    assert "for generation" in capsys.readouterr().out

    fleet = yaml.safe_load(file.read_text())["fleet"]
    pools = parse_pools(fleet["disaggregate"])
    assert pools.prefill > pools.decode > 0
    result = tmp_path / "run.json"
    run = ["--config", str(file), *load, "--request-rate", "5", "--json", str(result)]
    assert main(["simulate", *run]) == 0
    assert json.loads(result.read_text())["attainment"] >= 0.9
