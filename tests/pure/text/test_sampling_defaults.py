"""What models' files recommend to sample with: whose values are taken, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from onbeat.core.errors import ConfigError
from onbeat.text.sampling_defaults import sampling_defaults

QWEN3 = {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def folder(path: Path, content: dict[str, Any] | None) -> Path:
    path.mkdir(exist_ok=True)
    if content is not None:
        (path / "generation_config.json").write_text(json.dumps(content))
    return path


def test_a_folders_values_are_taken_and_those_of_the_flags_win(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "a", QWEN3), folder(tmp_path / "b", {"min_p": 0.1, "temperature": None})
    read = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(model, "auto") == read
    assert sampling_defaults(model, "vllm") == {}
    assert sampling_defaults(model, str(other)) == {"min_p": 0.1}
    override = {"temperature": 0.5, "max_new_tokens": 64}
    assert sampling_defaults(model, "auto", override) == {**read, "temperature": 0.5, "max_tokens": 64}
    assert sampling_defaults(model, "vllm", override) == {"temperature": 0.5, "max_tokens": 64}
    assert sampling_defaults(folder(tmp_path / "c", None), "auto") == {}
    assert sampling_defaults(folder(tmp_path / "d", {"top_k": -1, "repetition_penalty": 1.05}), "auto") == {
        "top_k": 0,
        "repetition_penalty": 1.05,
    }


def test_a_gguf_file_says_it_in_the_keys_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("temp", 0.6), ("top_p", 0.95), ("penalty_repeat", 1.05), ("mirostat_tau", 5.0)):
        writer.add_float32(f"general.sampling.{key}", value)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sampling_defaults(path, "auto") == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
    }
    assert sampling_defaults(path, "vllm") == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": 7}, "temperature is 7"),
        ({"top_p": "0.9"}, "top_p is '0.9',"),
        ({"top_k": True}, "top_k is True"),
    ],
)
def test_a_value_that_no_request_may_have_is_named(
    content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*--generation-config vllm"):
        sampling_defaults(folder(tmp_path / "a", content), "auto")


def test_a_folder_that_was_asked_for_must_have_the_file_and_an_override_known_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b/generation_config\.json"):
        sampling_defaults(tmp_path, str(folder(tmp_path / "b", None)))
    with pytest.raises(ConfigError, match="top_k"):
        sampling_defaults(tmp_path, "auto", {"temprature": 1})
