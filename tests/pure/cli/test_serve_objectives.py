"""The flags of `onbeat serve` about objectives, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.engine_args import engine_config
from onbeat.cli.main import build_parser, main
from onbeat.cli.serve import API_KEY_VARIABLE, server_config
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.hub.files import ModelFiles
from onbeat.server.slo_defaults import KeyDefaults, SLODefaults, key_digest


def defaults(*arguments: str) -> SLODefaults:
    return server_config(parse(build_parser(["serve"]), ["serve", *arguments])).slo


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def test_without_flags_there_are_no_objectives() -> None:
    plain = defaults()
    assert plain == SLODefaults()
    assert (plain.slo.is_empty, plain.slo_class, plain.shed, plain.mode) == (
        True,
        None,
        ShedMode.RELEGATE,
        "stream",
    )
    assert plain.objectives_by_class() == {}


def test_flags_become_defaults() -> None:
    given = defaults(
        *("--slo-ttft-ms", "500", "--slo-tbt-ms=50.5", "--slo-e2e-ms", "1e4", "--slo-class", "batch"),
        *("--slo-mode", "gap", "--shed", "reject"),
    )
    assert given.slo == SLO(ttft=0.5, tbt=0.0505, e2e=10.0)
    assert (given.slo_class, given.mode, given.shed) == ("batch", "gap", ShedMode.REJECT)
    assert given.objectives_by_class() == {"default": given.slo, "batch": SLO_CLASSES["batch"]}


def test_only_classes_in_use_have_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_A_KEY", "team-a")
    file = tmp_path / "classes.yaml"
    file.write_text(
        "classes: [{name: chat, ttft_ms: 800}, {name: batch, ttft_ms: 9000}]\n"
        "api_keys: [{key_env: TEAM_A_KEY, class: interactive}]"
    )
    given = defaults("--slo-classes", str(file), "--api-key", "team-a")
    assert given.objectives_by_class().keys() == {"chat", "batch", "interactive"}


def test_the_classes_file_names_classes_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_A_KEY", "team-a")
    file = tmp_path / "classes.yaml"
    file.write_text("classes: [{name: chat, ttft_ms: 800}]\napi_keys: [{key_env: TEAM_A_KEY, class: chat}]")
    given = defaults(
        "--slo-classes", str(file), "--slo-class", "chat", "--api-key", "team-a", "--api-key", "team-b"
    )
    assert given.classes["chat"].slo == SLO(ttft=0.8)
    assert given.keys == {key_digest("team-a"): KeyDefaults(slo_class="chat")}
    with pytest.raises(ConfigError, match="--api-key"):
        defaults("--slo-classes", str(file), "--api-key", "team-b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--slo-ttft-ms", "0.5"], "ttft objective is 0.5 ms;"),
        (["--slo-tbt-ms", "0"], "the tbt objective is 0 ms"),
        (["--slo-e2e-ms", "86400001"], "the e2e objective is"),
        (["--slo-class", "chat"], "class 'chat'"),
        (["--slo-classes", "/no/such/file.yaml"], "cannot read /no/such/file.yaml"),
    ],
)
def test_settings_that_cannot_be(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        defaults(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--slo-ttft-ms", "fast"], "500, got 'fast'"),
        (["--slo-ttft-ms", "nan"], "500, got 'nan'"),
        (["--slo-ttft-ms", "inf"], "got 'inf'"),
        (["--shed", "rejct"], "mean reject?"),
        (["--slo-mode", "gaps"], "mean gap?"),
        (["--shed-order", "longest"], "'longest'; did you mean longest-wait?"),
        (["--slo-clases", "x"], "--slo-clases; did you mean --slo-classes?"),
        (["--max-num-queued-reqs", "many"], "expected a whole number"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: object
    try:
        code = main(["serve", "--port", "0", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert expected in captured.err


def test_limits_of_the_queue_and_the_mode_reach_the_engine(tmp_path: Path) -> None:
    files = ModelFiles(kind="hf", path=tmp_path, name="tiny")
    arguments = ["--max-num-queued-reqs", "8", "--max-num-queued-tokens", "32k", "--slo-mode", "gap"]
    limits = engine_config(parse(build_parser(["serve"]), ["serve", *arguments]), files).limits
    assert (limits.max_num_queued_reqs, limits.max_num_queued_tokens) == (8, 32_000)
    assert (limits.slo_mode, limits.shed_order) == ("gap", "most")
    for flag in ("--max-num-queued-reqs", "--max-num-queued-tokens", "--max-num-seqs"):
        name = flag.removeprefix("--").replace("-", "_")
        with pytest.raises(ConfigError, match=f"{name} is 0; .* 1"):
            engine_config(parse(build_parser(["serve"]), ["serve", flag, "0"]), files)


def test_whom_to_leave_behind_reaches_the_engine(tmp_path: Path) -> None:
    files = ModelFiles(kind="hf", path=tmp_path, name="tiny")
    flags_file = tmp_path / "serve.yaml"
    flags_file.write_text("shed-order: longest-wait\n")
    for arguments in (["--shed-order", "longest-wait"], ["--config", str(flags_file)]):
        config = engine_config(parse(build_parser(["serve"]), ["serve", *arguments]), files)
        assert config.limits.shed_order == "longest-wait"
