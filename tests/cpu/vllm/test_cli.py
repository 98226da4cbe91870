"""`onbeat vllm`: the command line that vLLM gets."""

from __future__ import annotations

import json

import pytest

from onbeat.cli import vllm
from onbeat.cli.args import parse
from onbeat.cli.main import build_parser, main
from onbeat.core.errors import ConfigError, MissingExtra
from onbeat.core.slo import SLO
from onbeat.vllm.objectives import read_config

ADDRESS = "ipc:///x/y"


def arguments(*words: str) -> list[str]:
    argv = ["vllm", "serve", *words]
    return vllm.vllm_arguments(parse(build_parser(argv), argv), ADDRESS)


def test_vllm_gets_its_options_as_they_are_and_ours_as_configuration(tmp_path):
    classes = tmp_path / "c.yaml"
    classes.write_text("classes:\n  - {name: chat, ttft_ms: 800}\n")
    ours = ["--slo-ttft-ms", "500", "--slo-class", "chat", "--slo-classes", str(classes), "--slo-mode=gap"]
    theirs = ["--max_model_len", "4096", "--additional-config", '{"other": 1}', "--port=8001", "-O3"]
    command = arguments("org/model", *ours, "--", *theirs)
    assert command[:6] == [
        *("serve", "org/model", "--scheduler-cls", "onbeat.vllm.SLOScheduler"),
        *("--middleware", "onbeat.vllm.SLOMiddleware"),
    ]
    assert command[8:] == ["--max_model_len", "4096", "--port=8001", "-O3"]
    config = json.loads(command[7])
    assert config["other"] == 1
    read, defaults = read_config(config, {})
    assert (defaults.slo, defaults.slo_class, defaults.mode) == (SLO(ttft=0.5), "chat", "gap")
    assert (read.telemetry, read.calibrate) == (ADDRESS, "auto")


def test_what_has_no_flag_is_stated_as_vllms_own_configuration():
    stated = '{"onbeat": {"telemetry": "tcp://127.0.0.1:5557", "max_body_bytes": 9, "calibrate": "always"}}'
    command = arguments("m", "--calibrate", "off", "--", "--additional-config", stated)
    read, _ = read_config(json.loads(command[7]), {})
    assert (read.telemetry, read.max_body_bytes, read.calibrate) == ("tcp://127.0.0.1:5557", 9, "off")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["m", "--", "--scheduler-cls", "x.Y"], "leave it out"),
        (["m", "--", "--scheduling_policy=priority"], "state objectives"),
        (["m", "--", "--additional-config", "{"], "no JSON"),
        (["m", "--", "--additional-config", '{"onbeat": 5}'], "must be an object"),
        (["m", "--", "--additional-config", '{"onbeat": {"tft_ms": 5}}'], "mean ttft_ms"),
        (["m", "--slo-ttft-ms", "0"], "between 1 ms"),
        (["m", "--slo-class", "gold"], "no class 'gold'"),
        (["m", "--profile", "/nowhere"], "is no file"),
    ],
)
def test_what_does_not_go_together_is_said_before_vllm_starts(words, why):
    with pytest.raises(ConfigError, match=why):
        arguments(*words)


def test_words_behind_two_dashes_are_for_commands_that_pass_them_on(capsys):
    with pytest.raises(SystemExit):
        main(["models", "list", "--", "x"])
    assert "unknown flag --" in capsys.readouterr().err


def test_without_vllm_the_cure_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingExtra, match="pip install vllm"):
        vllm.find_vllm()
