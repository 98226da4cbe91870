"""`onbeat simulate` with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onbeat.cli.main import main
from onbeat.scheduler.scheduler_config import SpeculationConfig
from tests.pure.recording.recorded import start_run
from tests.pure.scheduler.driver import make_config, make_request

MODEL = ("--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm", "--policy", "sarathi")
LOAD = ("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32")
NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "draft_length": "fixed"}')


def simulate(path: Path, *flags: str) -> dict[str, object]:
    flags = (*MODEL, *LOAD, "--num-prompts", "20", "--request-rate", "20", "--disable-tqdm", *flags)
    assert main(["simulate", *flags, "--json", str(path)]) == 0
    result: dict[str, object] = json.loads(path.read_text())
    return result


def speculation(result: dict[str, object]) -> dict[str, Any]:
    found = result["speculation"]
    assert isinstance(found, dict)
    return found


def test_nothing_is_speculated_by_default(tmp_path: Path) -> None:
    assert simulate(tmp_path / "off.json")["speculation"] is None


def test_what_became_of_drafts_is_told(tmp_path: Path) -> None:
    path = tmp_path / "on.json"
    off, certain = simulate(path), simulate(path, *NGRAM, "--acceptance-rate", "1.0")
    assert speculation(certain)["accepted_share"] == 1.0
    assert speculation(certain)["num_speculative_tokens"] == 3
    assert 3 < speculation(certain)["tokens_per_decode"] <= 4
    assert certain["mean_tpot_ms"] < 0.4 * off["mean_tpot_ms"]  # type: ignore[operator]
    assert certain["total_output_tokens"] == off["total_output_tokens"]
    never = speculation(simulate(path, *NGRAM, "--acceptance-rate", "0.0"))
    assert never["num_accepted_tokens"] == 0
    seldom = speculation(simulate(path, *NGRAM, "--draft-hit-rate", "0.25"))
    assert 0.1 < seldom["verifying_share"] < 0.4


@pytest.mark.parametrize(
    "config",
    [
        '{"method": "draft-model", "model": "meta-llama/Llama-3.2-1B"}',
        '{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 2}',
        '{"method": "ngram", "prompt_lookup_max": 4}',
    ],
)
def test_every_method_runs(tmp_path: Path, config: str) -> None:
    result = simulate(tmp_path / "on.json", "--speculative-config", config)
    assert result["completed"] == 20
    assert speculation(result)["draft_length"] == "adaptive"


def test_what_a_grammar_prescribes_is_not_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*MODEL, *LOAD, "--num-prompts", "2", "--speculative-config", '{"method": "grammar"}')
    assert main(["simulate", *flags, "--json", str(tmp_path / "on.json")]) == 2
    assert "--draft-hit-rate" in capsys.readouterr().err


def test_rates_are_read_from_a_record(tmp_path: Path) -> None:
    record = tmp_path / "run.gz"
    speculative = SpeculationConfig(num_speculative_tokens=4, draft_length="fixed")
    run = start_run(record, make_config(speculation=speculative))
    for index in range(6):
        run.add(make_request(f"r{index}", 20 + index, 30, arrival=run.now))
    run.finish()
    found = speculation(simulate(tmp_path / "on.json", *NGRAM, "--acceptance-record", str(record)))
    assert 0 < found["accepted_share"] < 1
    assert found["verifying_share"] == pytest.approx(0.8, abs=0.15)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--acceptance-rate", "0.7"], "--acceptance-rate needs --speculative-config"),
        (["--draft-hit-rate", "0.7"], "--draft-hit-rate needs --speculative-config"),
        ([*NGRAM, "--acceptance-rate", "often"], "write 0.7 or CLASS=0.7"),
        ([*NGRAM, "--acceptance-rate", "chat=1.5"], "chat is 1.5"),
        ([*NGRAM, "--acceptance-record", "missing.gz"], "cannot read missing.gz"),
        (["--speculative-config", '{"method": "oracle"}'], "method 'oracle'"),
        (
            ["--speculative-config", '{"model": "meta-llama/Llama-3.2-1B"}', "--draft-hit-rate", "1"],
            "--draft-hit-rate is for method ngram",
        ),
        (["--speculative-config", '{"model": "meta-llama/Llama-3.1-70B"}'], "choose a smaller one"),
    ],
)
def test_bad_flags_exit_with_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *MODEL, *LOAD, "--num-prompts", "5", "--request-rate", "5", *flags]) == 2
    assert message in capsys.readouterr().err
