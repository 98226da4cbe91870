"""`onbeat serve` before any model is loaded: settings, the missing extra, the example it prints."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.engine_args import engine_config
from onbeat.cli.main import build_parser
from onbeat.cli.serve import (
    API_KEY_VARIABLE,
    FLEET_KEY_VARIABLE,
    example_path,
    example_request,
    public_name,
    server_config,
)
from onbeat.core.errors import ConfigError
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import prepare
from onbeat.hub.files import ModelFiles
from onbeat.server.server_config import ServerConfig


def config(*arguments: str) -> ServerConfig:
    return server_config(parse(build_parser(["serve"]), ["serve", *arguments]))


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (API_KEY_VARIABLE, FLEET_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def engine(*arguments: str) -> EngineConfig:
    model = ModelFiles(kind="hf", path=Path("nowhere"), name="base")
    return engine_config(parse(build_parser(["serve"]), ["serve", *arguments]), model)


def test_room_for_adapters_is_as_asked_for() -> None:
    two = ("--lora-modules", "sql=a/b=c", "law=d")
    assert engine(*two).lora_modules == (("sql", "a/b=c"), ("law", "d"))
    given = (engine(), engine(*two), engine("--enable-lora"), engine("--max-loras", "4"))
    assert [each.num_loras for each in given] == [0, 2, 1, 4]
    assert engine(*two, "--max-loras", "3", "--max-lora-rank", "64").num_loras == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lora-modules", "sql=a", "law=b", "--max-loras", "1"], "max_loras is 1, but lora_modules has 2"),
        (["--lora-modules", "sql=a", "sql=b"], "name 'sql'"),
    ],
)
def test_adapters_that_do_not_go_together_are_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        engine(*arguments)


@pytest.mark.parametrize("backend", ["--backend native", "--backend torch", "--load-format stand-in"])
def test_other_engines_refuse_adapters_at_the_start(backend: str) -> None:
    with pytest.raises(ConfigError, match="LoRA adapters"):
        prepare(engine(*backend.split(), "--lora-modules", "sql=a"))


def test_defaults_open_nothing_to_the_network() -> None:
    defaults = config()
    assert defaults.host == "127.0.0.1"
    assert defaults.port == 8000
    assert defaults.allowed_origins == ()


def test_keys_of_flag_file_and_environment_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nfrom-file \n\nsecond\n")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-environment")
    keys = config("--api-key", "one", "--api-key", "two", "--api-key-file", str(file)).api_keys
    assert keys == ("one", "two", "from-file", "second", "from-environment")


def test_the_fleet_is_opened_by_its_own_key_or_else_by_the_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config().fleet_keys == ()
    assert config("--api-key", "one").fleet_keys == ("one",)
    monkeypatch.setenv(FLEET_KEY_VARIABLE, "from-environment")
    found = config("--api-key", "one")
    assert (found.fleet_keys, found.guarding_keys) == (("from-environment",), ("one", "from-environment"))
    assert config().guarding_keys == (), "a key of the fleet closes nothing else"
    assert config("--fleet-key", "two").fleet_keys == ("two",)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--max-n", "0"], "max_n is 0"),
        (["--max-body-bytes", "0"], "max_body_bytes is 0"),
        (["--max-connections", "0"], "max_connections is 0"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout is -1"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout is nan"),
        (["--shutdown-timeout", "inf"], "shutdown_timeout is inf; it must be finite"),
        (["--api-key", ""], "API key is empty"),
        (["--fleet-key", ""], "the fleet's key is empty"),
        (["--fleet-key", "ü"], "the fleet's key is empty, not ASCII"),
        (["--api-key", "of a file\n"], "API key is .* line end around it"),
        (["--api-key", "a\tb"], "API key is "),
        (["--ssl-keyfile", "key.pem"], "TLS needs both"),
        (["--api-key-file", "/no/such/file"], "cannot read the API keys"),
    ],
)
def test_settings_that_cannot_be(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(*arguments)


@pytest.mark.parametrize(
    ("values", "origins"),
    [
        (["*"], ("*",)),
        (['["*"]'], ("*",)),  # vLLM's spelling
        (['["https://a.example", "http://localhost:3000"]'], ("https://a.example", "http://localhost:3000")),
        (["https://a.example", '["http://[::1]:3000"]'], ("https://a.example", "http://[::1]:3000")),
        (["app://obsidian.md", "null"], ("app://obsidian.md", "null")),
        (["[]"], ()),
    ],
)
def test_origins_are_words_or_a_json_list(values: list[str], origins: tuple[str, ...]) -> None:
    assert config(*(f"--allowed-origins={each}" for each in values)).allowed_origins == origins


@pytest.mark.parametrize(
    "value",
    [
        "a.example",
        "https://A.example",
        "https://a.example/",
        "https://a.example/app",
        "https://*.a.example",
        "",
        "[1]",
        "[*]",
        '["*"',
    ],
)
def test_what_no_page_has_for_its_origin_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        config(f"--allowed-origins={value}")


@pytest.mark.parametrize("content", [b"", b"\n \n# only a comment\n", b"\xff\xfe"])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="API key"):
        config("--api-key-file", str(file))


@pytest.mark.parametrize("model", ["plain", 'it\'s "quoted" $HOME `ls` \\n', "/a b/ü.gguf"])
@pytest.mark.parametrize(
    ("is_chat", "generates", "path", "field"),
    [
        (False, True, "completions", "prompt"),
        (True, True, "chat/completions", "messages"),
        (True, False, "embeddings", "input"),
    ],
)
def test_the_example_is_for_the_model_and_survives_the_shell(
    model: str, is_chat: bool, generates: bool, path: str, field: str
) -> None:
    assert example_path(is_chat=is_chat, generates=generates) == path
    example = example_request("http://127.0.0.1:8000", model, path=path, needs_key=True)
    shown = subprocess.run(
        ["sh", "-c", example.replace("curl", "printf '%s\\n'", 1)],
        env={API_KEY_VARIABLE: "secret"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == f"http://127.0.0.1:8000/v1/{path}"
    assert "Authorization: Bearer secret" in shown
    body = json.loads(shown[-1])
    assert body["model"] == model
    assert field in body


def test_the_example_has_no_key_where_none_is_needed() -> None:
    example = example_request("http://127.0.0.1:8000", "m", path="completions", needs_key=False)
    assert "Authorization" not in example


@pytest.mark.parametrize("tokenizer", ["models/mine", "cache/other.gguf"], ids=["its own", "another's"])
def test_metrics_name_no_path_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """They are open to everybody; of a stand-in, `path` is where its tokenizer is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    files = ModelFiles(kind="hf", path=Path(tokenizer), name="models/mine")
    assert public_name(ServerConfig(), files) == "mine"
    assert public_name(ServerConfig(), replace(files, name="owner/name")) == "owner/name"
    assert public_name(ServerConfig(served_model_names=("seen",)), files) == "seen"
