"""What `onbeat simulate` reads: flags, traces, tables of steps, profiles."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from onbeat.cli.main import main
from onbeat.perfmodel.precision import Precision
from tests.many_cases import each_case
from tests.pure.cli.simulating import AZURE, CAPACITY, MODEL, error_of, replay_trace, simulate, summary_of
from tests.pure.perfmodel.test_models import write_fitted
from tests.pure.perfmodel.test_step_table import write_measured

AZURE_LINES = [
    "2023-11-16 18:15:46.6805900,374,44\n",
    "2023-11-16 18:15:50.9951690,396,19\n",
    "2023-11-16 18:15:51.2225670,879,55\n",
]


BAD_FLAGS = [
    (["--model", "llama-3.1-8x"], "'llama-3.1-8x': did you mean llama-3.1-8b"),
    (["--model", "./nowhere/config.json"], "directory ./nowhere/config.json"),
    (["--device", "h100"], "'h100': did you mean h100-sxm or h100-pcie or h100-nvl?"),
    (["--device", "v100"], "bf16; it has fp32, fp16:"),
    (["--policy", "saarthi"], "'saarthi'; did you mean sarathi?"),
    (["--router", "roundrobin"], "'roundrobin'; did you mean round-robin?"),
    (["--step-time", "rofline"], "mean roofline?"),
    (["--tp", "3"], "degree of 3 "),
    (["--tp", "0"], "tensor_parallel_size is 0;"),
    (["--pp", "100"], "32 layers; they cannot make 100"),
    (["--model", "llama-3.1-70b"], "fit NVIDIA H100"),
    (["--model", "llama-3.1-70b"], "--tp 2, or --pp 2, or --dtype fp8"),
    (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization is nan; it must be at most 1"),
    (["--num-blocks", "0"], "num_blocks is 0;"),
    (["--num-blocks", "10"], "of 160 tokens"),
    (["--block-size", "0"], "block_size is 0;"),
    (["--max-model-len", "200"], "request 0: prompt 300 + output 20"),
    (["--max-model-len", "1000000"], "for 131072 tokens"),
    (["--max-num-batched-tokens", "100"], "is below max_num_seqs (256)"),
    (["--max-num-batched-tokens", "512", "--policy", "orca"], "at least max_model_len (131072)"),
    (["--max-num-batched-tokens", "auto"], "give --slo-tbt-ms"),
    (["--max-num-batched-tokens", "auto", "--slo-tbt-ms", "3"], "TBT objective"),
    (["--request-rate", "0"], "request_rate is 0.0;"),
    (["--request-rate=-1"], "request_rate is -1"),
    (["--request-rate", "nan"], "request_rate is nan"),
    (["--num-prompts", "0"], "--num-prompts must be at least 1 and at most 100,000,000, got 0"),
    (["--num-prompts", str(10**20)], "--num-prompts must be at least 1 and at most 100,000,000"),
    (["--step-noise", "1e308"], "step_noise is 1e+308;"),
    (["--input-len", "0"], "input_len is 0;"),
    (["--output-len", "0"], "output_len is 0;"),
    (
        ["--output-len", "99999999999999999999"],
        "output_len is 99999999999999999999;",
    ),
    (["--max-concurrency", "0"], "max_concurrency is 0"),
    (["--seed=-1"], "seed is -1"),
    (["--host-overhead-ms", "nan"], "500, got 'nan'"),
    (["--host-overhead-ms", "-1"], "host_overhead_ms is -1"),
    (["--step-noise", "nan"], "step_noise is nan"),
    (["--step-noise=-0.1"], "step_noise is -0.1"),
    (["--shed", "rejct"], "'rejct'; did you mean reject?"),
    (["--slo-mode", "gaps"], "'gaps'; did you mean gap?"),
    (["--shed-order", "longest"], "'longest'; did you mean longest-wait?"),
    (["--shed-order", "longest-wait", "--policy", "sarathi"], "'sarathi' predicts no waits"),
    (["--max-num-queued-reqs", "0"], "max_num_queued_reqs is 0;"),
    (["--max-num-queued-tokens", "-3"], "max_num_queued_tokens is -3;"),
    (["--slo-tbt-ms", "nan"], "500, got 'nan'"),
    (["--slo-tbt-ms", "0.1"], "tbt objective is 0.1 ms"),
    (["--slo-config", "interactiv"], "class interactive?"),
    (["--disaggregate", "1"], "both pools"),
    (["--disaggregate", "prefill=1,decode=1", "--replicas", "3"], "leave --replicas out"),
    (["--disaggregate", "prefill=1,decode=1", "--kv-transfer-gbps", "nan"], "is nan"),
    (["--kv-transfer-gbps", "0"], "kv_transfer_gbps is 0.0; it must be above 0"),
    (["--kv-transfer-gbps", "-5"], "kv_transfer_gbps is -5.0; it must be above 0"),
    (["--rate", "5"], "did you mean --request-rate?"),
    (["--plot", "run.html"], "did you mean --report?"),
    (
        ["--speculative-config", '{"method": "ngram"}', "--acceptance-rate", "fast=0.5"],
        "--acceptance-rate fast=0.5: the load has no such class; it has none",
    ),
    (["--pool-rule", "distserve"], "unknown flag --pool-rule"),
    (["--kinds", "device=l4,replicas=2"], "up 2 replicas, but --replicas is 1"),
    (["--kinds", "gpu=l4"], "no kind"),
    (["--kv-transfer-latency-ms", "1"], "link between"),
    (["--step-time", "fitted"], "--profile FILE"),
    (["--profile", "nowhere.json"], "no profile"),
    (["--step-time", "fitted", "--profile", "nowhere.json"], "nowhere.json"),
    (["--json", "/proc/nowhere/x"], "--json: cannot write /proc/nowhere/x"),
    (["--report", "/"], "--report: cannot write /"),
    (["--config", "nowhere.yaml"], "nowhere.yaml"),
    (["--num-promts", "3"], "mean --num-prompts?"),
]


@each_case(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = simulate(*flags)
    except SystemExit as exit_:  # argparse leaves this way
        code = int(str(exit_.code))
    assert code == 2
    assert message in error_of(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (AZURE, "no requests"),
        (AZURE + AZURE_LINES[1] + AZURE_LINES[0], "line 3: the time is 4.31458 s before that of line 2"),
        (AZURE + AZURE_LINES[0] + "2023-11-16 18:15:50.99,abc,9\n", "line 3: bad value"),
        (AZURE + AZURE_LINES[0] + "2023-11-16 18:15:50.99,3\n", "line 3: the header names 3"),
        (AZURE + "2023-11-16 18:15:50.99,-3,9\n", "line 2: a negative length"),
        (AZURE + f"2023-11-16 18:15:50.99,9,{10**19}\n", "line 2: a length above 16,777,216"),
        (AZURE + "noon,3,9\n", "line 2: bad value"),
        (AZURE.replace("Context", "Contxt") + AZURE_LINES[0], "unknown columns TIMESTAMP, ContxtTokens"),
        (
            AZURE + AZURE_LINES[0] + "2023-11-16 18:15:51.5,900000,9\n",
            "line 3: prompt 900000",
        ),
        ('{"timestamp": 0, "input_le\n', "line 1 is not JSON"),
        ('[{"conversations": []}]', "--dataset-name sharegpt"),
        (
            '{"timestamp": -5, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n',
            "line 1: the time is -0.005",
        ),
    ],
)
def test_bad_traces(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert replay_trace(path) == 2
    assert message in error_of(capsys)


def test_a_packed_trace_is_read_and_a_damaged_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv.gz"
    packed = gzip.compress((AZURE + "".join(AZURE_LINES)).encode())
    path.write_bytes(packed)
    assert replay_trace(path) == 0
    capsys.readouterr()
    path.write_bytes(packed[:60])
    assert replay_trace(path) == 2
    assert "trace.csv.gz" in error_of(capsys)


def test_requests_that_do_not_fit_can_be_left_out(tmp_path: Path) -> None:
    path, result = tmp_path / "trace.csv", tmp_path / "summary.json"
    path.write_text(AZURE + "".join(AZURE_LINES))
    flags = ("--max-model-len", "500", "--overlong", "skip", "--json", str(result))
    assert replay_trace(path, *flags) == 0
    found = json.loads(result.read_text())
    assert (found["completed"], found["num_overlong"]) == (2, 1)


def test_a_table_of_measured_steps_is_used_and_its_error_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, profile = write_measured(tmp_path / "steps.csv"), str(tmp_path / "profile.json")
    assert main(["profile", "--from", str(table), *MODEL, "--output", profile]) == 0
    assert "Fitted by roofline: " in " ".join(capsys.readouterr().out.split())
    flags = ["--step-time", "fitted", "--profile", profile]
    sheets, measured = summary_of(tmp_path), summary_of(tmp_path, *flags)
    assert measured["mean_tpot_ms"] > sheets["mean_tpot_ms"] + 4  # its host takes 5 ms a step
    shown = " ".join(capsys.readouterr().err.split())
    assert "step times: fitted, " in shown
    assert " 3 held-back points)" in shown
    assert main(["capacity", *MODEL, *flags, *CAPACITY]) == 0
    assert " 3 held-back points)" in " ".join(capsys.readouterr().err.split())


def test_an_engine_takes_longer_and_plans_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, engine = summary_of(tmp_path), summary_of(tmp_path, "--engine", "vllm")
    assert (plain["engine"], engine["engine"]) == ("none", "vllm")
    assert engine["mean_tpot_ms"] > 1.02 * plain["mean_tpot_ms"]
    more = engine["mean_ttft_ms"] - plain["mean_ttft_ms"]
    assert more > 0.4 * engine["mean_tpot_ms"]  # an idle replica begins at once
    assert re.search(r"step times: roofline of vllm \(.* 0\.14 .* 0\.20\)", capsys.readouterr().err)


def test_an_older_version_of_an_engine_takes_longer_and_plans_no_step_ahead(tmp_path: Path) -> None:
    new, old = (summary_of(tmp_path, "--engine", name) for name in ("vllm", "vllm@0.6"))
    assert old["engine"] == "vllm@0.6"
    assert old["mean_tpot_ms"] > new["mean_tpot_ms"]


def test_a_device_and_the_terms_of_an_engine_may_be_files(tmp_path: Path) -> None:
    entries = yaml.safe_load(files("onbeat.perfmodel").joinpath("data", "devices.yaml").read_text())
    device, engine = tmp_path / "device.yaml", tmp_path / "engine.yaml"
    device.write_text(yaml.safe_dump(entries["h100-sxm"]))
    terms = yaml.safe_load(files("onbeat.perfmodel").joinpath("data", "engines.yaml").read_text())["engines"]
    engine.write_text(yaml.safe_dump(terms["vllm"][-1]))
    named = summary_of(tmp_path, "--device", "h100-sxm", "--engine", "vllm")
    from_files = summary_of(tmp_path, "--device", str(device), "--engine", str(engine))
    assert (from_files["device"], from_files["engine"]) == (str(device), str(engine))
    for name in ("mean_ttft_ms", "mean_tpot_ms", "duration"):
        assert from_files[name] == named[name]


@pytest.mark.parametrize("flag", ["--device", "--engine"])
def test_a_file_with_a_wrong_field_ends_the_command_with_a_sentence(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("speed: 3")
    assert simulate(flag, str(path)) == 2
    assert "mine.yaml" in error_of(capsys)


def edit_profile(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_fitted_profile_is_used(tmp_path: Path) -> None:
    write_fitted(tmp_path / "p.json")
    fitted = summary_of(tmp_path, "--step-time", "fitted", "--profile", str(tmp_path / "p.json"))
    assert fitted["step_time"] == "fitted"
    assert fitted["mean_step_ms"] > 1.5 * summary_of(tmp_path)["mean_step_ms"]  # of a slower machine


def test_the_formats_beside_the_weights_are_those_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of int4 weights on a CPU are of no flag: arithmetic, cache and head are in 32 bits."""
    path = tmp_path / "p.json"
    write_fitted(path, Precision(weights="int4", kv="fp32", compute="fp32", embedding="fp32", group=128))
    flags = ["--dtype", "int4", "--step-time", "fitted", "--profile", str(path)]
    measured, sheets = summary_of(tmp_path, *flags), summary_of(tmp_path, "--dtype", "int4")
    assert measured["num_blocks"] < 0.6 * sheets["num_blocks"]
    assert main(["capacity", *MODEL, *flags, *CAPACITY]) == 0
    assert simulate(*flags, "--kv-cache-dtype", "fp8") == 2
    assert "is of a KV cache in fp32, not fp8; leave --kv-cache-dtype out" in error_of(capsys)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["steps"][3].__setitem__(-1, float("nan")), "steps[3][15] is nan"),
        (lambda content: content["steps"][3].__setitem__(-1, 0.0), "a time above 0. Run `onbeat profile"),
        (lambda content: content.update(schema_version=9), "version 9"),
        (lambda content: content["key"].update(model="Llama-2-7b-hf"), "model 'Llama-2-7b-hf',"),
        (lambda content: content["key"].update(device="h200"), "'h200', not 'h100-sxm'"),
        (
            lambda content: content["key"]["precision"].update(weights="int8"),
            "int8 weights, not bf16. Give --dtype int8",
        ),
        (lambda content: content["key"]["parallelism"].update(tensor=2), "of parallelism 'TP 2, PP 1', not"),
        (lambda content: content["fit"]["parameters"].popitem(), "run `onbeat profile MODEL` again"),
        (lambda content: content["fit"].update(ratios=[]), "fit.ratios is []"),
        (lambda content: content["fit"]["parameters"].update(gemm_efficiency=-1), "gemm_efficiency is -1"),
        (lambda content: content["fit"]["parameters"].update(gemm_efficiency=0), "gemm_efficiency is 0"),
        (
            lambda content: content["fit"]["parameters"].update(step_seconds=10**400),
            "has 300 digits",
        ),
        (lambda content: content["fit"]["parameters"].update(step_seconds=1e299), "step_seconds is 1e+299"),
    ],
    ids=[
        "nan",
        "zero",
        "version",
        "model",
        "device",
        "dtype",
        "tp",
        "parameters",
        "ratios",
        "negative",
        "no-rate",
        "huge",
        "large",
    ],
)
def test_bad_profiles(
    edit: Callable[[dict[str, Any]], object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "p.json"
    write_fitted(path)
    edit_profile(path, edit)
    assert simulate("--step-time", "fitted", "--profile", str(path)) == 2
    assert message in error_of(capsys)


def test_a_capacity_says_in_its_file_what_happened_to_its_fleet(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    kinds = ["--replicas", "2", "--kinds", "replicas=1", "device=l4,replicas=1"]
    fleet = ["--fleet-changes", "1.5 kill 0", *kinds]
    assert main(["capacity", *MODEL, *CAPACITY, *fleet, "--json", str(path), "--disable-tqdm"]) == 0
    flags = json.loads(path.read_text())["settings"]["flags"]
    assert flags["fleet_changes"] == ["1.5 kill 0"]
    assert flags["kinds"] == ["replicas=1", "device=l4,replicas=1"]
