"""GGUF files of a hub's repository, by llama.cpp's and Ollama's names for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from onbeat.core.errors import ModelLoadError
from onbeat.hub.files import FetchStatus
from onbeat.hub.resolve import resolve_model
from tests.cpu.hub.fake_hub import serve_repository

FILES = {
    "README.md": b"",
    "config.json": b"{}",
    "tiny-Q4_K_M.gguf": b"four bits",
    "tiny-Q8_0.gguf": b"eight bits",
    "BF16/tiny-BF16-00001-of-00002.gguf": b"first half",
    "BF16/tiny-BF16-00002-of-00002.gguf": b"second half",
    "mmproj-F16.gguf": b"eyes",
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def hub_of(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with serve_repository(files) as (address, downloaded):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield downloaded


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("owner/model:Q8_0", ["tiny-Q8_0.gguf"]),
        ("hf.co/owner/model:q8_0", ["tiny-Q8_0.gguf"]),
        ("huggingface.co/owner/model:tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("owner/model", ["tiny-Q4_K_M.gguf"]),
        ("hf.co/owner/model:latest", ["tiny-Q4_K_M.gguf"]),
        ("owner/model:BF16", [name for name in FILES if "BF16" in name]),
    ],
)
def test_a_tag_chooses_the_file_which_is_fetched_alone_and_once(
    name: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FetchStatus] = []
    with hub_of(FILES, monkeypatch) as downloaded:
        files = resolve_model(name, progress=seen.append)
        assert sorted(downloaded) == fetched
    assert (files.kind, files.name) == ("gguf", name)
    assert files.path.read_bytes() == FILES[fetched[0]]
    messages = [status.message for status in seen]
    assert messages[0].startswith("mmproj-F16.gguf ")
    assert f" {', '.join(fetched)} from http" in messages[1]
    # From now on the cache has it, whatever the hub does.
    assert resolve_model(name) == files == resolve_model(name, offline=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "owner/model:Q5_K_M",
            r"owner/model .* GGUF .* 'Q5_K_M'; .* :BF16, :Q4_K_M, :Q8_0",
        ),
        ("owner/model:mmproj-F16.gguf", "GGUF model for 'mmproj-F16.gguf'"),
        ("owner/model:_0", "GGUF model for '_0'"),
    ],
)
def test_what_there_is_is_listed(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of(FILES, monkeypatch) as downloaded, pytest.raises(ModelLoadError, match=message):
        resolve_model(name)
    assert downloaded == []


def test_safetensors_come_before_gguf_where_there_is_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    both = FILES | {"tokenizer.json": b"{ }", "model.safetensors": b"numbers"}
    with hub_of(both, monkeypatch) as downloaded:
        assert resolve_model("owner/model").kind == "hf"
        assert sorted(downloaded) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert resolve_model("owner/model:Q8_0").kind == "gguf"


def test_a_repository_without_gguf_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        hub_of({"config.json": b"{}"}, monkeypatch),
        pytest.raises(ModelLoadError, match=r"owner/model.*'Q8_0'"),
    ):
        resolve_model("owner/model:Q8_0")


def test_offline_lists_what_the_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of(FILES, monkeypatch):
        resolve_model("owner/model:Q8_0")
    with pytest.raises(ModelLoadError, match=r"owner/model.*'BF16'"):
        resolve_model("owner/model:BF16", offline=True)
    assert resolve_model("owner/model", offline=True).path.name == "tiny-Q8_0.gguf"  # the only one there


def test_a_part_that_the_hub_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: value for name, value in FILES.items() if "00002-of" not in name}
    with (
        hub_of(files, monkeypatch),
        pytest.raises(ModelLoadError, match=r"BF16/tiny-BF16-00002-of-00002\.gguf.*BF16/tiny-BF16-00001"),
    ):
        resolve_model("owner/model:BF16")
