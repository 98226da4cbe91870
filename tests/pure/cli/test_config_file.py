"""`--config FILE.yaml`: flags from a file, the command line winning."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.main import build_parser
from onbeat.core.errors import ConfigError
from tests.pure.cli.test_args import refusal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: a.gguf\n"
        "max_model_len: 64\n"
        "max-num-seqs: 2k\n"
        "log-requests: false\n"
        "async-scheduling: true\n"
        "served-model-name: [first, second]\n"
        "host: '::1'\n"
    )
    return path


def serve(*arguments: str | Path) -> argparse.Namespace:
    return parse(build_parser(["serve"]), ["serve", *map(str, arguments)])


def test_a_file_gives_flags(file: Path) -> None:
    args = serve("--config", file)
    assert args.model == "a.gguf"
    assert args.max_model_len == 64
    assert args.max_num_seqs == 2000
    assert args.log_requests is False
    assert args.async_scheduling is True
    assert args.served_model_name == ["first", "second"]
    assert args.host == "::1"


@pytest.mark.parametrize("command", [["serve"], ["simulate", "--model", "any", "--device", "h100-sxm"]])
def test_a_flag_that_takes_json_takes_a_mapping(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "drafts.yaml"
    path.write_text(
        "speculative_config:\n  method: draft_model\n  model: small\n  num_speculative_tokens: 3\n"
    )
    given = parse(build_parser(), [*command, "--config", str(path)]).speculative_config
    assert (given.method, given.model, given.num_speculative_tokens) == ("draft-model", "small", 3)
    path.write_text("""speculative-config: '{"method": "ngram", "prompt_lookup_max": 3}'\n""")
    given = parse(build_parser(), [*command, "--config", str(path)]).speculative_config
    assert (given.method, given.prompt_lookup_max) == ("ngram", 3)


def test_a_list_is_a_flag_for_each_value(tmp_path: Path) -> None:
    path = tmp_path / "lists.yaml"
    path.write_text("api-key: [one, -two]\nallowed-origins: []\nmodel: a.gguf\n")
    args = serve("--config", path)
    assert (args.api_key, args.allowed_origins, args.model_positional) == (["one", "-two"], [], None)
    assert serve("--config", path, "--api-key=three").api_key == ["three"]
    path.write_text("model: any\nbackend: openai\nheader: [a=b, c=d]\n")
    assert parse(build_parser(), ["bench", "serve", "--config", str(path)]).header == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_command_line_wins(file: Path, order: str) -> None:
    flags: list[str] = ["--max-model-len", "128", "--log-requests", "--served-model-name", "mine"]
    config = [f"--config={file}"]
    args = serve(*(config + flags if order == "before" else flags + config))
    assert args.max_model_len == 128
    assert args.log_requests is True
    assert args.served_model_name == ["mine"]
    assert args.max_num_seqs == 2000


def test_a_model_by_position_and_a_file(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("port: 1\n")
    assert serve("m.gguf", "--config", other).model_positional == "m.gguf"
    assert serve("--config", other, "m.gguf").model_positional == "m.gguf"
    assert serve("--config", other, "m.gguf").port == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max-model-lem: 8\n", "--max-model-lem; did you mean --max-model-len?"),
        ("policy: fifo\n", "choice: 'fifo'"),
        ("- max-model-len\n", "a mapping"),
        ("just text\n", "a mapping"),
        ("", "a mapping"),
        ("host: {name: x}\n", "'host' is {'name': 'x'};"),
        ("served-model-name: [a, {b: c}]\n", "plain value"),
        ("speculative-config:\n", "'speculative-config' is None;"),
        ("speculative-config: [{method: ngram}]\n", "or its JSON"),
        ("speculative-config: ngram\n", "not JSON"),
        ("speculative-config: {metod: ngram}\n", "'metod': did you mean method"),
        ("speculative-config: {method: {name: ngram}}\n", "method is {'name': 'ngram'};"),
        ("speculative-config: {method: 2026-01-01}\n", "method '2026-01-01'"),
        ("host:\n", "'host' is None"),
        ("a: b: c\n", "cannot read"),
        ("config: other.yaml\n", "cannot name another"),
        ("!!python/object/apply:os.getcwd []\n", "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_bad_file_is_one_line(
    content: str | bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert expected in refusal(capsys, "serve", "--config", str(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("port: [1, 2]", "'port' is [1, 2]; this flag takes one value"),
        ("log-requests: maybe", "'log-requests' is 'maybe'; this flag takes true or false"),
        ("log-requests: 1", "'log-requests' is 1; this flag takes true or false"),
        ("shed: off", "'shed' is False; this flag takes a word or number; quote"),
        ("port: true", "'port' is True; this flag takes a word or number"),
    ],
)
def test_a_value_of_another_kind_is_told_as_such(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"model: a.gguf\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        serve("--config", path)
    assert says in str(refused.value)
    path.write_text("shed: 'off'\n")
    assert serve("--config", path).shed == "off"


def test_words_of_requests_and_of_other_servers_have_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in (("--ttft-ms", "slo-ttft-ms"), ("--workers", "front-ends"), ("-c", "max-model-len")):
        assert f"did you mean --{meant}?" in refusal(capsys, "serve", given, "5")


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.yaml: No such" in refusal(capsys, "serve", "--config", str(tmp_path / "none.yaml"))
    assert f"{tmp_path}: Is a" in refusal(capsys, "serve", "--config", str(tmp_path))


def test_two_files_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="--config"):
        serve("--config", file, f"--config={file}")


def test_the_fleet_is_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: a.gguf\nfleet:\n  replicas: 3\n  router: prefix-affinity\n")
    args = serve("--config", path)
    assert (args.replicas, args.router, args.launcher) == (3, "prefix-affinity", "local")
    assert serve("--config", path, "-dp", "2").replicas == 2
    assert serve("--config", path, "--data-parallel-size", "4").replicas == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fleet: 2", "--fleet"),
        ("fleet: {replica: 2}", "mean --replicas?"),
        ("fleet: {port: {a: 1}}", "'port' is {'a': 1}"),
    ],
)
def test_a_bad_fleet_is_told(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert message in refusal(capsys, "serve", "--config", str(path))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--router", "round-robbin", "mean round-robin?"),
        ("--launcher", "slurm", "choose one of local, ray"),
    ],
)
def test_an_unknown_router_or_launcher_is_told(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve("a.gguf", flag, value)
    assert message in capsys.readouterr().err


def test_the_group_vllm_stands_behind_the_dashes(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "backend: vllm\n"
        "vllm:\n  kv_cache_dtype: fp8\n  trust-remote-code: true\n  hf-overrides: {a: 1}\n"
        "  logits-processors: [b, c]\n"
    )
    args = serve("small", "--config", path, "--", "--kv-cache-dtype", "auto")
    assert args.backend == "vllm"
    written = ["--kv-cache-dtype=fp8", "--trust-remote-code", '--hf-overrides={"a": 1}']
    written += ["--logits-processors", "b", "c"]
    assert args.passed_on == [*written, "--kv-cache-dtype", "auto"]  # the later one wins
    assert serve("small", "--config", path).passed_on == written
