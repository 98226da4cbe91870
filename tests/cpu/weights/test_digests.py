"""Whether two processes have loaded the same files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.engine.weights.digests import MOST_PAGES, PAGE_BYTES, unchanged
from onbeat.hub.files import ModelFiles


def digests(path: Path) -> dict[str, str]:
    with unchanged(ModelFiles(kind="hf", path=path, name="m")) as found:
        pass
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "a.safetensors", "README.md"):
        (tmp_path / name).write_bytes(name.encode() * 5000)
    return tmp_path


def test_contents_count_and_times_do_not(model: Path) -> None:
    before = digests(model)
    assert sorted(before) == ["a.safetensors", "config.json"]
    content = (model / "a.safetensors").read_bytes()
    (model / "new").write_bytes(content)
    (model / "new").rename(model / "a.safetensors")  # as a cache writes the same file again
    os.utime(model / "config.json", (1, 1))
    (model / "README.md").write_text("other")
    assert digests(model) == before
    (model / "a.safetensors").write_bytes(content[:-1] + b"!")
    after = digests(model)
    assert after["config.json"] == before["config.json"]
    assert after["a.safetensors"] != before["a.safetensors"]
    (model / "b.safetensors").touch()
    assert digests(model) != after


def test_of_a_large_file_pages_all_over_it_count(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00002.gguf"
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(b"GGUF")
    with path.open("wb") as file:
        file.truncate(3 * MOST_PAGES * PAGE_BYTES)
    before = digests(first)
    assert sorted(before) == [first.name, path.name]
    with path.open("r+b") as file:
        file.seek(2 * MOST_PAGES * PAGE_BYTES)
        file.write(b"x" * 3 * PAGE_BYTES)  # a tensor of a few pages
    assert digests(first) != before


def test_files_that_change_while_they_are_loaded_are_refused(model: Path) -> None:
    def replaced() -> None:
        with unchanged(ModelFiles(kind="hf", path=model, name="m")):
            (model / "new").write_bytes((model / "a.safetensors").read_bytes())
            (model / "new").rename(model / "a.safetensors")

    with pytest.raises(ConfigError, match=r"a\.safetensors"):
        replaced()
