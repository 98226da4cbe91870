from __future__ import annotations

import json
from pathlib import Path

import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.hub.known import DEFAULT_MODEL, KNOWN_MODELS
from onbeat.hub.resolve import resolve_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_directory_and_file_are_taken_as_they_are(directory: Path) -> None:
    files = resolve_model(str(directory))
    assert (files.kind, files.path, files.name) == ("hf", directory, str(directory))
    (directory / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(directory / "model.gguf")).kind == "gguf"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_a_directory_lacks_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match="lacks " + name.replace("model.", r"\*.")):
        resolve_model(str(directory))


def test_weights_in_parts_need_all_parts_and_their_index(directory: Path) -> None:
    """An interrupted download leaves some."""
    parts = [f"model-0000{k}-of-00009.safetensors" for k in range(1, 10)]
    (directory / "model.safetensors").rename(directory / parts[3])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json$"):
        resolve_model(str(directory))
    index = {"weight_map": {str(k): part for k, part in enumerate(parts)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"lacks {', '.join(parts[:3])}, 5 more"):
        resolve_model(str(directory))
    assert resolve_model(str(directory), needs_weights=False).kind == "hf"
    for part in parts:
        (directory / part).write_text("{}")
    assert resolve_model(str(directory)).kind == "hf"


def test_a_damaged_index_gets_as_far_as_its_own_error(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[]")
    assert resolve_model(str(directory)).kind == "hf"


def test_a_single_part_needs_no_index(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    assert resolve_model(str(directory)).kind == "hf"


def test_random_weights_need_no_weight_files(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert resolve_model(str(directory), needs_weights=False).kind == "hf"


def test_pickled_weights_get_as_far_as_their_own_error(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert resolve_model(str(directory)).kind == "hf"


def test_directory_of_a_gguf_file_says_to_pass_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"some\.gguf"):
        resolve_model(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"/model\.safetensors .*\.gguf"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "~/no-such-model", "folder/file.gguf", "x.gguf"]
)
def test_missing_path(name: str) -> None:
    with pytest.raises(ModelLoadError, match="not exist"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "smollm2-135m"])
def test_near_match(name: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m-instruct"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["", "what?", "a/b/c", "https://example.org/model", "a/b:", "ollama.com/a/b:c"]
)
def test_no_match(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    assert "Did you mean" not in str(caught.value)


def test_known_model_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelLoadError, match=f"`onbeat models fetch {DEFAULT_MODEL}`"):
        resolve_model(DEFAULT_MODEL, offline=True)
    model = KNOWN_MODELS[DEFAULT_MODEL]
    path = tmp_path / "onbeat/models" / model.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.file_bytes)
    assert resolve_model(DEFAULT_MODEL, offline=True).path == path


def test_what_has_no_revisions_refuses_one(directory: Path) -> None:
    (directory / "model.gguf").write_bytes(b"GGUF")
    for name in (str(directory), str(directory / "model.gguf"), DEFAULT_MODEL):
        with pytest.raises(ModelLoadError, match="'v2'"):
            resolve_model(name, revision="v2")


def test_table_is_well_formed() -> None:
    assert DEFAULT_MODEL in KNOWN_MODELS
    for name, model in KNOWN_MODELS.items():
        assert name == model.name == name.lower()
        assert all("==" in wheel.requirement and len(wheel.sha256) == 64 for wheel in model.wheels)
        assert len(model.file_sha256) == 64


def test_a_split_file_is_its_first_part_and_needs_all(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"GGUF")
    assert resolve_model(str(parts[2])).path == parts[0]
    parts[0].unlink()
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"3.*m-00001-of-00003\.gguf.*m-00002-of-00003\.gguf"):
        resolve_model(str(parts[2]))
