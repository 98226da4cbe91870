"""`onbeat simulate`: what it prints and saves, its exit codes, and what it says of bad input."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from onbeat.cli.main import main
from onbeat.cli.options import read_options
from onbeat.cli.simulate_options import add_simulation_arguments, replica_settings
from onbeat.core.slo import ShedMode
from onbeat.metrics.summary import SummaryOptions
from onbeat.scheduler.config import DEFAULT_POLICY
from onbeat.simulator.setup import build_simulation
from tests.pure.perfmodel.test_models import write_fitted
from tests.pure.perfmodel.test_step_table import write_measured

DATA = Path(__file__).parents[2] / "data"
MODEL = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm"]
LOAD = ["--num-prompts", "12", "--input-len", "300", "--output-len", "20", "--request-rate", "10"]
CAPACITY = ["--num-prompts", "40", "--input-len", "300", "--slo-tbt-ms", "200", "--repeats", "1"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_LINES = [
    "2023-11-16 18:15:46.6805900,374,44\n",
    "2023-11-16 18:15:50.9951690,396,19\n",
    "2023-11-16 18:15:51.2225670,879,55\n",
]


def simulate(*flags: str) -> int:
    """Run the command; a flag of `MODEL` or `LOAD` that is given again wins."""
    return main(["simulate", *MODEL, *LOAD, "--disable-tqdm", *flags])


def replay_trace(path: Path, *flags: str) -> int:
    return main(["simulate", *MODEL, "--trace", str(path), *flags])


def summary_of(tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "summary.json"
    assert simulate("--json", str(path), *flags) == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says what is wrong; what came before it is not an error."""
    lines = capsys.readouterr().err.splitlines()
    assert "error: " in lines[-1]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def test_prints_the_configuration_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate() == 0
    shown = capsys.readouterr()
    assert "Llama-3.1-8B (bf16) on 1 x NVIDIA H100" in shown.err
    for words in ("requests completed", "TTFT", "TBT", "KV cache at its fullest", "preemptions"):
        assert words in shown.out


def test_the_summary_has_the_keys_of_a_measured_run(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "--slo-ttft-ms", "500", "--slo-tbt-ms", "50")
    assert found["schema_version"] == 1
    assert found["backend"] == "simulation"
    assert found["interrupted"] is False
    assert found["completed"] == found["num_prompts"] == 12
    assert found["attainment"] == 1.0
    assert found["goodput"] == pytest.approx(12 / found["duration"])
    assert found["classes"]["default"]["attainment"] == 1.0
    assert found["total_output_tokens"] == 240
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p99"):
            assert found[f"{statistic}_{metric}_ms"] >= 0
    for key in ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"):
        assert found[key] > 0


CLASSES = """
classes:
- {name: easy, ttft_ms: 60000, share: 0.6, tenant: a}
- {name: loose, ttft_ms: 60000, share: 0.2, tenant: b}
- {name: hard, ttft_ms: 1, share: 0.2, tenant: b}
"""


def test_a_run_with_objectives_says_who_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "slo.yaml"
    config.write_text(CLASSES)
    flags = ["--num-prompts", "40", "--dataset-name", "conversation", "--slo-config", str(config)]
    records = tmp_path / "records.jsonl"
    found = summary_of(tmp_path, *flags, "--records", str(records))
    assert [own["offered"] for own in found["attainment_by_prompt_decile"]] == [4] * 10
    assert [(own["tenant"], own["attainment"]) for own in found["attainment_by_tenant"]] == [
        ("a", 1.0),
        ("b", 0.5),
    ]
    tenants = [json.loads(line)["tenant"] for line in records.read_text().splitlines()]
    assert (tenants.count("a"), tenants.count("b")) == (24, 16)
    worst, out = found["worst_decile"], capsys.readouterr().out
    assert worst["attainment"] == min(own["attainment"] for own in found["attainment_by_prompt_decile"])
    span = f"{worst['min_prompt_tokens']:,} to {worst['max_prompt_tokens']:,}"
    assert f"Worst decile (prompts of {span} tokens): " in out
    for words in ("Objectives by length of prompt", "Objectives by tenant", "longest wait"):
        assert words in out


def test_a_fleet_that_something_happens_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "fleet.record"
    fleet = ["--replicas", "3", "--policy", "slo", "--fleet-changes", "1 kill 0", "2 restart 1"]
    flags = ["--num-prompts", "40", "--request-rate", "10", "--replica-start-seconds", "1"]
    found = summary_of(tmp_path, *fleet, *flags, "--record", str(record))
    assert found["router"] == "slo"
    assert found["completed"] == 40
    assert found["fleet_decisions"]["start"] == 5
    assert "fleet decisions: " in capsys.readouterr().out
    assert main(["replay", str(record)]) == 0
    assert "decisions: identical in" in capsys.readouterr().out


def test_replicas_are_busy_for_a_share_of_the_time_that_they_are_held(tmp_path: Path) -> None:
    """Those that are there to be started, but are not, count no time."""
    flags = ["--policy", "slo", "--slo-ttft-ms", "2000", "--num-prompts", "80"]
    one = summary_of(tmp_path, *flags, "--autoscale", "1..1")["replica_busy_share"]
    several = summary_of(tmp_path, *flags, "--fleet-changes", "0.5 scale 1", "--replicas", "4")
    assert several["replica_busy_share"] == pytest.approx(one, rel=0.25)


def keys_in(document: Any) -> Any:
    """The keys of a document, in their order; of a list those of its first entry."""
    if isinstance(document, dict):
        return [(key, keys_in(value)) for key, value in document.items()]
    return keys_in(document[0]) if isinstance(document, list) and document else None


def test_the_keys_of_the_summary_stay(tmp_path: Path) -> None:
    config = tmp_path / "slo.yaml"
    config.write_text(CLASSES)
    flags = ["--num-prompts", "40", "--dataset-name", "conversation", "--policy", "slo"]
    found = summary_of(tmp_path, *flags, "--slo-config", str(config))
    saved = json.loads((DATA / "simulation_result.json").read_text())
    assert keys_in(found) == keys_in(saved)


def test_a_load_without_a_rate_is_saved_as_such(tmp_path: Path) -> None:
    assert summary_of(tmp_path, "--request-rate", "inf")["request_rate"] == "inf"


def test_a_run_without_objectives_blames_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(tmp_path)
    assert (found["worst_decile"], found["attainment_by_prompt_decile"]) == (None, [])
    out = capsys.readouterr().out
    assert "Worst decile" not in out
    assert "Objectives by" not in out


def test_equal_seeds_give_equal_summaries(tmp_path: Path) -> None:
    first, second, other = (
        summary_of(tmp_path, "--dataset-name", "conversation", "--seed", seed) for seed in ("7", "7", "8")
    )
    for summary in (first, second):
        del summary["wall_seconds"], summary["date"]
    assert first == second
    assert first["mean_ttft_ms"] != other["mean_ttft_ms"]


def test_saves_all_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, records, timeline = (tmp_path / name for name in ("r.html", "sub/records.jsonl.gz", "t.json"))
    assert simulate("--report", str(report), "--records", str(records), "--timeline", str(timeline)) == 0
    assert "Simulation of Llama-3.1-8B" in report.read_text()
    lines = [json.loads(line) for line in gzip.decompress(records.read_bytes()).splitlines()]
    assert [line["output_tokens"] for line in lines] == [20] * 12
    assert {event["ph"] for event in json.loads(timeline.read_text())} >= {"X", "M"}
    assert capsys.readouterr().err.count("saved ") == 3


def test_what_cannot_be_saved_is_shown_and_the_rest_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.html"
    assert simulate("--json", "/dev/full", "--report", str(report)) == 2
    shown = capsys.readouterr()
    assert "requests completed" in shown.out
    assert "cannot write /dev/full: No space left on device" in shown.err
    assert report.exists()


def test_compares_with_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{policy}.json") for policy in ("sarathi", "orca")]
    for path, policy in zip(paths, ("sarathi", "orca"), strict=True):
        assert simulate("--policy", policy, "--max-model-len", "4096", "--json", path) == 0
    capsys.readouterr()
    assert main(["bench", "compare", *paths]) == 0
    assert "p99_ttft_ms" in capsys.readouterr().out


def test_flags_come_from_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("policy: orca\nmax_model_len: 4096\nnum-prompts: 5\n")
    path = tmp_path / "summary.json"
    assert main(["simulate", *MODEL, "--config", str(config), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["policy"], found["completed"]) == ("orca", 5)


def test_an_automatic_budget_is_chosen_for_the_contexts_of_the_load(tmp_path: Path) -> None:
    flags = ("--max-num-batched-tokens", "auto", "--slo-tbt-ms", "50")
    short = summary_of(tmp_path, *flags)["max_num_batched_tokens"]
    long = summary_of(tmp_path, *flags, "--input-len", "1600")["max_num_batched_tokens"]
    assert short > long >= 256
    assert short % 128 == long % 128 == 0


def test_prefill_and_decode_pools(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "--disaggregate", "prefill=1,decode=2")
    assert (found["completed"], found["num_gpus"]) == (12, 3)
    assert found["policy"] == DEFAULT_POLICY


def test_pools_of_unlike_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("device=h100-sxm,tp=2,policy=sarathi", "device=a100-80-sxm,replicas=2")
    pools = ("--disaggregate", "prefill=1,decode=2", "--pool-rule", "splitwise")
    found = summary_of(tmp_path, *pools, "--kinds", *kinds)
    assert (found["completed"], found["num_gpus"], found["replicas"]) == (12, 4, 3)
    assert (found["policy"], found["device"], found["tensor_parallel_size"]) == ("sarathi", "h100-sxm", 2)
    assert found["kinds"] == [f"{kinds[0]},replicas=1", kinds[1]]
    assert "on 4 devices (device=h100-sxm,tp=2,policy=sarathi,replicas=1;" in capsys.readouterr().err
    alike = summary_of(
        tmp_path, *pools, "--kinds", kinds[0], kinds[0].replace(",policy", ",replicas=2,policy")
    )
    assert alike["num_gpus"] == 6
    assert alike["mean_tpot_ms"] < 0.8 * found["mean_tpot_ms"], "the slower device generates"


def test_a_fleet_of_llumnix(tmp_path: Path) -> None:
    rules = ("--router", "freeness", "--move-rule", "llumnix", "--autoscale-policy", "freeness")
    found = summary_of(tmp_path, *rules, "--autoscale", "1..2", "--kv-transfer-gbps", "16")
    assert found["completed"] == 12
    assert found["router"] == "freeness"


def test_a_full_queue_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(
        tmp_path,
        *("--request-rate", "inf", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"),
        *("--max-num-queued-reqs", "3", "--slo-ttft-ms", "500"),
    )
    assert found["rejected"] > 0
    assert found["offered"] == 12 == found["completed"] + found["rejected"]
    assert (found["failed"], found["expired"], found["relegated"]) == (0, 0, 0)
    assert found["admitted"] == found["completed"]
    assert found["attainment_admitted"] == found["good"] / found["admitted"] > found["attainment"]
    assert found["classes"]["default"]["rejected"] == found["rejected"]
    assert (found["shed"], found["max_num_queued_reqs"]) == ("relegate", 3)
    assert "requests rejected" in capsys.readouterr().out


def test_noise_changes_times_but_not_what_is_asked(tmp_path: Path) -> None:
    exact, noisy, again = (
        summary_of(tmp_path, "--step-noise", noise, "--seed", "3") for noise in ("0", "0.2", "0.2")
    )
    assert noisy["total_output_tokens"] == exact["total_output_tokens"]
    assert noisy["mean_itl_ms"] != exact["mean_itl_ms"]
    assert noisy["mean_itl_ms"] == again["mean_itl_ms"]


def test_what_is_scored_is_what_is_planned_for() -> None:
    """One flag says what keeping a TBT objective means, to the policy and to the score."""
    parser = argparse.ArgumentParser()
    add_simulation_arguments(parser)
    flags = ["--slo-mode", "gap", "--shed", "reject", "--max-num-queued-tokens", "9k"]
    flags += ["--shed-order", "longest-wait"]
    args = parser.parse_args([*MODEL, *flags])
    settings = replica_settings(args)
    assert (settings.limits.slo_mode, settings.shed) == ("gap", ShedMode.REJECT)
    config = build_simulation(settings).config
    assert (config.scheduler.slo_mode, config.scheduler.max_num_queued_tokens) == ("gap", 9000)
    assert (config.shed, config.scheduler.shed_order) == (ShedMode.REJECT, "longest-wait")
    assert read_options(args, SummaryOptions).slo_mode == "gap"


BAD_FLAGS = [
    (["--model", "llama-3.1-8x"], "unknown model 'llama-3.1-8x': did you mean llama-3.1-8b"),
    (["--model", "./nowhere/config.json"], "there is no file or directory ./nowhere/config.json"),
    (["--device", "h100"], "unknown device 'h100': did you mean h100-sxm or h100-pcie?"),
    (["--device", "v100"], "does not compute in bf16; it has fp32, fp16: choose one of these"),
    (["--policy", "saarthi"], "invalid choice: 'saarthi'; did you mean sarathi?"),
    (["--router", "roundrobin"], "invalid choice: 'roundrobin'; did you mean round-robin?"),
    (["--step-time", "rofline"], "did you mean roofline?"),
    (["--tp", "3"], "a tensor-parallel degree of 3 does not divide"),
    (["--tp", "0"], "tensor_parallel_size is 0; it must be at least 1"),
    (["--pp", "100"], "32 layers; they cannot make 100 stages"),
    (["--model", "llama-3.1-70b"], "does not fit NVIDIA H100"),
    (["--model", "llama-3.1-70b"], "What fits: --tp 2, or --pp 2, or --dtype fp8"),
    (["--gpu-memory-utilization", "nan"], "above 0 and at most 1"),
    (["--num-blocks", "0"], "num_blocks is 0; it must be at least 1"),
    (["--num-blocks", "10"], "do not fit a context of 160 tokens"),
    (["--block-size", "0"], "block_size is 0; it must be at least 1"),
    (["--max-model-len", "200"], "first is request 0: prompt 300 + output 20 tokens"),
    (["--max-model-len", "1000000"], "was made for 131072 tokens"),
    (["--max-num-batched-tokens", "100"], "is below max_num_seqs (256)"),
    (["--max-num-batched-tokens", "512", "--policy", "orca"], "at least max_model_len (131072)"),
    (["--max-num-batched-tokens", "auto"], "give --slo-tbt-ms"),
    (["--max-num-batched-tokens", "auto", "--slo-tbt-ms", "3"], "no token budget keeps the TBT objective"),
    (["--request-rate", "0"], "--request-rate must be above 0 (or inf), got 0"),
    (["--request-rate=-1"], "got -1"),
    (["--request-rate", "nan"], "got nan"),
    (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
    (["--input-len", "0"], "a length must be at least 1 token, got 0"),
    (["--output-len", "0"], "--output-len must be at least 1, got 0"),
    (["--max-concurrency", "0"], "max_concurrency is 0"),
    (["--seed=-1"], "expected a whole number of at least 0, got '-1'"),
    (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
    (["--host-overhead-ms", "nan"], "expected milliseconds, such as 500, got 'nan'"),
    (["--host-overhead-ms", "-1"], "host_overhead is -0.001 s"),
    (["--step-noise", "nan"], "step_noise is nan; it must be a finite number, 0 or more"),
    (["--step-noise=-0.1"], "step_noise is -0.1"),
    (["--shed", "rejct"], "invalid choice: 'rejct'; did you mean reject?"),
    (["--slo-mode", "gaps"], "invalid choice: 'gaps'; did you mean gap?"),
    (["--shed-order", "longest"], "invalid choice: 'longest'; did you mean longest-wait?"),
    (["--shed-order", "longest-wait", "--policy", "sarathi"], "policy 'sarathi' has no choice of whom to"),
    (["--max-num-queued-reqs", "0"], "max_num_queued_reqs is 0; it must be at least 1"),
    (["--max-num-queued-tokens", "-3"], "max_num_queued_tokens is -3; it must be at least 1"),
    (["--slo-tbt-ms", "nan"], "expected milliseconds, such as 500, got 'nan'"),
    (["--slo-tbt-ms", "0.1"], "the tbt objective is 0.1 ms"),
    (["--slo-config", "interactiv"], "did you mean the built-in class interactive?"),
    (["--disaggregate", "1"], "give the replicas of both pools"),
    (["--disaggregate", "prefill=1,decode=1", "--replicas", "3"], "leave --replicas out"),
    (["--disaggregate", "prefill=1,decode=1", "--kv-transfer-gbps", "nan"], "is nan"),
    (["--pool-rule", "distserve"], "is for --disaggregate"),
    (["--move-rule", "llumnix"], "is for streams that move; give --kv-transfer-gbps, or leave it out"),
    (["--kinds", "device=l4,replicas=2"], "make up 2 replicas, but --replicas is 1"),
    (["--kinds", "gpu=l4"], "is no kind of replica"),
    (["--kv-transfer-latency-ms", "1"], "of a link that no KV goes over"),
    (["--step-time", "fitted"], "needs a profile: --profile FILE"),
    (["--profile", "nowhere.json"], "the roofline takes no profile"),
    (["--step-time", "fitted", "--profile", "nowhere.json"], "cannot read the profile nowhere.json"),
    (["--json", "/proc/nowhere/x"], "--json: cannot write /proc/nowhere/x"),
    (["--report", "/"], "--report: cannot write /"),
    (["--config", "nowhere.yaml"], "cannot read the configuration file nowhere.yaml"),
    (["--num-promts", "3"], "did you mean --num-prompts?"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=lambda value: " ".join(value)[:50])
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
        ("", "trace.csv: the file is empty"),
        (AZURE, "has a header but no requests"),
        (AZURE + AZURE_LINES[1] + AZURE_LINES[0], "line 3: the time is 4.31458 s before that of line 2"),
        (AZURE + AZURE_LINES[0] + "2023-11-16 18:15:50.99,abc,9\n", "line 3: bad value"),
        (AZURE + AZURE_LINES[0] + "2023-11-16 18:15:50.99,3\n", "line 3: the header names 3 columns"),
        (AZURE + "2023-11-16 18:15:50.99,-3,9\n", "line 2: a negative length"),
        (AZURE + "noon,3,9\n", "line 2: bad value"),
        (AZURE.replace("Context", "Contxt") + AZURE_LINES[0], "unknown columns TIMESTAMP, ContxtTokens"),
        (
            AZURE + AZURE_LINES[0] + "2023-11-16 18:15:51.5,900000,9\n",
            "the first is on line 3: prompt 900000",
        ),
        ('{"timestamp": 0, "input_le\n', "line 1: not JSON"),
        (
            '{"timestamp": -5, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n',
            "line 1: the time is -0.005 s; times must be finite and not negative",
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
    assert "trace.csv.gz: the gzip file is damaged" in error_of(capsys)


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
    table = str(write_measured(tmp_path / "steps.csv"))
    sheets, measured = summary_of(tmp_path), summary_of(tmp_path, "--step-time", table)
    assert measured["mean_tpot_ms"] > sheets["mean_tpot_ms"] + 4  # its host takes 5 ms a step
    assert measured["step_time"] == table
    shown = " ".join(capsys.readouterr().err.split())
    assert f"step times: {table}, fitted to measured steps (relative error: mean " in shown
    assert "on 16 held-back points)" in shown
    assert main(["capacity", *MODEL, "--step-time", table, *CAPACITY]) == 0
    assert "on 16 held-back points)" in " ".join(capsys.readouterr().err.split())


def test_an_engine_takes_longer_and_plans_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, engine = summary_of(tmp_path), summary_of(tmp_path, "--engine", "vllm")
    assert (plain["engine"], engine["engine"]) == ("none", "vllm")
    assert engine["mean_tpot_ms"] > 1.05 * plain["mean_tpot_ms"]
    more = engine["mean_ttft_ms"] - plain["mean_ttft_ms"]
    assert more > 0.4 * engine["mean_tpot_ms"]  # an idle replica begins at once
    assert "step times: roofline of vllm (terms from version 0.14 on)" in capsys.readouterr().err


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
    assert "mine.yaml has an unknown field 'speed'" in error_of(capsys)


def edit_profile(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_fitted_profile_is_used(tmp_path: Path) -> None:
    write_fitted(tmp_path / "p.json")
    fitted = summary_of(tmp_path, "--step-time", "fitted", "--profile", str(tmp_path / "p.json"))
    assert fitted["step_time"] == "fitted"
    assert fitted["mean_step_ms"] > 1.5 * summary_of(tmp_path)["mean_step_ms"]  # of a slower machine


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["steps"][3].__setitem__(-1, float("nan")), "steps[3] is ["),
        (lambda content: content["steps"][3].__setitem__(-1, 0.0), "a time above 0. Run `onbeat profile"),
        (lambda content: content.update(schema_version=9), "has schema version 9"),
        (lambda content: content["key"].update(model="Llama-2-7b-hf"), "is of model 'Llama-2-7b-hf', not"),
        (lambda content: content["key"].update(device="h200"), "is of device 'h200', not 'h100-sxm'"),
        (lambda content: content["key"]["precision"].update(weights="int8"), "of precision 'int8 weights"),
        (lambda content: content["key"]["parallelism"].update(tensor=2), "of parallelism 'TP 2, PP 1', not"),
        (lambda content: content["fit"]["parameters"].popitem(), "run `onbeat profile MODEL` again"),
        (lambda content: content["fit"].update(ratios=[]), "ratios is []; it must be a list of numbers"),
    ],
    ids=["nan", "zero", "version", "model", "device", "dtype", "tp", "parameters", "ratios"],
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
