"""What `--speculative-config` takes, and how it refuses the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from onbeat.cli.args import parse
from onbeat.cli.engine_args import engine_config
from onbeat.cli.main import build_parser, main
from onbeat.core.errors import ConfigError
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import SpeculationConfig
from onbeat.speculative_config import (
    MAX_CATCH_UP_TOKENS,
    SpeculativeConfig,
    parse_speculative_config,
    read_speculative_config,
)
from tests.many_cases import each_case


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        ({"method": "ngram"}, {"num_speculative_tokens": 12, "draft_length": "adaptive", "model": None}),
        ({"method": "ngram", "prompt_lookup_max": 1}, {"prompt_lookup_max": 1, "prompt_lookup_min": 1}),
        ({"method": "ngram", "prompt_lookup_min": 7}, {"prompt_lookup_max": 7, "prompt_lookup_min": 7}),
        (
            {"method": "grammar"},
            {"num_speculative_tokens": 12, "draft_length": "adaptive", "runs_model": False},
        ),
        ({"method": "ngram", "model": None}, {"method": "ngram", "model": None}),
        ({"method": "draft_model", "model": "a/b"}, {"method": "draft-model", "model": "a/b"}),
        ({"model": "a/b"}, {"method": "draft-model", "num_speculative_tokens": 4}),
        (
            {"model": "a/b", "num_speculative_tokens": 3, "draft_length": "fixed"},
            {"num_speculative_tokens": 3, "draft_length": "fixed"},
        ),
    ],
)
def test_keys_are_those_of_vllm_and_have_defaults(content: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse_speculative_config(json.dumps(content))
    assert {name: getattr(config, name) for name in expected} == expected
    assert read_speculative_config(content) == config


@each_case(
    ("text", "message"),
    [
        ("ngram", "not JSON"),
        ("[1]", "a mapping"),
        ("{}", "key 'method';"),
        ('{"method": "lookup"}', "method 'lookup';"),
        ('{"method": "eagle3"}', "'eagle3' needs the key 'model'"),
        ('{"method": "dflash"}', "'dflash'"),
        ('{"method": "medusa"}', "not support; choose one of ngram, draft-model"),
        ('{"method": "deepseek_mtp"}', "not support"),
        ('{"method": 3}', "method is 3;"),
        ('{"method": "ngram", "num_speculativ_tokens": 3}', "mean num_speculative_tokens"),
        ('{"method": "ngram", "xyz": 3}', "field 'xyz':"),
        (
            '{"method": "ngram", "num_speculative_tokens": 0}',
            "num_speculative_tokens is 0;",
        ),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "is '5';"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is True;"),
        ('{"method": "ngram", "num_speculative_tokens": 1.5}', "is 1.5; it"),
        (
            '{"method": "ngram", "draft_length": "auto"}',
            "draft_length is 'auto';",
        ),
        (
            '{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
            "prompt_lookup_min (3) is ab",
        ),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min is 0"),
        (
            '{"method": "ngram", "model": "a/b"}',
            "'model' belongs to method 'draft-model', not to 'ngram'",
        ),
        ('{"method": "draft-model"}', "key 'model'"),
        (
            '{"method": "grammar", "prompt_lookup_max": 3}',
            "'prompt_lookup_max' belongs to method 'ngram', not to 'grammar'",
        ),
        ('{"method": "draft-model", "model": ""}', "model is ''"),
        (
            '{"method": "early-exit"}',
            "method 'early-exit';",
        ),
        ('{"method": "ngram", "num_layers": 2}', "unknown field 'num_layers'"),
        (
            '{"method": "draft-model", "model": "a", "prompt_lookup_max": 2}',
            "'prompt_lookup_max' belongs to method 'ngram'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "runs_model", "most_read"),
    [({"method": "ngram"}, False, 0), ({"model": "a/b"}, True, MAX_CATCH_UP_TOKENS)],
)
def test_the_scheduler_gets_what_it_must_know(
    content: dict[str, Any], runs_model: bool, most_read: int
) -> None:
    config = read_speculative_config(content | {"num_speculative_tokens": 3, "draft_length": "fixed"})
    assert config.for_scheduler() == SpeculationConfig(
        num_speculative_tokens=3,
        draft_length="fixed",
        runs_model=runs_model,
        max_catch_up_tokens=most_read,
    )


def test_the_flag_of_serve_makes_the_engine_config(tmp_path: Any) -> None:
    arguments = ["serve", "--speculative_config", '{"method": "ngram", "num_speculative_tokens": 3}']
    args = parse(build_parser(), arguments)
    config = engine_config(args, ModelFiles(kind="hf", path=tmp_path, name="tiny"))
    assert config.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert (
        engine_config(
            parse(build_parser(["serve"]), ["serve"]), ModelFiles(kind="hf", path=tmp_path, name="tiny")
        ).speculative
        is None
    )


def test_a_wrong_flag_ends_the_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--speculative-config", '{"method": "eagle"}']) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'eagle'" in error


def test_configuring_loads_no_torch() -> None:
    modules = "onbeat.speculative_config, onbeat.engine.engine_config"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("content", "num_lookahead"),
    [
        ({"method": "ngram"}, 0),
        ({"model": "a/b"}, 3),
        ({"method": "eagle", "model": "a"}, 3),
        ({"method": "mtp"}, 3),
    ],
)
def test_a_model_that_drafts_ahead_needs_slots_behind_the_tokens(
    content: dict[str, Any], num_lookahead: int
) -> None:
    config = read_speculative_config(content | {"num_speculative_tokens": 3, "draft_length": "fixed"})
    assert config.for_scheduler(is_ahead=True) == SpeculationConfig(
        num_speculative_tokens=3, draft_length="fixed", num_lookahead_tokens=num_lookahead
    )
