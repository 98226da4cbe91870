"""`onbeat simulate`: what it prints and saves, its exit codes, and what it says of bad input."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from onbeat.cli.main import main
from onbeat.cli.options import read_options
from onbeat.cli.simulate import add_simulation_arguments
from onbeat.core.slo import ShedMode
from onbeat.metrics.summary import SummaryOptions
from onbeat.scheduler.scheduler_config import DEFAULT_POLICY
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from tests.pure.cli.simulating import DATA, MODEL, error_of, simulate, summary_of


def test_prints_the_configuration_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate() == 0
    shown = capsys.readouterr()
    assert "Llama-3.1-8B" in shown.err
    for words in ("requests completed", "TTFT", "TBT", "KV cache at its fullest", "preemptions"):
        assert words in shown.out


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (
            [],
            [
                r"12 of 12 requests were completed, at [\d.]+ requests/s\.",
                r"No objective was given: --slo-ttft-ms and --slo-tbt-ms set one\.",
            ],
        ),
        (
            ["--slo-ttft-ms", "500", "--max-concurrency", "3"],
            [r"All 12 requests kept their objectives, at [\d.]+ requests/s and at most 3 open at a time\."],
        ),
        (
            ["--slo-ttft-ms", "500", "--num-prompts", "1"],
            [r"The only request kept its objectives, at [\d.]+ requests/s\."],
        ),
        (
            ["--slo-tbt-ms", "1"],
            [
                r"0 of 12 requests \(0\.0 %\) kept their objectives, at [\d.]+ requests/s\.",
                r"Of the others, 12 had late tokens after the first \(TBT\)\.",
            ],
        ),
        (
            ["--slo-e2e-ms", "1"],
            [r"0 of 12 .*", r"Of the others, 12 ended late \(E2E\)\."],
        ),
        (
            [
                "--request-rate",
                "inf",
                "--max-num-seqs",
                "2",
                "--max-num-queued-reqs",
                "3",
                "--slo-ttft-ms",
                "30",
            ],
            [
                r"\d+ of 12 requests \([\d.]+ %\) kept their objectives, all sent at once\.",
                r"Of the others, \d were refused or ended in the queue and \d had a late first token.*",
            ],
        ),
    ],
)
def test_ends_with_what_became_of_the_requests(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentences: list[str]
) -> None:
    assert simulate(*flags) == 0
    lines = capsys.readouterr().out.splitlines()[-len(sentences) :]
    for line, sentence in zip(lines, sentences, strict=True):
        assert re.fullmatch(sentence, line.rstrip())


def test_says_how_many_had_no_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    lanes = "--dataset-name lanes --num-prompts 12 --request-rate 2 --model llama-3.1-8b --device h100-sxm"
    assert main(["simulate", *lanes.split()]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"All 12 requests .* 24 .* 2 requests/s .*", line.rstrip())


def test_the_rate_of_jobs_counts_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    agents = "--dataset-name agents --num-prompts 5 --request-rate 1 --arrivals constant"
    assert main(["simulate", *agents.split(), "--model", "llama-3.1-8b", "--device", "h100-sxm"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(", at 1 job/s.")


def test_a_page_of_jobs_names_them_in_its_rate(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    flags = "--dataset-name agents --num-prompts 5 --request-rate 1 --arrivals constant --model llama-3.1-8b"
    assert main(["simulate", *flags.split(), "--device", "h100-sxm", "--report", str(page)]) == 0
    assert "offered at 1 jobs/s" in page.read_text()


def test_the_share_of_the_bandwidth_of_experts_is_below_the_whole(tmp_path: Path) -> None:
    flags = ("--model", "qwen3-30b-a3b", "--input-len", "2000", "--request-rate", "1")
    assert 0.2 < summary_of(tmp_path, *flags)["mbu"] < 1


def test_a_class_with_an_end_to_end_objective_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = tmp_path / "classes.yaml"
    entries = "{name: chat, share: 0.5, tbt_ms: 100}, {name: report, share: 0.5, e2e_ms: 60000}"
    classes.write_text(f"classes: [{entries}]")
    assert simulate("--slo-config", str(classes)) == 0
    out = capsys.readouterr().out
    assert "E2E objective" in out
    assert "60,000" in out
    assert "TTFT objective" not in out


def test_the_summary_has_the_keys_of_a_measured_run(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "--slo-ttft-ms", "500", "--slo-tbt-ms", "50")
    assert (found["schema"], found["kind"]) == (2, "simulation")
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
    assert re.search(rf"Worst decile .*{span} tokens\): ", out)
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
    assert "decisions: identical" in capsys.readouterr().out


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
    files = ("--report", str(report), "--records", str(records), "--timeline", str(timeline))
    assert simulate(*files, "--replicas", "2", "--kinds", "replicas=1", "replicas=1") == 0
    assert "Llama-3.1-8B" in report.read_text()
    assert "&#34;replicas=1" in report.read_text()
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
    assert "/dev/full" in shown.err
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


@pytest.mark.usefixtures("comparators")
def test_pools_of_unlike_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("device=h100-sxm,tp=2,policy=sarathi", "device=a100-80-sxm,replicas=2")
    pools = ("--disaggregate", "prefill=1,decode=2", "--pool-rule", "splitwise")
    found = summary_of(tmp_path, *pools, "--kinds", *kinds)
    assert (found["completed"], found["num_gpus"], found["replicas"]) == (12, 4, 3)
    assert (found["policy"], found["device"], found["tensor_parallel_size"]) == ("sarathi", "h100-sxm", 2)
    assert found["kinds"] == [f"{kinds[0]},replicas=1", kinds[1]]
    assert "device=h100-sxm,tp=2,policy=sarathi,replicas=1" in capsys.readouterr().err
    alike = summary_of(
        tmp_path, *pools, "--kinds", kinds[0], kinds[0].replace(",policy", ",replicas=2,policy")
    )
    assert alike["num_gpus"] == 6
    assert alike["mean_tpot_ms"] < 0.8 * found["mean_tpot_ms"], "the slower device generates"


@pytest.mark.usefixtures("comparators")
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
    settings = read_options(args, Deployment)
    assert (settings.limits.slo_mode, settings.shed) == ("gap", ShedMode.REJECT)
    config = resolve(settings).config
    assert (config.scheduler.slo_mode, config.scheduler.max_num_queued_tokens) == ("gap", 9000)
    assert (config.shed, config.scheduler.shed_order) == (ShedMode.REJECT, "longest-wait")
    assert read_options(args, SummaryOptions).slo_mode == "gap"


def test_jobs_are_drawn_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.json"
    own = ["--dataset-name", "retrieval-plan", "--num-prompts", "6", "--request-rate", "2"]
    assert main(["simulate", *MODEL, *own, "--disable-tqdm", "--json", str(path)]) == 0
    assert "(retrieval-plan): 6 of 6 kept" in capsys.readouterr().out
    assert json.loads(path.read_text())["jobs"]["retrieval-plan"]["offered"] == 6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--job-deadline-ms", "500"], "--job-deadline-ms is for --dataset-name"),
        (["--dataset-name", "jobs"], "--dataset-name jobs needs a file"),
        (["--dataset-name", "agents", "--output-len", "5"], "--output-len"),
    ],
)
def test_flags_of_jobs_are_checked(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["simulate", *MODEL, "--request-rate", "2", *flags]) == 2
    assert words in error_of(capsys)
